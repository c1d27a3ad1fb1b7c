"""The commands that measure: bench, bench-vllm, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ooospec.config import AUTO, DEFAULT_MAX_NEW_TOKENS, DEFAULT_SIDECAR, DEFAULT_TARGET, default_sidecar_pays
from ooospec.console import Adapter, Device, Dtype, Sidecar, clean_errors, open_decoder, progress_bars
from ooospec.errors import UsageError


def add_bench_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("bench")(bench)
    app.command("bench-vllm")(bench_vllm)
    app.command("report")(report)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))


@clean_errors
def bench(
    out: Annotated[Path, typer.Option(help="Folder of the results; one that has some is gone on with.")],
    targets: Annotated[str, typer.Option(help="Comma-separated targets.")] = DEFAULT_TARGET,
    sidecar: Sidecar = AUTO,
    adapter: Adapter = "auto",
    draft: Annotated[
        str | None, typer.Option(help="Draft model for method draft, with the target's tokenizer.")
    ] = None,
    benchmarks: Annotated[str, typer.Option(help="Comma-separated: api_bank, toolalpaca, bfcl.")] = (
        "api_bank,toolalpaca,bfcl"
    ),
    suite: Annotated[str, typer.Option(help="quick: 30 requests each; paper: as published; all: every request.")] = (
        "quick"
    ),
    data: Annotated[str | None, typer.Option(help="Folder with the data, or hf://OWNER/DATASET.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated, or all = every one that can run here.")] = "all",
    placement: Annotated[str, typer.Option(help="shared, split, or both with a comma.")] = "shared",
    prefix: Annotated[str, typer.Option(help="warm, cold, or both: tools and system prompt in the KV cache.")] = "warm",
    memory: Annotated[str, typer.Option(help="warm, cold, or both: what methods keep of earlier requests.")] = "warm",
    budget: Annotated[str, typer.Option(help="measured, fixed, or both: size of candidate trees.")] = "measured",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests a benchmark.")] = None,
    seed: Annotated[int | None, typer.Option(help="Shuffle the requests; default: the suite's own order.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = DEFAULT_MAX_NEW_TOKENS,
    dtype: Dtype = "auto",
    device: Device = None,
    plugin: Annotated[list[Path] | None, typer.Option(help="Python file that registers methods.")] = None,
) -> None:
    """Measure methods against each other on public benchmarks; see also: ooospec report."""
    from ooospec.bench.command import BenchSettings, run_bench
    from ooospec.methods import METHODS
    from ooospec.sidecar.adapter import adapter_label
    from ooospec.target.loading import chosen_dtype, parse_device

    for file in plugin or []:
        _run_plugin(file)
    every = methods.strip() == "all"
    settings = BenchSettings(
        targets=_names(targets), sidecar=sidecar if sidecar != "none" else None,
        adapter=adapter_label(adapter, sidecar), draft=draft,
        benchmarks=_names(benchmarks), suite=suite, data=data, methods=tuple(METHODS) if every else _names(methods),
        placement=_names(placement), prefix=_names(prefix), memory=_names(memory), budget=_names(budget),
        limit=limit, seed=seed, max_new_tokens=max_new_tokens, dtype=chosen_dtype(dtype, parse_device(device)),
        device=device,
    )  # fmt: skip

    def load(target: str, place: str) -> Any:
        wanted = any(METHODS[name].hints for name in settings.methods)
        options = {"adapter": adapter, "dtype": settings.dtype, "device": device, "placement": place}
        options["budget"] = "measured" if "measured" in settings.budget else "fixed"
        return open_decoder(target, sidecar if wanted else "none", draft=draft, draft_optional=every, **options)

    folder = run_bench(load, settings, out, skip_missing=every)
    sys.stdout.write(f"{folder / 'rows.jsonl'}\nNow: ooospec report {folder}\n")


def _run_plugin(file: Path) -> None:
    """Run a Python file that registers methods (docs/write_a_proposer.md)."""
    import runpy

    if not file.is_file():
        raise UsageError(f"No file {str(file)!r} for --plugin; give a Python file that calls ooospec.methods.register.")
    runpy.run_path(str(file))


@clean_errors
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `ooospec bench --out` filled.")],
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "OoO-Spec benchmark",
) -> None:
    """Write report.md and report.html (self-contained) from benchmark results."""
    from ooospec.bench.report import write_report

    for path in write_report(folder, title):
        sys.stdout.write(f"{path}\n")


@clean_errors
def bench_vllm(
    out: Annotated[Path, typer.Option(help="Folder of the results; methods that it has are not measured again.")],
    target: Annotated[str, typer.Option(help="Target: hub id, local folder or embedded name.")] = DEFAULT_TARGET,
    sidecar: Annotated[
        str,
        typer.Option(help="Sidecar model of method ooo; auto = the default one where it pays, none = go without."),
    ] = AUTO,
    adapter: Adapter = "auto",
    draft: Annotated[str | None, typer.Option(help="Draft model of method draft_model.")] = None,
    benchmarks: Annotated[str, typer.Option(help="Comma-separated: api_bank, toolalpaca, bfcl.")] = (
        "api_bank,toolalpaca,bfcl"
    ),
    data: Annotated[str | None, typer.Option(help="Folder with the data, or hf://OWNER/DATASET.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated: plain, ngram, suffix, draft_model, ooo.")] = (
        "plain,ngram,suffix,ooo"
    ),
    concurrency: Annotated[str, typer.Option(help="Comma-separated: calls at once; requests are dealt out.")] = "1,4,8",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests a benchmark.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Longest draft of suffix and ooo.")] = 24,
    parser: Annotated[str, typer.Option(help="vLLM's --tool-call-parser.")] = "hermes",
    prefix: Annotated[str, typer.Option(help="warm or cold: tools and system prompt in the prefix caches.")] = "warm",
    cores: Annotated[
        str | None,
        typer.Option(help="Cores for vLLM, as 0 or 0-3|4-7, the others for the sidecar; default: all shared."),
    ] = None,
    dtype: Dtype = "auto",
    vllm_flag: Annotated[list[str] | None, typer.Option(help="One more flag of `vllm serve`, as --flag=value.")] = None,
) -> None:
    """Measure OoO-Spec inside vLLM against plain vLLM and vLLM's own speculative methods (docs/vllm.md)."""
    from ooospec.bench.datasets import data_folder, load_benchmark, suite
    from ooospec.bench.vllm_engine import run_vllm_bench
    from ooospec.bench.vllm_server import VllmSettings
    from ooospec.models.resolver import resolve_model
    from ooospec.sidecar.adapter import NONE, is_named
    from ooospec.target.loading import chosen_dtype, default_device, stored_weights

    levels = _names(concurrency)
    if not all(level.isdecimal() for level in levels):
        raise UsageError(f"--concurrency takes whole numbers with commas between them; got {concurrency!r}.")
    folder = data_folder(data)
    requests = {name: suite("quick", name, load_benchmark(name, folder))[:limit] for name in _names(benchmarks)}
    with progress_bars() as progress:
        path, device = resolve_model(target, progress), default_device()
        if sidecar == AUTO:  # the cores are shared unless --cores says otherwise
            pays = device != "cpu" or cores is not None or default_sidecar_pays(stored_weights(path))
            sidecar = DEFAULT_SIDECAR if pays or is_named(adapter) else NONE
        beside = [sys.executable, "-m", "ooospec.cli", "sidecar", "--model", sidecar, "--adapter", adapter, "--address"]
        settings = VllmSettings(
            model=str(path), name=target, sidecar=None if sidecar == NONE else sidecar,
            sidecar_command=(*beside, "{address}"),
            draft=str(resolve_model(draft, progress)) if draft is not None else None, methods=_names(methods),
            concurrency=tuple(map(int, levels)), max_new_tokens=max_new_tokens, parser=parser, prefix=prefix,
            cores=cores, num_speculative_tokens=num_speculative_tokens,
            dtype=chosen_dtype(dtype, device), extra=tuple(vllm_flag or ()),
        )  # fmt: skip
        rows = run_vllm_bench(settings, requests, out, progress)
    sys.stdout.write(f"{rows}\n{rows.with_name('vllm.md')}\n")
