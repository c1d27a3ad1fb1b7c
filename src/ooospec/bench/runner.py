"""The benchmark loop: per request every method back to back in rotated order, under every condition."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import filelock
import msgspec

from ooospec.bench.bfcl_checker import leaderboard_verdict
from ooospec.bench.compare import find_divergence
from ooospec.bench.datasets import BenchRequest
from ooospec.bench.fields import token_fields, token_pieces
from ooospec.bench.gold import judge
from ooospec.bench.rows import DivergenceRow, HintRow, Results, RoundRow, Row
from ooospec.errors import UsageError
from ooospec.generation import Generation
from ooospec.memory import Memory
from ooospec.methods import method_named
from ooospec.runtime import Decoder

REFERENCE = "ar"
"""The method whose outputs all others must reproduce."""


@dataclass(frozen=True, slots=True)
class Job:
    """One decoding of a request: a method under a condition. `-` = the condition makes no difference to the method."""

    method: str
    prefix: str
    memory: str
    budget: str


def plan_jobs(
    methods: Sequence[str], prefixes: Sequence[str], memories: Sequence[str], budgets: Sequence[str]
) -> list[Job]:
    """List the jobs of a request; a method that a condition does not concern runs once for all its values."""
    jobs: dict[Job, None] = {}
    for prefix, memory, budget in itertools.product(prefixes, memories, budgets):
        for name in methods:
            method = method_named(name)
            drafts = method.max_nodes > 1
            jobs[Job(name, prefix, memory if method.remembers else "-", budget if drafts else "-")] = None
    return list(jobs)


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one benchmark to decode with one target in one placement."""

    target: str
    placement: str
    benchmark: str
    requests: Sequence[BenchRequest]

    @property
    def file_name(self) -> str:
        """Name of the file that holds this cell's memories."""
        plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.target)
        return f"{plain}-{self.placement}-{self.benchmark}.memory"


class Watcher(Protocol):
    """Is told how far the run is."""

    def advance(self, cell: Cell, request: int, job: Job | None, jobs: int) -> None:
        """`jobs` more are done; `job` is about to start."""


