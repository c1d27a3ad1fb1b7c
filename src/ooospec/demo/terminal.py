"""Draw a comparison in the terminal: the call, a table, and a timeline with every token coloured by its source."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ooospec.bench.compare import Comparison, Divergence
from ooospec.chat.codec import TextCodec
from ooospec.console import SOURCE_COLOURS
from ooospec.generation import Generation

BAR_WIDTH = 62
METHOD_NAMES = {"ar": "AR", "lookup": "lookup", "toolspec": "ToolSpec", "ooo": "OoO-Spec"}


def call_text(name: str, arguments: Mapping[str, object]) -> str:
    """Write a call like a function call."""
    inside = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{name}({inside})"


def _verdict(method: str, first: str, divergence: Divergence | None) -> Text:
    if method == first:
        return Text("reference", style="dim")
    if divergence is None:
        return Text("identical", style="green")
    if divergence.is_tie:
        return Text("tie flipped", style="yellow")
    return Text("DIFFERENT", style="bold red")


def divergence_note(method: str, divergence: Divergence) -> Text:
    """Say where an output differs and how close the target's choice was."""
    return Text(
        f"{METHOD_NAMES.get(method, method)} differs at token {divergence.position}: the two best logits are "
        f"{divergence.gap:.3f} apart there, the dtype's spacing is {divergence.spacing:.3f}",
        style="yellow" if divergence.is_tie else "bold red",
    )


def methods_table(comparison: Comparison) -> Table:
    """Tabulate times and rounds of every method."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("method", "output", "total", "", "prefill", "decode", "", "rounds", "tok/rnd"):
        table.add_column(heading, justify="left" if heading in ("method", "output") else "right", no_wrap=True)
    first = next(iter(comparison.results))
    base = comparison.results[first]
    for method, result in comparison.results.items():
        table.add_row(
            METHOD_NAMES.get(method, method),
            _verdict(method, first, comparison.divergences.get(method)),
            f"{result.total_ms / 1e3:.2f}s",
            f"{base.total_ms / result.total_ms:.2f}x",
            f"{result.prefill_ms / 1e3:.2f}s",
            f"{result.decode_ms_beside(base) / 1e3:.2f}s",
            f"{base.decode_ms / result.decode_ms_beside(base):.2f}x",
            str(result.num_rounds),
            f"{result.acceptance_length:.2f}",
            style="bold" if method == "ooo" else "",
        )
    return table


def _column(time_ms: float, total_ms: float) -> int:
    return min(BAR_WIDTH, max(0, round(time_ms / total_ms * BAR_WIDTH)))


def _bar(segments: list[tuple[float, float, str, str]], total_ms: float) -> Text:
    """Draw (start, end, character, style) segments on one line."""
    cells: list[tuple[str, str]] = [(" ", "")] * BAR_WIDTH
    for start, end, character, style in segments:
        left = min(_column(start, total_ms), BAR_WIDTH - 1)
        for index in range(left, max(left + 1, _column(end, total_ms))):
            cells[index] = (character, style)
    return Text.assemble(*cells)


def timeline(result: Generation) -> RenderableType:
    """Draw what target and sidecar did when."""
    total = result.total_ms
    target = [(0.0, result.rounds[0].start_ms, "━", "grey50")]
    for number, commit in enumerate(result.rounds):
        drafted = next((source for source in commit.sources if source != "target"), "target")
        style = SOURCE_COLOURS.get(drafted, "white")
        target.append((commit.start_ms, commit.start_ms + commit.verify_ms, "▓" if number % 2 else "█", style))
    lines = [Text("target   ", style="dim") + _bar(target, total)]
    hint = result.hint
    if hint is not None and (hint.wave_ms or hint.ready_ms):
        end = hint.wave_ms or result.total_ms
        sidecar = [
            (0.0, float(hint.prefill_ms or end), "━", "grey50"),
            (float(hint.prefill_ms), float(end), "█", "green3"),
        ]
        lines.append(Text("sidecar  ", style="dim") + _bar(sidecar, max(total, end)))
    scale = Text(" " * 9 + "0 s" + f"{total / 1e3:.1f} s".rjust(BAR_WIDTH - 3), style="dim")
    if hint is not None and hint.ready_round is not None:
        note = f"hint {hint.payload_bytes} bytes, from round {hint.ready_round + 1} of {result.num_rounds}"
        if hint.busy_round_ms is not None and hint.idle_round_ms is not None:
            note += f"; rounds {hint.busy_round_ms:.0f} ms beside the wave, {hint.idle_round_ms:.0f} after"
        return Group(*lines, scale, Text(" " * 9 + note, style="dim"))
    return Group(*lines, scale)


def coloured_output(result: Generation, codec: TextCodec) -> Text:
    """Show the output with each token in the colour of its source, one background stripe per round."""
    text = Text()
    stream = codec.stream()
    for number, commit in enumerate(result.rounds):
        for token, source in zip(commit.tokens, commit.sources, strict=True):
            shown = "⏎EOS" if token in codec.eos_ids else stream.push([token])
            style = SOURCE_COLOURS.get(source, "white") + (" on grey15" if number % 2 else "")
            text.append(shown, style=style)
    return text


def legend() -> Text:
    """Explain the colours."""
    words = {"target": "target itself"}
    parts = [Text("■ ", style=colour) + Text(words.get(name, name) + "  ") for name, colour in SOURCE_COLOURS.items()]
    return (
        Text("tokens from: ", style="dim") + Text.assemble(*parts) + Text("(shaded: every second round)", style="dim")
    )


def show(console: Console, comparison: Comparison, codec: TextCodec) -> None:
    """Print one comparison."""
    question = str(comparison.request.messages[-1]["content"]).strip()
    question = question if len(question) < 300 else "… " + question[-300:]
    last = list(comparison.results.values())[-1]
    calls = [call_text(call.name, call.arguments) for call in last.calls] or [last.text.strip()[:200]]
    console.print(Rule(f"[bold]{comparison.request.id}", align="left", style="dim"))
    console.print(Text(question, style="italic"))
    for call in calls:
        console.print(Text("→ ", style="bold green") + Text(call, style="bold"))
    console.print(methods_table(comparison))
    for method, divergence in comparison.divergences.items():
        console.print(divergence_note(method, divergence))
    console.print(timeline(last))
    console.print(coloured_output(last, codec))
    console.print()
