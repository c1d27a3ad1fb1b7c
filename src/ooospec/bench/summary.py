"""From rows to the numbers of a report. Times are compared request by request with plain decoding of the same kind."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ooospec.bench.rows import Row
from ooospec.bench.runner import REFERENCE
from ooospec.methods import METHODS


class Condition(NamedTuple):
    """What is held fixed in one table."""

    placement: str
    prefix: str
    memory: str
    budget: str

    def __str__(self) -> str:
        return f"{self.placement} placement, {self.prefix} prefix, {self.memory} memory, {self.budget} budget"


class Spread(NamedTuple):
    """Quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One method in one cell (target x benchmark) under one condition, over `requests` requests."""

    target: str
    benchmark: str
    method: str
    requests: int
    identical: int
    unexplained: int
    """Outputs that differ beyond a rounding tie."""
    tokens_per_round: float
    """Acceptance length: committed tokens / rounds, bonus included."""
    rounds: float
    drafted: float
    """Tree nodes a round, root not counted."""
    total_speedup: float
    """Ratio of summed total times."""
    rate_speedup: float
    """Ratio of mean tokens per second (the papers' formula)."""
    decode_speedup: float
    """Ratio of the summed times that are left when plain decoding's prefill is taken off both."""
    spread: Spread
    """Quartiles of the ratio of total times over requests."""
    total_ms: float
    prefill_ms: float
    verify_ms: float
    host_ms: float
    """Means a request: prefill up to the first round's start and its pass, later passes, everything else."""
    host_ms_a_round: float
    host_share: float
    """Share of host time in the time of rounds."""
    names_right: tuple[int, int]
    arguments_right: tuple[int, int]
    by_source: dict[str, int]
    by_field: dict[str, tuple[int, int]]
    round_sizes: Counter[int]
    ready_rounds: Counter[str]
    ready_ms: Spread | None
    payload_bytes: float | None


def conditions(rows: Iterable[Row]) -> list[Condition]:
    """List the conditions that occur, methods that a condition does not concern left aside."""
    every = {Condition(r.placement, r.prefix, r.memory, r.budget) for r in rows}
    found = {c for c in every if "-" not in c} or {c._replace(memory="warm", budget="measured") for c in every}
    return sorted(found, key=lambda c: (c.placement != "split", c.prefix != "warm", c.memory != "warm", c.budget))


def rows_of(rows: Iterable[Row], condition: Condition) -> list[Row]:
    """Choose the rows of a condition, with those of methods it does not concern."""
    return [
        row
        for row in rows
        if (row.placement, row.prefix) == condition[:2]
        and row.memory in (condition.memory, "-")
        and row.budget in (condition.budget, "-")
    ]


def summarize(rows: Sequence[Row]) -> list[Summary]:
    """Summarize the rows of one condition, cell by cell, methods in the registry's order."""
    cells: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row.target, row.benchmark][row.method].append(row)
    summaries = []
    for (target, benchmark), methods in cells.items():
        reference = {row.request: row for row in methods.get(REFERENCE, [])}
        known = [*METHODS, *sorted(set(methods) - set(METHODS))]
        for method in sorted(methods, key=known.index):
            summaries.append(_summary(target, benchmark, method, methods[method], reference))
    return summaries


def _summary(target: str, benchmark: str, method: str, rows: Sequence[Row], plain: dict[str, Row]) -> Summary:
    rounds = sum(len(row.rounds) for row in rows)
    tokens = sum(len(row.output_ids) for row in rows)
    pairs = [(plain[row.request], row) for row in rows]
    host = sum(row.host_ms for row in rows)
    in_rounds = sum(row.total_ms - row.rounds[0].start_ms for row in rows)
    ratios = [a.total_ms / row.total_ms for a, row in pairs]
    decoding = [(a.total_ms - a.prefill_ms, row.total_ms - a.prefill_ms) for a, row in pairs]
    hints = [row.hint for row in rows if row.hint is not None]
    ready = [hint.ready_ms for hint in hints if hint.ready_ms is not None]
    fields: dict[str, tuple[int, int]] = {}
    for row in rows:
        for field, (held, total) in row.fields.items():
            before = fields.get(field, (0, 0))
            fields[field] = before[0] + held, before[1] + total
    return Summary(
        target=target, benchmark=benchmark, method=method, requests=len(rows),
        identical=sum(row.identical for row in rows),
        unexplained=sum(row.divergence is not None and not row.divergence.tie for row in rows),
        tokens_per_round=tokens / rounds, rounds=rounds / len(rows),
        drafted=sum(r.drafted for row in rows for r in row.rounds) / rounds,
        total_speedup=sum(a.total_ms for a, _ in pairs) / sum(row.total_ms for row in rows),
        rate_speedup=statistics.mean(_rate(row) for row in rows) / statistics.mean(_rate(a) for a, _ in pairs),
        decode_speedup=sum(a for a, _ in decoding) / max(1e-3, sum(b for _, b in decoding)),
        spread=_spread(ratios),
        total_ms=statistics.mean(row.total_ms for row in rows),
        prefill_ms=statistics.mean(row.prefill_ms for row in rows),
        verify_ms=statistics.mean(row.verify_ms for row in rows),
        host_ms=host / len(rows), host_ms_a_round=host / rounds, host_share=host / in_rounds,
        names_right=_count(row.names_right for row in rows),
        arguments_right=_count(row.arguments_right for row in rows),
        by_source=dict(sum((_sources(row) for row in rows), Counter())),
        by_field=fields,
        round_sizes=Counter(r.committed for row in rows for r in row.rounds),
        ready_rounds=Counter("never" if h.ready_round is None else str(h.ready_round) for h in hints),
        ready_ms=_spread(ready) if ready else None,
        payload_bytes=statistics.mean(h.payload_bytes for h in hints) if hints else None,
    )  # fmt: skip


def _rate(row: Row) -> float:
    return len(row.output_ids) / row.total_ms * 1e3


def _sources(row: Row) -> Counter[str]:
    counts: Counter[str] = Counter()
    for r in row.rounds:
        for source, count in r.sources:
            counts[source] += count
    return counts


def _count(flags: Iterable[bool | None]) -> tuple[int, int]:
    known = [flag for flag in flags if flag is not None]
    return sum(known), len(known)


def _spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def best(summaries: Sequence[Summary]) -> dict[tuple[str, str], str]:
    """Name the method with the best total time of each cell (target, benchmark)."""
    found: dict[tuple[str, str], Summary] = {}
    for summary in summaries:
        key = summary.target, summary.benchmark
        if key not in found or summary.total_speedup > found[key].total_speedup:
            found[key] = summary
    return {key: summary.method for key, summary in found.items()}