class Runner:
    """Runs cells into one output folder."""

    def __init__(self, results: Results, run: int, max_new_tokens: int, watcher: Watcher) -> None:
        self.results, self.run_number = results, run
        self.max_new_tokens, self.watcher = max_new_tokens, watcher
        self._state = results.folder / "state"

    def run_cell(self, decoder: Decoder, cell: Cell, done: set[tuple[str, str, str, str]], jobs: Sequence[Job]) -> None:
        """Decode the requests of a cell that are not done, in order, each method with the memory of its own run."""
        finished = sum((cell.target, cell.placement, cell.benchmark, r.id) in done for r in cell.requests)
        memories = self._load(cell, finished) if finished < len(cell.requests) else defaultdict(Memory)
        for index, request in enumerate(cell.requests):
            if (cell.target, cell.placement, cell.benchmark, request.id) in done:
                self.watcher.advance(cell, index, None, len(jobs))
                continue
            rows = list(self._group(decoder, cell, index, request, memories, jobs))
            finished += 1
            self._save(cell, finished, memories)
            self.results.append(_compared(decoder, request, rows))
            self._file(cell, finished - 2).unlink(missing_ok=True)

    def _group(
        self,
        decoder: Decoder,
        cell: Cell,
        index: int,
        request: BenchRequest,
        memories: Mapping[Job, Memory],
        jobs: Sequence[Job],
    ) -> Iterator[Row]:
        shift = index % len(jobs)
        for order, job in enumerate([*jobs[shift:], *jobs[:shift]]):
            self.watcher.advance(cell, index, job, 0)
            result = decoder.generate(
                list(request.messages),
                request.tools,
                method=job.method,
                prefix=job.prefix,
                memory=memories[job] if job.memory != "cold" else Memory(),
                budget=job.budget if job.budget != "-" else None,
                max_new_tokens=self.max_new_tokens,
            )
            yield self._row(decoder, cell, request, job, order, result)
            self.watcher.advance(cell, index, None, 1)

    def _row(
        self, decoder: Decoder, cell: Cell, request: BenchRequest, job: Job, order: int, result: Generation
    ) -> Row:
        codec = decoder.loaded.codec
        pieces = token_pieces(codec, result.output_ids)
        fields: dict[str, tuple[int, int]] = {}
        sources = [source for commit in result.rounds for source in commit.sources]
        for field, source in zip(token_fields(codec, result.output_ids, pieces), sources, strict=True):
            held, total = fields.get(field, (0, 0))
            fields[field] = held + (source != "target"), total + 1
        quality = judge(result.calls, request.gold) if request.gold is not None else None
        verdict = leaderboard_verdict(request, result.calls) if cell.benchmark == "bfcl" else None
        if quality is not None and verdict is not None:
            quality = replace(quality, arguments=verdict)
        hint = result.hint
        return Row(
            run=self.run_number, target=cell.target, placement=cell.placement, benchmark=cell.benchmark,
            request=request.id, method=job.method, prefix=job.prefix, memory=job.memory, budget=job.budget, order=order,
            prompt_tokens=result.prompt_tokens, cached_tokens=result.cached_tokens, output_ids=list(result.output_ids),
            finish_reason=result.finish_reason, total_ms=round(result.total_ms, 3),
            prefill_ms=round(result.prefill_ms, 3),
            rounds=[
                RoundRow(
                    round(c.start_ms, 2), round(c.propose_ms, 3), round(c.verify_ms, 2), c.lead_tokens, c.drafted,
                    [(source, len(list(run))) for source, run in itertools.groupby(c.sources)],
                )
                for c in result.rounds
            ],
            fields=fields, pieces=pieces, calls=[(call.name, dict(call.arguments)) for call in result.calls],
            names_right=quality.names if quality is not None else None,
            arguments_right=quality.arguments if quality is not None else None,
            hint=HintRow(
                ready_round=hint.ready_round, ready_ms=hint.ready_ms, complete_ms=hint.complete_ms,
                payload_bytes=hint.payload_bytes, function=hint.function, slots=dict(hint.slots),
                prefill_ms=hint.prefill_ms, wave_ms=hint.wave_ms, steps=hint.steps,
            ) if hint is not None and method_named(job.method).hints else None,
        )  # fmt: skip

    # ------------------------------------------------------------------ memories between starts

    def _file(self, cell: Cell, finished: int) -> Path:
        """Name the memories after `finished` requests; those of the last two counts are kept, whenever a kill comes."""
        return self._state / f"{cell.file_name}.{finished}"

    def _load(self, cell: Cell, finished: int) -> defaultdict[Job, Memory]:
        memories: defaultdict[Job, Memory] = defaultdict(Memory)
        if not finished:
            return memories
        try:
            data = self._file(cell, finished).read_bytes()
        except FileNotFoundError:
            raise UsageError(
                f"{self._state} lacks what the methods remembered after {finished} requests of {cell.benchmark}; "
                "without it the rest would be measured under another condition. Choose another --out."
            ) from None
        for key, saved in msgspec.msgpack.decode(data, type=dict[str, bytes]).items():
            memories[Job(*key.split("|"))] = Memory(saved)
        return memories

    def _save(self, cell: Cell, finished: int, memories: Mapping[Job, Memory]) -> None:
        self._state.mkdir(exist_ok=True)
        saved = {"|".join((j.method, j.prefix, j.memory, j.budget)): m.dump() for j, m in memories.items()}
        file = self._file(cell, finished)
        temporary = file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.msgpack.encode(saved))
        temporary.replace(file)


def _compared(decoder: Decoder, request: BenchRequest, rows: Sequence[Row]) -> list[Row]:
    """Compare each row with plain decoding under the same prefix condition."""
    reference = {row.prefix: row.output_ids for row in rows if row.method == REFERENCE}
    compared = []
    for row in rows:
        found = find_divergence(decoder, request, reference[row.prefix], row.output_ids)
        if found is not None:
            divergence = DivergenceRow(found.position, round(found.gap, 5), found.spacing, found.is_tie)
            row = msgspec.structs.replace(row, identical=False, divergence=divergence)
        elif row.method != REFERENCE:
            row = msgspec.structs.replace(row, pieces=[])
        compared.append(row)
    return compared


def whole_groups(rows: Sequence[Row], jobs: Sequence[Job]) -> list[Row]:
    """Keep the groups in which every job has its row."""
    groups: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    kept = []
    for group in groups.values():
        found = {Job(row.method, row.prefix, row.memory, row.budget) for row in group}
        if found == set(jobs) and len(group) == len(found):
            kept += group
    return kept


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Keep two runs out of one folder. Raises UsageError."""
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UsageError(f"Another run writes to {folder}; wait for it or choose another --out.") from None
    try:
        yield
    finally:
        lock.release()


def quality_faults(rows: Sequence[Row], dtype: str) -> list[str]:
    """In float32, list the outputs that differ from plain decoding: none may."""
    if dtype != "float32":
        return [f"{r.request}/{r.method}" for r in rows if r.divergence is not None and not r.divergence.tie]
    return [f"{r.request}/{r.method}" for r in rows if not r.identical]
