"""What each part of the method buys, over recorded outputs of the real target (`replay.py record`), without it.

python benchmarks/ablations.py hints recorded.jsonl trained.hints
python benchmarks/ablations.py hints recorded.jsonl zero-shot.hints --adapter none
python benchmarks/ablations.py table recorded.jsonl trained.hints zero-shot.hints

`hints` runs the real sidecar (one thread, tools' prefix warm) and notes when each answer came. `table` decodes the
recorded outputs again on a simulated clock: a pass costs what was measured for the target (`ooospec doctor`; on one
core ONE_CORE times that, as for `--placement split`), the prompt's new tokens cost PREFILL_MS each, and an answer of
the sidecar can be used by the first tree that is built after it came. Rounds are exact; times are an estimate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from replay import Record, RecordedTarget, read
from transformers import AutoTokenizer

from ooospec.calibration import Calibrator
from ooospec.chat.codec import TextCodec
from ooospec.chat.scanner import CallScanner
from ooospec.chat.style import StyleBook
from ooospec.config import DEFAULT_SIDECAR, DEFAULT_TARGET, cache_dir
from ooospec.core import DecodeContext, FunctionHint, Hint, SlotHint
from ooospec.engine import decode
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.models.resolver import resolve_model
from ooospec.planner import Budget
from ooospec.sidecar.client import signature
from ooospec.sidecar.protocol import Function, Submit, Turn
from ooospec.stopping import Limits
from ooospec.target.cost import CostCurve
from ooospec.verify import Greedy

PREFILL_MS = 12.0
"""Of one prompt token that is not cached, 1.5B target, one core."""
FIRST_CHUNK, CHARS_A_TOKEN = 64, 4.0
ONE_CORE = 1.75
"""A pass on one core against one on two (benchmarks/colocation.py: 537 to 305 ms)."""


class Timed(msgspec.Struct):
    """The answers of the sidecar to one request, with their times from submission."""

    id: str
    function: FunctionHint | None
    function_ms: float
    slots: list[SlotHint]
    slot_ms: list[float]
    complete_ms: float
    steps: int
    serial_tokens: int
    """Tokens of the predicted call, were it written one after the other."""


def take_hints(rows: list[Record], out: Path, adapter: str) -> None:
    """Ask the sidecar about every recorded request."""
    from ooospec.sidecar.adapter import find_adapter, read_habits
    from ooospec.sidecar.predictor import WavePredictor
    from ooospec.sidecar.quantize import load_sidecar

    torch.set_num_threads(1)
    folder = find_adapter(adapter, DEFAULT_SIDECAR)
    loaded = load_sidecar(resolve_model(DEFAULT_SIDECAR), DEFAULT_SIDECAR, "auto", "cpu", folder)
    predictor = WavePredictor(loaded, read_habits(folder))
    with out.open("wb") as sink:
        for number, row in enumerate(rows):
            signatures = tuple(signature(tool) for tool in row.tools)
            warm = Submit(number, signatures, (Turn("user", "Hello."),))
            for _ in predictor.wave(warm):
                pass
            asked = Submit(number, signatures, tuple(Turn(role, text) for role, text in row.dialogue))
            found = Timed(row.id, None, 0.0, [], [], 0.0, 0, 0)
            start = time.perf_counter()
            for answer in predictor.wave(asked):
                now = (time.perf_counter() - start) * 1e3
                if isinstance(answer, Function):
                    chances = tuple(percent / 100 for percent in answer.percents)
                    names = tuple(row.tools[i].name for i in answer.tools)
                    found.function, found.function_ms = FunctionHint(names, chances), now
                elif answer is not None:
                    tool = row.tools[answer.tool]
                    slot = tool.slots[answer.slot].name
                    value = SlotHint(tool.name, slot, answer.value, answer.present, answer.percent / 100)
                    found.slots.append(value)
                    found.slot_ms.append(now)
            found.complete_ms, found.steps = (time.perf_counter() - start) * 1e3, predictor.stats.steps
            found.serial_tokens = len(loaded.codec.encode(str(_call(found))))
            sink.write(msgspec.json.encode(found) + b"\n")
            sys.stderr.write(f"{number + 1}/{len(rows)} {row.id}: {found.complete_ms:.0f} ms, {found.steps} steps\n")


def _call(found: Timed) -> dict[str, object]:
    name = found.function.names[0] if found.function is not None else ""
    return {"name": name, "arguments": {s.slot: s.value for s in found.slots if s.tool == name and s.present}}


# ---------------------------------------------------------------- decoding again


class Clock(RecordedTarget):
    """A recorded target that knows what its passes cost."""

    def __init__(self, row: Record, vocabulary: int, known: dict[int, list[int]], cost: Callable[[int], float]) -> None:
        super().__init__(row, vocabulary, known)
        new = sum(len(text) for _, text in row.dialogue) / CHARS_A_TOKEN
        self.cost, self.ms = cost, PREFILL_MS * max(0.0, new - FIRST_CHUNK)
        self.first_ms = max(PREFILL_MS * min(new, FIRST_CHUNK), cost(1))
        """The prompt's last chunk, with which the first tree rides."""
        self.plain_ms = self.ms + self.first_ms + (len(row.output) - 1) * cost(1)

    def verify(self, tree, lead=(), all_rows=False):
        extra = self.first_ms - self.cost(1) if not self.committed else 0.0
        self.ms += self.cost(len(tree)) + extra
        return super().verify(tree, lead, all_rows)


