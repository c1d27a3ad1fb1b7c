"""`ooospec verify`: outputs with speculation against outputs without."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ooospec.bench.compare import Comparison, compare
from ooospec.bench.datasets import BENCHMARKS, BenchRequest, load_benchmark, sample
from ooospec.demo.examples import examples
from ooospec.errors import UsageError
from ooospec.methods import METHODS
from ooospec.runtime import Decoder


def _requests(benchmark: str, data: Path | None, limit: int, seed: int) -> list[BenchRequest]:
    if benchmark == "examples":
        return examples()[:limit]
    if benchmark not in BENCHMARKS:
        raise UsageError(f"Unknown benchmark {benchmark!r}; choose one of examples, {', '.join(BENCHMARKS)}.")
    return sample(load_benchmark(benchmark, data), limit, seed)


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What is compared."""

    benchmark: str
    data: Path | None
    limit: int
    seed: int
    methods: tuple[str, ...]
    max_new_tokens: int
    prefix: str


def run_verify(load: Callable[[], Decoder], settings: VerifySettings, as_json: bool) -> bool:
    """Print identical n/N per method and each divergence; False when one is wider than a rounding tie."""
    methods = settings.methods
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise UsageError(f"Unknown methods {', '.join(unknown) or '(none given)'}; choose from {', '.join(METHODS)}.")
    requests = _requests(settings.benchmark, settings.data, settings.limit, settings.seed)
    comparisons: list[Comparison] = []
    with load() as decoder:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("verify", total=len(requests))
            for request in requests:
                compared = compare(
                    decoder, request, ["ar", *methods], max_new_tokens=settings.max_new_tokens, prefix=settings.prefix
                )
                comparisons.append(compared)
                progress.advance(task)
        warnings = decoder.warnings
    report = [_row(method, comparisons) for method in methods]
    if as_json:
        sys.stdout.write(json.dumps({"methods": report, "warnings": warnings}) + "\n")
    else:
        _print(report, warnings)
    return all(d["tie"] for row in report for d in row["divergences"])


def _row(method: str, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    found = [(c.request.id, c.divergences[method]) for c in comparisons if method in c.divergences]
    results = [c.results[method] for c in comparisons]
    hints = [r.hint for r in results if r.hint is not None]
    return {
        "method": method,
        "requests": len(comparisons),
        "identical": len(comparisons) - len(found),
        "acceptance_length": round(sum(len(r.output_ids) for r in results) / sum(r.num_rounds for r in results), 3),
        "total_speedup": round(
            sum(c.results["ar"].total_ms for c in comparisons) / sum(r.total_ms for r in results), 3
        ),
        "decode_speedup": round(
            sum(c.results["ar"].decode_ms for c in comparisons)
            / sum(c.results[method].decode_ms_beside(c.results["ar"]) for c in comparisons),
            3,
        ),
        "hints_by_first_round": sum(hint.ready_round == 0 for hint in hints),
        "mean_payload_bytes": round(sum(h.payload_bytes for h in hints) / len(hints), 1) if hints else None,
        "divergences": [
            {
                "request": name,
                "position": d.position,
                "top2_gap": round(d.gap, 4),
                "spacing": d.spacing,
                "tie": d.is_tie,
            }
            for name, d in found
        ],
    }


def _print(report: Sequence[dict[str, Any]], warnings: dict[str, int]) -> None:
    console = Console()
    for row in report:
        hints = ""
        if row["mean_payload_bytes"] is not None:
            early = f"{row['hints_by_first_round']}/{row['requests']}"
            hints = f", hint in the first round {early}, {row['mean_payload_bytes']} bytes"
        console.print(
            f"[bold]{row['method']:9}[/bold] identical {row['identical']}/{row['requests']}, tokens per round "
            f"{row['acceptance_length']:.2f}, total {row['total_speedup']:.2f}x, "
            f"decode {row['decode_speedup']:.2f}x{hints}"
        )
        for d in row["divergences"]:
            kind = "rounding tie" if d["tie"] else "[bold red]NOT EXPLAINED BY ROUNDING[/bold red]"
            console.print(
                f"    {d['request']}: first difference at token {d['position']}, top-2 gap {d['top2_gap']} "
                f"(dtype spacing {d['spacing']}): {kind}"
            )
    if warnings:
        console.print(f"warnings: {warnings}")
