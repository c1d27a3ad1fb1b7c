"""The commands that make a sidecar's adapter: collect, train, average, eval-sidecar."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ooospec.config import AUTO, DEFAULT_SIDECAR, DEFAULT_TARGET
from ooospec.console import Device, Dtype, clean_errors, progress_bars
from ooospec.errors import UsageError

KEY_VARIABLE = "OPENAI_API_KEY"


def add_train_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("collect")(collect)
    app.command("train")(train)
    app.command("average")(average)
    app.command("eval-sidecar")(eval_sidecar)


@clean_errors
def collect(
    data: Annotated[Path, typer.Option(help="Folder of the training sets (docs/training.md).")],
    evaluation: Annotated[Path, typer.Option(help="Folder of the benchmarks, whose requests are kept out.")],
    out: Annotated[Path, typer.Option(help="Folder of the traces; one that has some is gone on with.")],
    sources: Annotated[str, typer.Option(help="Comma-separated training sets, or all.")] = "all",
    target: Annotated[str, typer.Option(help="Teacher on this machine, as for --target elsewhere.")] = DEFAULT_TARGET,
    dtype: Annotated[str, typer.Option(help="Of that teacher: auto, bfloat16, float16, float32, int8.")] = "auto",
    device: Device = None,
    base_url: Annotated[
        str | None, typer.Option(help=f"OpenAI-compatible endpoint instead; its key is read from {KEY_VARIABLE}.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name at that endpoint.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once (endpoint only).")] = 1,
    per_minute: Annotated[float | None, typer.Option(min=0.1, help="Most requests a minute (endpoint only).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most requests of a training set.")] = None,
    max_chars: Annotated[int, typer.Option(min=100, help="Longest request, tools included.")] = 8000,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so long; start again to go on.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice and variation of requests.")] = 0,
) -> None:
    """Have a teacher answer training requests; its calls are what a sidecar learns."""
    from ooospec.train.collect import CARD, TRACES, collect, plan
    from ooospec.train.decontaminate import Inventory
    from ooospec.train.sources import SOURCES

    if (base_url is None) != (model is None):
        raise UsageError("--base-url and --model belong together: the endpoint and the name of its model.")
    if base_url is None and (concurrency > 1 or per_minute is not None):
        raise UsageError("--concurrency and --per-minute are for --base-url; a teacher on this machine works alone.")
    named = dict.fromkeys(name.strip() for name in sources.split(",") if name.strip())
    chosen = tuple(SOURCES) if sources == "all" else tuple(named)
    if not chosen:
        raise UsageError(f"--sources names no training set; choose from {', '.join(SOURCES)}, or all.")
    inventory = Inventory.load(evaluation)
    planned = plan(chosen, data, inventory, limit, seed, max_chars=max_chars)
    with progress_bars() as progress:
        teacher = _teacher(target, dtype, device, base_url, model, per_minute, progress)
        counts = collect(planned, teacher, out, inventory, concurrency, minutes and minutes * 60, progress)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    sys.stdout.write(f"{told} of {len(planned.examples)} planned\n{out / TRACES}\n{out / CARD}\n")


def _teacher(
    target: str, dtype: str, device: str | None, base_url: str | None, model: str | None, rate: float | None, bars: Any
) -> Any:
    from ooospec.train.teachers import EndpointTeacher, LocalTeacher

    if base_url is not None and model is not None:
        return EndpointTeacher(base_url, model, os.environ.get(KEY_VARIABLE, ""), rate)
    from ooospec.models.resolver import resolve_model
    from ooospec.runtime import Decoder
    from ooospec.sidecar.quantize import load_sidecar

    if dtype != "int8":
        return LocalTeacher(Decoder(target, None, dtype=dtype, device=device, progress=bars))
    loaded = load_sidecar(resolve_model(target, bars), target, dtype, device, None)
    return LocalTeacher(Decoder(loaded, None, progress=bars))


@clean_errors
def train(
    data: Annotated[list[Path], typer.Option(help="Folder or file of traces; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; one that was stopped is gone on with.")],
    base: Annotated[str, typer.Option(help="Model to train, as for --sidecar.")] = DEFAULT_SIDECAR,
    recipe: Annotated[str, typer.Option(help="published, small (for CPUs), or a TOML file of settings.")] = "published",
    start: Annotated[
        str | None, typer.Option(help="Adapter to begin with instead of none: a folder, or auto = the one that ships.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most so many requests.")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Train a LoRA adapter on collected traces and calibrate its chances."""
    from ooospec.models.resolver import resolve_model
    from ooospec.sidecar.adapter import find_adapter
    from ooospec.train.recipe import read_recipe
    from ooospec.train.run import run_training

    settings, begun = read_recipe(recipe), find_adapter(start, base)
    start_folder = Path(begun) if begun is not None else None
    if start == AUTO and begun is None:
        raise UsageError(f"No adapter ships for {base}; give --start FOLDER, or leave it out.")
    with progress_bars() as progress:
        path = resolve_model(base, progress)
        folder, told = run_training(path, base, data, out, settings, limit, dtype, device, progress, start_folder)
    sys.stdout.write(f"{told}\n{folder}\n{out / 'training.html'}\nNow: --adapter {folder}\n")


