"""`ooospec bench`: settings, checks before anything is loaded, progress, and the end of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ooospec.bench.datasets import BENCHMARKS, BenchRequest, data_folder, load_benchmark, sample, suite
from ooospec.bench.provenance import describe_run
from ooospec.bench.rows import Results, Row, settings_differ
from ooospec.bench.runner import REFERENCE, Cell, Job, Runner, plan_jobs, quality_faults, sole_user, whole_groups
from ooospec.errors import OooSpecError, UsageError
from ooospec.methods import METHODS, Setup, method_named
from ooospec.runtime import Decoder

CONDITIONS = {
    "placement": ("shared", "split"),
    "prefix": ("warm", "cold"),
    "memory": ("warm", "cold"),
    "budget": ("measured", "fixed"),
}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured, and under which conditions."""

    targets: tuple[str, ...]
    sidecar: str | None
    adapter: str | None
    draft: str | None
    benchmarks: tuple[str, ...]
    suite: str
    data: str | None
    methods: tuple[str, ...]
    placement: tuple[str, ...]
    prefix: tuple[str, ...]
    memory: tuple[str, ...]
    budget: tuple[str, ...]
    limit: int | None
    seed: int | None
    max_new_tokens: int
    dtype: str
    device: str | None

    def __post_init__(self) -> None:
        for name, allowed in CONDITIONS.items():
            _check(f"--{name}", getattr(self, name), allowed)
        _check("--benchmarks", self.benchmarks, BENCHMARKS)
        _check("--methods", self.methods, tuple(METHODS))
        if not self.targets:
            raise UsageError("--targets is empty; name at least one model.")

    def fixed(self) -> dict[str, Any]:
        """Return the settings that all starts of one run share."""
        changing = {"targets", "benchmarks", "placement", "limit", "data"}
        return {key: value if not isinstance(value, tuple) else list(value) for key, value in asdict(self).items()
                if key not in changing}  # fmt: skip