Poll = Callable[[Clock, Timed], Hint | None]


def streamed(clock: Clock, found: Timed) -> Hint:
    """Give what has come by now."""
    function = found.function if found.function_ms <= clock.ms else None
    slots = {(s.tool, s.slot): s for s, ms in zip(found.slots, found.slot_ms, strict=True) if ms <= clock.ms}
    return Hint(function, slots, found.complete_ms <= clock.ms)


def joined(clock: Clock, found: Timed) -> Hint | None:
    """Give the hint when all of it is there."""
    return streamed(clock, found) if found.complete_ms <= clock.ms else None


def serial(clock: Clock, found: Timed) -> Hint | None:
    """Give it when a single answer, one token a step, would have been written."""
    step = (found.complete_ms - found.function_ms) / max(1, found.steps - 1)
    done = found.function_ms + step * found.serial_tokens
    everything = Hint(found.function, {(s.tool, s.slot): s for s in found.slots}, True)
    return everything if done <= clock.ms else None


def contradicted(hint: Hint, text: str) -> bool:
    """Tell whether the target has written a name or a value that the hint did not say."""
    scanner = CallScanner()
    scanner.feed(text)
    for call in [*scanner.calls, *([scanner.open] if scanner.open is not None else [])]:
        if call.name is None or call.name.end is None or hint.function is None:
            continue
        name = call.name.of(text)
        if name != hint.function.names[0]:
            return True
        for item in call.items:
            if item.value is not None and item.value.end is not None:
                said = hint.slots.get((name, item.key.of(text)))
                if said is not None and not (said.present and _same(said.value, item.value.of(text))):
                    return True
    return False


def _same(value: object, text: str) -> bool:
    try:
        return bool(json.loads(text, strict=False) == value)
    except ValueError:
        return False


class OneView(StyleBook):
    """Knows one style only: the one seen last, or the template's."""

    def ranked(self, key, defaults):
        return super().ranked(key, defaults)[:1]


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    poll: Poll | None
    trained: bool = True
    method: str = "ooo"
    one_view: bool = False
    drop: bool = False
    """A hint that was contradicted once is not used any more."""


VARIANTS = (
    Variant("ToolSpec", None, method="toolspec"),
    Variant("OoO-Spec without a sidecar", None),
    Variant("zero-shot sidecar", streamed, trained=False),
    Variant("**trained sidecar, as it is**", streamed),
    Variant("joined: nothing before all is there", joined),
    Variant("one serial answer instead of a wave", serial),
    Variant("dropped when contradicted, not re-anchored", streamed, drop=True),
    Variant("one view: a single call style", streamed, one_view=True),
)


