"""What a benchmark run writes: one JSON line a request, method and condition, and the provenance of every start.

`DIR/rows.jsonl` and `DIR/runs.jsonl`. A group (all methods and conditions of one request) is written in one piece, so
that a run that was killed goes on at the first group that is not whole. `rows.jsonl.gz` is read as well, and unpacked
when rows are added.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ooospec.errors import UsageError

S = TypeVar("S", bound=msgspec.Struct)


class RoundRow(msgspec.Struct, frozen=True, array_like=True):
    """One round; times in milliseconds from request arrival."""

    start_ms: float
    propose_ms: float
    verify_ms: float
    lead_tokens: int
    drafted: int
    sources: list[tuple[str, int]]
    """Runs of committed tokens with the proposer whose draft held them; `target` = bonus."""

    @property
    def committed(self) -> int:
        """Number of tokens this round added."""
        return sum(count for _, count in self.sources)


class HintRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the hint."""

    ready_round: int | None
    ready_ms: float | None
    complete_ms: float | None
    payload_bytes: int
    function: str | None
    slots: dict[str, Any]
    prefill_ms: int = 0
    wave_ms: int = 0
    steps: int = 0


class DivergenceRow(msgspec.Struct, frozen=True):
    """Where an output leaves that of plain decoding, and the gap of the two best logits there."""

    position: int
    top2_gap: float
    spacing: float
    tie: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request decoded by one method under one condition."""

    run: int
    target: str
    placement: str
    benchmark: str
    request: str
    method: str
    prefix: str
    memory: str
    """cold, warm, or `-` for a method that remembers nothing but how often its drafts were right."""
    budget: str
    """measured, fixed, or `-` for a method that drafts nothing."""
    order: int
    """Place in the back-to-back order of this request."""
    prompt_tokens: int
    cached_tokens: int
    output_ids: list[int]
    finish_reason: str
    total_ms: float
    prefill_ms: float
    rounds: list[RoundRow]
    fields: dict[str, tuple[int, int]]
    """Part of the call -> (committed tokens that a draft held, committed tokens)."""
    pieces: list[str]
    """Text of every committed token; empty where the output equals that of plain decoding, whose row has it."""
    calls: list[tuple[str, dict[str, Any]]]
    names_right: bool | None = None
    arguments_right: bool | None = None
    identical: bool = True
    divergence: DivergenceRow | None = None
    hint: HintRow | None = None

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Name the group of rows that were measured back to back."""
        return self.target, self.placement, self.benchmark, self.request

    @property
    def verify_ms(self) -> float:
        """Target passes after the prefill's last chunk; the first round's pass counts as prefill."""
        return sum(r.verify_ms for r in self.rounds[1:])

    @property
    def host_ms(self) -> float:
        """Everything from the first round's start on that is not a pass of the target."""
        return self.total_ms - self.rounds[0].start_ms - sum(r.verify_ms for r in self.rounds)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the benchmark command."""

    command: list[str]
    started: str
    revision: str
    versions: dict[str, str]
    machine: dict[str, str]
    settings: dict[str, Any]
    left_out: dict[str, str] = {}
    """Method -> why it was not measured."""


class Results:
    """The files of one output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows_file, self.runs_file = folder / "rows.jsonl", folder / "runs.jsonl"
        self.packed_file = folder / "rows.jsonl.gz"

    def rows(self) -> list[Row]:
        """Read all whole rows; a torn last line is left out."""
        return list(_read(self.packed_file if self._packed() else self.rows_file, Row))

    def _packed(self) -> bool:
        there = self.rows_file.exists() and self.rows_file.stat().st_size > 0
        return self.packed_file.exists() and not there

    def runs(self) -> list[Run]:
        """Read the provenance."""
        return list(_read(self.runs_file, Run))

    def append(self, rows: Sequence[Row]) -> None:
        """Add a group in one write and bring it to the disk."""
        if self._packed():
            self.keep(self.rows())
        _append(self.rows_file, rows)

    def add_run(self, run: Run) -> int:
        """Add the provenance of a start; return its number."""
        number = len(self.runs())
        _append(self.runs_file, [run])
        return number

    def keep(self, rows: Iterable[Row]) -> None:
        """Replace the rows by `rows` (the whole groups), atomically."""
        temporary = self.rows_file.with_suffix(".tmp")
        temporary.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        temporary.replace(self.rows_file)


def _append(path: Path, items: Sequence[msgspec.Struct]) -> None:
    data = b"".join(msgspec.json.encode(item) + b"\n" for item in items)
    with path.open("ab") as file:
        size = file.tell()
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:  # a full disk: leave no torn line behind
            os.truncate(path, size)
            raise


def _read(path: Path, kind: type[S]) -> Iterator[S]:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError:
        return
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is damaged ({error}); fetch it anew or choose another folder.") from error
    decoder = msgspec.json.Decoder(kind)
    lines = data.split(b"\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines) - 1:  # torn by a kill; whatever it was is measured again
                return
            raise UsageError(
                f"{path}, line {number + 1} is not a benchmark row ({error}); remove that line or choose another "
                "folder."
            ) from error


def settings_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the settings that may not change between the starts of one run, as `name: old -> new`."""
    return [f"{key}: {old.get(key)} -> {value}" for key, value in new.items() if old.get(key) != value]
