"""A whole training run and a whole evaluation, from names and folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from ooospec.bench.datasets import BENCHMARKS, BenchRequest, data_folder, load_benchmark, suite
from ooospec.config import AUTO
from ooospec.errors import UsageError
from ooospec.models.progress import Progress
from ooospec.models.resolver import resolve_model
from ooospec.sidecar.adapter import Habits, find_adapter, read_habits, shape_of, write_habits
from ooospec.sidecar.predictor import WavePredictor
from ooospec.sidecar.quantize import load_sidecar
from ooospec.target.loading import LoadedModel, check_adapter, chosen_dtype, load_model, parse_device
from ooospec.train.collect import TRACES, is_dev
from ooospec.train.evaluate import (
    Case,
    Tally,
    best_scaling,
    cases_of_examples,
    cases_of_gold,
    cases_of_results,
    evaluate,
)  # fmt: skip
from ooospec.train.packing import Packed, pack
from ooospec.train.plots import training_page
from ooospec.train.recipe import Recipe
from ooospec.train.records import Example, fault, read_examples
from ooospec.train.trainer import LOG, Trainer

DEV_REQUESTS = 48
"""Held-out requests that training looks at; calibration takes all."""


def load_traces(paths: Sequence[Path]) -> tuple[list[Example], list[Example]]:
    """Read traces; return (to train on, held out). Raises UsageError for files that are missing or damaged."""
    found: dict[str, Example] = {}
    for path in paths:
        for example in read_examples(path / TRACES if path.is_dir() else path):
            reason = fault(example)
            if reason:
                raise UsageError(f"{path}: example {example.id!r} cannot be trained on ({reason}).")
            found[example.fingerprint()] = example
    kept = [example for example in found.values() if example.calls]
    return [e for e in kept if not is_dev(e)], [e for e in kept if is_dev(e)]


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
) -> Path:
    """Train, plot, calibrate; return the adapter's folder. Goes on where an earlier run was stopped."""
    examples, held_out = load_traces(data)
    examples = examples[:limit]
    adapter = out / "adapter"
    if dtype == AUTO and chosen_dtype(dtype, parse_device(device)) == "float16":
        dtype = "float32"  # small gradients are nothing in float16
    loaded = load_model(path, base, dtype, device)
    _train(loaded, examples, held_out[:DEV_REQUESTS], out, recipe, progress, start).save_adapter(adapter)
    config = json.loads((path / "config.json").read_text("utf-8"))
    write_habits(adapter, Habits(base=base, base_shape=shape_of(config), answers_null=True, prior_weight=0.0))
    calibrate(path, base, adapter, list(cases_of_examples(held_out)), device, progress)
    return adapter


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
    pack_one = partial(_pack_numbered, examples, loaded, recipe.max_tokens)
    trainer = Trainer(loaded, recipe, out, len(examples), pack_one, dev, start)
    for report in trainer.run():
        note = f"loss {report.loss:.3f}, {report.tokens_per_s:.0f} tokens/s, {report.left_s / 60:.0f} min left"
        progress.update("train", report.step, report.steps, note)
        about = f"{loaded.name}, {len(examples)} requests, {len(dev)} held out."
        (out / "training.html").write_text(training_page(out / LOG, "Training of a sidecar", about), "utf-8")
    return trainer


def _pack_numbered(examples: Sequence[Example], loaded: LoadedModel, max_tokens: int, number: int) -> Packed | None:
    return pack(examples[number], loaded, max_tokens)


def calibrate(
    path: Path, base: str, adapter: Path, cases: Sequence[Case], device: str | None, progress: Progress
) -> Habits:
    """Fit what makes the chances honest on held-out cases, and write them beside the adapter."""
    plain = read_habits(str(adapter))
    loaded = load_sidecar(path, base, "auto", device, str(adapter))
    total = Tally()
    for tally in evaluate(WavePredictor(loaded, plain), cases, progress=progress).values():
        total.add(tally)
    scale, shift = best_scaling(total.value_chances)
    temperature = 1 / best_scaling(total.function_chances, shifted=False)[0]
    habits = msgspec.structs.replace(plain, function_temperature=temperature, value_scale=scale, value_shift=shift)
    write_habits(adapter, habits)
    return habits


def gather_cases(
    gold: Sequence[str], data: str | None, suite_name: str, results: Sequence[Path], traces: Sequence[Path],
    limit: int | None,
) -> list[Case]:  # fmt: skip
    """Collect the cases of an evaluation. Raises UsageError where there are none."""
    cases = list[Case]()
    folder = data_folder(data)
    for name in gold:
        cases += list(cases_of_gold(name, suite(suite_name, name, load_benchmark(name, folder))))[:limit]
    if results:
        requests: dict[str, BenchRequest] = {}
        for name in BENCHMARKS:
            requests |= {request.id: request for request in load_benchmark(name, folder)}
        for path in results:
            cases += list(cases_of_results(path, requests))[:limit]
    if traces:
        cases += list(cases_of_examples(load_traces(traces)[1]))[:limit]
    if not cases:
        raise UsageError("Nothing to evaluate on: give --gold BENCHMARKS, --results FOLDER or --traces FOLDER.")
    return cases


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