def run(
    variant: Variant, rows: list[Record], hints: dict[str, Timed], codec: TextCodec, cost: CostCurve
) -> dict[str, tuple[float, float]]:
    """Return, per benchmark, tokens per round and the estimated speedup of the total time."""
    known = {t: top for r in rows for t, top in zip([r.prompt[-1], *r.output], r.top, strict=False)}
    memories: defaultdict[str, Memory] = defaultdict(Memory)
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    alone = lambda width: ONE_CORE * cost(width)  # noqa: E731
    for row in rows:
        output, memory, found = list[int](), memories[row.benchmark], hints[row.id]
        clock = Clock(row, codec.vocab_size, known, alone)
        if variant.one_view:
            memory._parts.setdefault(f"{StyleBook.__module__}.{StyleBook.__qualname__}", OneView())

        gone = [False]

        def ask(clock: Clock = clock, found: Timed = found, output: list[int] = output,
                gone: list[bool] = gone) -> Hint | None:  # fmt: skip
            hint = variant.poll(clock, found) if variant.poll is not None else None
            gone[0] |= hint is not None and variant.drop and contradicted(hint, codec.decode(output))
            return None if gone[0] else hint

        context = DecodeContext(codec, row.prompt, output, row.tools, row.style_key)
        sources = method_named(variant.method).build(Setup(memory, ask))
        calibrator = memory.part(Calibrator)
        rounds = len(list(
            decode(clock, context, output, sources, Greedy(), Limits(256), Budget(64, cost), calibrator=calibrator)
        ))  # fmt: skip
        assert output == row.output, row.id
        for index, value in enumerate((len(output), rounds, clock.plain_ms, clock.ms)):
            totals[row.benchmark][index] += value
    return {name: (tokens / rounds, plain / spent) for name, (tokens, rounds, plain, spent) in totals.items()}


def print_table(rows: list[Record], trained: dict[str, Timed], zero_shot: dict[str, Timed]) -> None:
    """Print all variants as a Markdown table."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_TARGET))
    codec = TextCodec(tokenizer.backend_tokenizer, [tokenizer.eos_token_id])
    curves = msgspec.json.decode((cache_dir() / "cost_curves.json").read_bytes(), type=dict[str, CostCurve])
    cost = next(curve for key, curve in curves.items() if key.startswith(DEFAULT_TARGET))
    names = list(dict.fromkeys(row.benchmark for row in rows))
    write = sys.stdout.write
    write("| variant | " + " | ".join(names) + " |\n|---|" + "---|" * len(names) + "\n")
    for variant in VARIANTS:
        found = run(variant, rows, trained if variant.trained else zero_shot, codec, cost)
        cells = [f"{found[name][0]:.2f} tokens a round, {found[name][1]:.2f}x" for name in names]
        write(f"| {variant.name} | " + " | ".join(cells) + " |\n")
    for label, hints in (("trained", trained), ("zero-shot", zero_shot)):
        each = [hints[row.id] for row in rows]
        middle = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
        write(
            f"\n{label}: function after {middle([t.function_ms for t in each]):.0f} ms, all after "
            f"{middle([t.complete_ms for t in each]):.0f} ms in {middle([t.steps for t in each])} steps; "
            f"a serial answer has {middle([t.serial_tokens for t in each])} tokens (medians of {len(each)})\n"
        )


def read_hints(file: Path) -> dict[str, Timed]:
    """Read what `hints` wrote."""
    found = (msgspec.json.decode(line, type=Timed) for line in file.read_bytes().splitlines())
    return {timed.id: timed for timed in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("hints")
    taking.add_argument("recorded", type=Path)
    taking.add_argument("out", type=Path)
    taking.add_argument("--adapter", default="auto")
    showing = commands.add_parser("table")
    showing.add_argument("recorded", type=Path)
    showing.add_argument("trained", type=Path)
    showing.add_argument("zero_shot", type=Path)
    options = parser.parse_args()
    rows = list(read(options.recorded))
    if options.command == "hints":
        take_hints(rows, options.out, options.adapter)
        return
    print_table(rows, read_hints(options.trained), read_hints(options.zero_shot))


if __name__ == "__main__":
    main()
