"""A whole training run and a whole evaluation, from names and folders."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from ooospec.bench.datasets import BENCHMARKS, data_folder, load_benchmark, suite
from ooospec.bench.rows import Results, Row
from ooospec.config import AUTO
from ooospec.errors import UsageError
from ooospec.models.progress import Progress
from ooospec.models.resolver import resolve_model
from ooospec.sidecar.adapter import Habits, check_base, find_adapter, read_habits, shape_of, write_habits
from ooospec.sidecar.predictor import WavePredictor
from ooospec.sidecar.quantize import load_sidecar
from ooospec.target.loading import LoadedModel, check_adapter, chosen_dtype, load_model, parse_device
from ooospec.train.collect import TRACES, is_dev
from ooospec.train.decontaminate import normalized_name
from ooospec.train.evaluate import (
    MIN_ANSWERS,
    Case,
    Tally,
    best_scaling,
    cases_of_examples,
    cases_of_gold,
    cases_of_results,
    evaluate,
)  # fmt: skip
from ooospec.train.packing import pack
from ooospec.train.plots import training_page
from ooospec.train.recipe import Recipe
from ooospec.train.records import Example, fault, read_examples
from ooospec.train.trainer import LOG, Trainer

DEV_REQUESTS = 48
"""Held-out requests that training looks at; calibration takes all."""


HELD_OUT_EACH = 4
"""Held-out requests of a function at most: a set with many of one says little about others."""


def load_traces(paths: Sequence[Path]) -> tuple[list[Example], list[Example]]:
    """Read traces; return (to train on, held out). No function is called on both sides.

    Raises UsageError for files that are missing or damaged.
    """
    found: dict[str, Example] = {}
    for path in paths:
        for example in read_examples(path / TRACES if path.is_dir() else path):
            try:
                reason = fault(example)
            except UsageError as error:
                reason = str(error)
            if reason:
                raise UsageError(f"{path}: example {example.id!r} cannot be trained on ({reason}); remove its line.")
            found[example.fingerprint()] = example
    kept = [example for example in found.values() if example.calls]
    held_out, each = list[Example](), Counter[str]()
    for example in filter(is_dev, kept):
        name = normalized_name(example.calls[0].name)
        each[name] += 1
        held_out += [example] if each[name] <= HELD_OUT_EACH else []
    return [e for e in kept if not is_dev(e)], held_out


def held_out_cases(data: Sequence[Path]) -> list[Case]:
    """Return the held-out requests as cases of an evaluation."""
    return list(cases_of_examples(load_traces(data)[1]))


def run_training(
    path: Path,
    base: str,
    data: Sequence[Path],
    out: Path,
    recipe: Recipe,
    limit: int | None,
    dtype: str,
    device: str | None,
    progress: Progress,
    start: Path | None = None,
) -> tuple[Path, str]:
    """Train, plot, calibrate; return the adapter's folder and what was used. Goes on where an earlier run stopped."""
    examples, held_out = load_traces(data)
    if not examples:
        raise UsageError(
            f"There is nothing to train on: {len(held_out)} examples are held out, no other has a call; collect more."
        )
    examples = examples[:limit]
    adapter = out / "adapter"
    config = json.loads((path / "config.json").read_text("utf-8"))
    if start is not None:
        check_base(read_habits(str(start)), str(start), base, shape_of(config))
    if dtype == AUTO and chosen_dtype(dtype, parse_device(device)) == "float16":
        dtype = "float32"  # small gradients are nothing in float16
    loaded = load_model(path, base, dtype, device)
    trainer = _train(loaded, examples, held_out[:DEV_REQUESTS], out, recipe, progress, start)
    trainer.save_adapter(adapter)
    write_habits(adapter, Habits(base=base, base_shape=shape_of(config), answers_null=True, prior_weight=0.0))
    calibrated = calibrate(path, base, adapter, list(cases_of_examples(held_out)), device, progress)
    used = len(examples) - len(trainer.too_long)
    return adapter, f"trained on {used} of {len(examples)} requests, {len(trainer.too_long)} too long; {calibrated}"