def _check(flag: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    wrong = [name for name in given if name not in allowed]
    if wrong or not given:
        raise UsageError(f"{flag}: unknown {', '.join(wrong) or '(nothing given)'}; choose from {', '.join(allowed)}.")


class _Bar:
    """Progress with the cell, the request and the method, and the time left."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._task = progress, progress.add_task("bench", total=total)

    def advance(self, cell: Cell, request: int, job: Job | None, jobs: int) -> None:
        """Show what is going on."""
        method = job.method if job is not None else ""
        text = f"{cell.target} {cell.placement} {cell.benchmark} {request + 1}/{len(cell.requests)} {method:9}"
        self._progress.update(TaskID(self._task), advance=jobs, description=text)


Load = Callable[[str, str], Decoder]
"""Loads a decoder for (target, placement)."""


def run_bench(load: Load, settings: BenchSettings, out: Path, skip_missing: bool) -> Path:
    """Measure everything that is not in `out` yet; return the folder.

    `skip_missing`: methods that cannot run here (a missing package, no fitting draft model) are left out and said so,
    instead of failing. Benchmarks whose data are missing are left out and said so too, as long as one is there.
    Raises UsageError.
    """
    requests = _requests(settings)
    out.mkdir(parents=True, exist_ok=True)
    with sole_user(out):
        results = Results(out)
        _check_same(results, settings, out)
        jobs = len(plan_jobs(settings.methods, settings.prefix, settings.memory, settings.budget))
        cells = len(settings.targets) * len(settings.placement) * sum(map(len, requests.values()))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = _Bar(progress, cells * jobs)
            for target in settings.targets:
                for placement in settings.placement:
                    _run_decoder(load, settings, results, (target, placement), requests, skip_missing, bar)
    return out


def _run_decoder(
    load: Load,
    settings: BenchSettings,
    results: Results,
    place: tuple[str, str],
    requests: dict[str, list[BenchRequest]],
    skip_missing: bool,
    bar: _Bar,
) -> None:
    target, placement = place
    planned = [Cell(target, placement, name, chosen) for name, chosen in requests.items()]
    with load(target, placement) as decoder:
        left_out = _unavailable(decoder, settings.methods)
        if left_out and not skip_missing:
            raise UsageError(next(iter(left_out.values())))
        methods = [name for name in settings.methods if name not in left_out]
        jobs = plan_jobs(methods, settings.prefix, settings.memory, settings.budget)
        mine = {cell.benchmark for cell in planned}
        rows = results.rows()
        here = [r for r in rows if (r.target, r.placement) == place and r.benchmark in mine]
        whole = whole_groups(here, jobs)
        if len(whole) != len(here):
            others = [r for r in rows if (r.target, r.placement) != place or r.benchmark not in mine]
            results.keep([*others, *whole])
        done = {row.group for row in whole}
        wanted = {(target, placement, c.benchmark, r.id) for c in planned for r in c.requests}
        number = (
            -1 if wanted <= done else results.add_run(describe_run(_conditions(settings, decoder, place), left_out))
        )
        runner = Runner(results, number, settings.max_new_tokens, bar)
        for cell in planned:
            runner.run_cell(decoder, cell, done, jobs)
    _fail_loudly([row for row in results.rows() if row.target == target], settings.dtype)


def _conditions(settings: BenchSettings, decoder: Decoder, place: tuple[str, str]) -> dict[str, Any]:
    where = decoder.placement
    return {
        **settings.fixed(),
        "target": place[0],
        "placement": place[1],
        "threads": {"target": where.target_idle, "target_during_wave": where.target_busy, "sidecar": where.sidecar},
        "device": decoder.loaded.device,
        "sidecar_model": decoder.sidecar_name,
        "cost_ms": dict(zip(map(str, decoder.cost.widths), decoder.cost.ms, strict=True)) if decoder.cost else {},
    }


def _requests(settings: BenchSettings) -> dict[str, list[BenchRequest]]:
    data = data_folder(settings.data)
    chosen: dict[str, list[BenchRequest]] = {}
    missing: list[str] = []
    for name in settings.benchmarks:
        try:
            requests = suite(settings.suite, name, load_benchmark(name, data))
        except UsageError as error:
            missing.append(str(error))
            continue
        chosen[name] = sample(requests, None, settings.seed) if settings.seed is not None else list(requests)
        chosen[name] = chosen[name][: settings.limit]
    if not chosen:
        raise UsageError(" ".join(missing))
    for text in missing:
        sys.stderr.write(f"ooospec: left out: {text}\n")
    return chosen


def _check_same(results: Results, settings: BenchSettings, out: Path) -> None:
    wanted = settings.fixed()
    if settings.device is None:  # whatever is best here; the runs have what that was
        del wanted["device"]
    for run in results.runs():
        differing = settings_differ({name: run.settings.get(name) for name in wanted}, wanted)
        if differing:
            raise UsageError(
                f"{out} holds results of other settings ({'; '.join(differing)}); give the same settings to go on with "
                "it, or another --out."
            )


def _unavailable(decoder: Decoder, methods: Sequence[str]) -> dict[str, str]:
    """Find the methods that cannot run with this decoder, and why."""
    draft = decoder.draft.proposer if decoder.draft is not None else None
    found: dict[str, str] = {}
    for name in methods:
        try:
            method_named(name).build(Setup(draft=draft))
        except OooSpecError as error:
            found[name] = str(error)
        if method_named(name).hints and not decoder.sidecar_name and not decoder.left_out:
            found[name] = f"Method {name} needs a sidecar; name one with --sidecar, or leave it out."
    if REFERENCE not in methods:
        raise UsageError(f"--methods must contain {REFERENCE}: all outputs and times are compared with it.")
    return found


def _fail_loudly(rows: Sequence[Row], dtype: str) -> None:
    faults = quality_faults(rows, dtype)
    if faults:
        raise UsageError(
            f"{len(faults)} outputs differ from plain decoding beyond rounding ties, such as {faults[0]}: a bug in "
            "this package. The rows are kept; please report them."
        )
