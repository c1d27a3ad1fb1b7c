"""Run the demonstration."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from ooospec.bench.compare import Comparison, compare
from ooospec.bench.datasets import BenchRequest, load_benchmark, sample
from ooospec.demo.examples import examples
from ooospec.demo.page import render_page
from ooospec.demo.terminal import METHOD_NAMES, legend, show
from ooospec.errors import UsageError
from ooospec.runtime import Decoder

METHODS = ("ar", "toolspec", "ooo")
MAX_NEW_TOKENS = 160


def _requests(console: Console, data: Path | None, limit: int) -> list[BenchRequest]:
    requests = examples()
    if limit:
        try:
            requests += sample([r for r in load_benchmark("bfcl", data) if "-multiple" in r.id], limit, seed=1)
        except UsageError as error:
            if data is not None:
                raise
            console.print(f"[dim]Without BFCL requests. {error}[/dim]")
    return requests


def conditions(decoder: Decoder, prefix: str) -> str:
    """Say in one line what was measured with what."""
    loaded, place = decoder.loaded, decoder.placement
    sidecar = decoder.sidecar_name or "none"
    threads = f", threads: target {place.target_idle}"
    if decoder.sidecar_name:
        threads += f" ({place.target_busy or 'waits'} while the sidecar works), sidecar {place.sidecar}"
    return (
        f"target {loaded.name}, sidecar {sidecar}, {loaded.dtype}, {loaded.device}"
        f"{threads if loaded.device == 'cpu' else ''}; greedy, batch one, {prefix} prefix; clock from request arrival"
    )


def run_demo(console: Console, decoder: Decoder, data: Path | None, limit: int, html: Path | None, prefix: str) -> bool:
    """Show every comparison and a summary; returns True when an output differs by more than a rounding tie."""
    console.print(f"[dim]{conditions(decoder, prefix)}[/dim]")
    console.print(legend())
    comparisons: list[Comparison] = []
    for request in _requests(console, data, limit):
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
            task = progress.add_task(request.id)

            def report(method: str, task: object = task, progress: Progress = progress, name: str = request.id) -> None:
                progress.update(task, description=f"{name}: {METHOD_NAMES[method]}")  # type: ignore[arg-type]

            comparisons.append(compare(decoder, request, METHODS, report, max_new_tokens=MAX_NEW_TOKENS, prefix=prefix))
        show(console, comparisons[-1], decoder.loaded.codec)
    _summary(console, comparisons)
    if html is not None:
        html.write_text(render_page(comparisons, decoder.loaded.codec, conditions(decoder, prefix)), "utf-8")
        console.print(f"Page written to {html}")
    return any(not d.is_tie for c in comparisons for d in c.divergences.values())


def _summary(console: Console, comparisons: list[Comparison]) -> None:
    for method in METHODS[1:]:
        pairs = [(c.results["ar"], c.results[method]) for c in comparisons]
        total = statistics.median(a.total_ms / m.total_ms for a, m in pairs)
        decoding = statistics.median(a.decode_ms / m.decode_ms_beside(a) for a, m in pairs)
        length = sum(len(m.output_ids) for _, m in pairs) / sum(m.num_rounds for _, m in pairs)
        same = sum(method not in c.divergences for c in comparisons)
        console.print(
            f"[bold]{METHOD_NAMES[method]:9}[/bold] identical {same}/{len(pairs)}   median speedup {total:.2f}x "
            f"(decode part {decoding:.2f}x)   tokens per round {length:.2f}"
        )