def _train(
    loaded: LoadedModel,
    examples: list[Example],
    held_out: list[Example],
    out: Path,
    recipe: Recipe,
    progress: Progress,
    start: Path | None,
) -> Trainer:
    """Run the optimiser to the end, drawing the plot after every step."""
    dev = [packed for e in held_out if (packed := pack(e, loaded, recipe.max_tokens)) is not None]
    data = hashlib.sha256(msgspec.json.encode([(e.fingerprint(), e.calls) for e in examples])).hexdigest()[:12]
    trainer = Trainer(
        loaded, recipe, out, len(examples), lambda i: pack(examples[i], loaded, recipe.max_tokens), dev, start, data
    )
    for report in trainer.run():
        note = f"loss {report.loss:.3f}, {report.tokens_per_s:.0f} tokens/s, {report.left_s / 60:.0f} min left"
        progress.update("train", report.step, report.steps, note)
        about = f"{loaded.name}, {len(examples)} requests, {len(dev)} held out."
        (out / "training.html").write_text(training_page(out / LOG, "Training of a sidecar", about), "utf-8")
    return trainer


def calibrate(
    path: Path, base: str, adapter: Path, cases: Sequence[Case], device: str | None, progress: Progress
) -> str:
    """Fit what makes the chances honest on held-out cases, and write it beside the adapter; say on how many answers."""
    unscaled = {"function_temperature": 1.0, "value_scale": 1.0, "value_shift": 0.0}
    plain = msgspec.structs.replace(read_habits(str(adapter)), **unscaled)
    loaded = load_sidecar(path, base, "auto", device, str(adapter))
    total = Tally()
    for tally in evaluate(WavePredictor(loaded, plain), cases, progress=progress).values():
        total.add(tally)
    scale, shift = best_scaling(total.value_chances)
    temperature = 1 / best_scaling(total.function_chances, shifted=False)[0]
    habits = msgspec.structs.replace(plain, function_temperature=temperature, value_scale=scale, value_shift=shift)
    write_habits(adapter, habits)
    told = [
        f"{len(chances)} {kind}" + (" (too few: left as they are)" if len(chances) < MIN_ANSWERS else "")
        for kind, chances in (("values", total.value_chances), ("functions", total.function_chances))
    ]
    return f"chances calibrated on {' and '.join(told)}"


def gather_cases(
    gold: Sequence[str], data: str | None, suite_name: str, results: Sequence[Path], traces: Sequence[Path],
    limit: int | None,
) -> list[Case]:  # fmt: skip
    """Collect the cases of an evaluation. Raises UsageError where there are none."""
    cases = list[Case]()
    folder = data_folder(data)
    for name in gold:
        cases += cases_of_gold(name, suite(suite_name, name, load_benchmark(name, folder)))
    rows = list[Row]()
    for path in results:
        found = Results(path).rows()
        if not found:
            raise UsageError(f"No benchmark results in {path}; give a folder that `ooospec bench --out` filled.")
        rows += found
    if rows:
        requests = {request.id: request for name in BENCHMARKS for request in load_benchmark(name, folder)}
        cases += cases_of_results(rows, requests)
    if traces:
        cases += cases_of_examples(load_traces(traces)[1])
    if not cases:
        raise UsageError("Nothing to evaluate on: give --gold BENCHMARKS, --results FOLDER or --traces FOLDER.")
    return _chosen(cases, limit)


def _chosen(cases: Sequence[Case], limit: int | None) -> list[Case]:
    """Leave out what was measured under several conditions, and what is over the limit of its data set."""
    unique = {(case.dataset, case.id): case for case in cases}.values()
    seen = Counter[str]()
    chosen = list[Case]()
    for case in unique:
        seen[case.dataset] += 1
        chosen += [case] if limit is None or seen[case.dataset] <= limit else []
    return chosen


def run_evaluation(
    sidecar: str,
    adapter: str,
    cases: Sequence[Case],
    warm: bool,
    dtype: str,
    device: str | None,
    threads: int,
    progress: Progress,
) -> dict[str, Tally]:
    """Load a sidecar as an engine would and evaluate it."""
    folder = find_adapter(adapter, sidecar)
    check_adapter(folder)
    torch.set_num_threads(threads)
    loaded = load_sidecar(resolve_model(sidecar, progress), sidecar, dtype, device, folder)
    return evaluate(WavePredictor(loaded, read_habits(folder)), cases, warm, progress)