@clean_errors
def average(
    adapters: Annotated[list[Path], typer.Argument(help="Adapters of one base, from several runs of train.")],
    data: Annotated[list[Path], typer.Option(help="Traces, whose held-out part calibrates; may be given repeatedly.")],
    out: Annotated[Path, typer.Option(help="Folder of the new adapter.")],
    base: Annotated[str, typer.Option(help="Their base, as for --sidecar.")] = DEFAULT_SIDECAR,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the new adapter.")] = 16,
    device: Device = None,
) -> None:
    """Average adapters into one of the same size, which is often better than each, and calibrate its chances."""
    from ooospec.models.resolver import resolve_model
    from ooospec.sidecar.adapter import check_base, read_habits, shape_of
    from ooospec.train.average import average_adapters
    from ooospec.train.run import calibrate, held_out_cases

    cases = held_out_cases(data)
    with progress_bars() as progress:
        path = resolve_model(base, progress)
        shape = shape_of(json.loads((path / "config.json").read_text("utf-8")))
        for adapter in adapters:
            check_base(read_habits(str(adapter)), str(adapter), base, shape)
        lost = average_adapters(adapters, out, rank)
        told = calibrate(path, base, out, cases, device, progress)
    text = f"{len(adapters)} adapters, {lost:.2%} of the updates' squared norm lost by the rank; {told}"
    sys.stdout.write(f"{out}: {text}\n")


@clean_errors
def eval_sidecar(
    sidecar: Annotated[str, typer.Option(help="Model as for --sidecar elsewhere.")] = DEFAULT_SIDECAR,
    adapter: Annotated[str, typer.Option(help="auto = the one that ships, none, or a folder.")] = "auto",
    gold: Annotated[str, typer.Option(help="Comma-separated benchmarks to compare with gold.")] = "",
    data: Annotated[str | None, typer.Option(help="Folder with the benchmarks, or hf://OWNER/DATASET.")] = None,
    suite: Annotated[str, typer.Option(help="quick, paper or all (with --gold).")] = "quick",
    results: Annotated[
        list[Path] | None, typer.Option(help="Folder of `ooospec bench`: compare with what its target wrote.")
    ] = None,
    traces: Annotated[list[Path] | None, typer.Option(help="Collected traces: their held-out part.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests of each data set.")] = None,
    prefix: Annotated[str, typer.Option(help="warm: the sidecar has the tools in its KV cache; or cold.")] = "warm",
    dtype: Annotated[str, typer.Option(help="auto, int8, bfloat16, float16 or float32.")] = "auto",
    device: Device = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    html: Annotated[Path | None, typer.Option(help="Also write a page with calibration plots.")] = None,
) -> None:
    """Measure a sidecar: accuracy of function and values, calibration, latency, payload."""
    from ooospec.train.plots import evaluation_page, evaluation_rows
    from ooospec.train.run import gather_cases, run_evaluation

    if prefix not in ("warm", "cold"):
        raise UsageError(f"--prefix must be warm or cold; got {prefix!r}.")
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UsageError(f"Cannot write a page to {html}; give --html FILE in a folder that exists.")
    names = tuple(name.strip() for name in gold.split(",") if name.strip())
    cases = gather_cases(names, data, suite, results or [], traces or [], limit)
    with progress_bars() as progress:
        tallies = run_evaluation(sidecar, adapter, cases, prefix == "warm", dtype, device, threads, progress)
    head, *rows = evaluation_rows(tallies)
    table = Table(box=None)
    for place, heading in enumerate(head):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if html is not None:
        about = f"Sidecar {sidecar}, adapter {adapter}, prefix {prefix}, {threads} threads."
        html.write_text(evaluation_page(tallies, "Sidecar evaluation", about), "utf-8")
        sys.stdout.write(f"{html}\n")
