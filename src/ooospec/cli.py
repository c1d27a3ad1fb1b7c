"""The `ooospec` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ooospec.bench.commands import add_bench_commands
from ooospec.config import AUTO, DEFAULT_MAX_NEW_TOKENS, DEFAULT_SIDECAR, DEFAULT_TARGET
from ooospec.console import (
    Adapter,
    Device,
    Dtype,
    PlacementName,
    Sidecar,
    Target,
    clean_errors,
    open_decoder,
    progress_bars,
)
from ooospec.errors import ToolsError, UsageError
from ooospec.server.commands import serve
from ooospec.train.commands import add_train_commands

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Faster tool calls, with exactly the same output.")
models_app = typer.Typer(no_args_is_help=True, help="Embedded models and where they are.")
app.add_typer(models_app, name="models")

Prefix = Annotated[str, typer.Option(help="warm: tools and system prompt are in the KV cache; cold: nothing is.")]


def _one_line(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, or a terminal without UTF-8
        return json.dumps(value)
    return text


def _check_prefix(prefix: str) -> None:
    if prefix not in ("warm", "cold"):
        raise UsageError(f"--prefix must be warm or cold; got {prefix!r}.")


def _read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" that can be read ({error.strerror})"
        raise UsageError(f"No file {str(path)!r}{reason} for {what}; give the path of an existing JSON file.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        if not path.stat().st_size:
            raise ToolsError(f"{path} is empty; {what} must be a JSON list.") from None
        raise ToolsError(f"{path} is not JSON ({error}); {what} must be a JSON list.") from None


@app.command()
@clean_errors
def generate(
    message: Annotated[list[str], typer.Option(help="The user's message; give it again for more user turns.")],
    tools: Annotated[Path | None, typer.Option(help="JSON file with a list of tools in OpenAI form.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    target: Target = DEFAULT_TARGET,
    sidecar: Sidecar = AUTO,
    adapter: Adapter = "auto",
    method: Annotated[str, typer.Option(help="ooo, toolspec, lookup, recycling, samd, suffix, ar or stock.")] = "ooo",
    dtype: Dtype = "auto",
    device: Device = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed for temperature above 0.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = DEFAULT_MAX_NEW_TOKENS,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    placement: PlacementName = "shared",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer one request."""
    from ooospec.chat.schema import read_tools
    from ooospec.methods import method_named

    method_named(method)  # a wrong name is told before models are loaded
    listed = _read_json(tools, "tools") if tools is not None else None
    read_tools(listed)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": text} for text in message]
    needs_sidecar = sidecar if method == "ooo" else "none"
    with open_decoder(
        target, needs_sidecar, adapter=adapter, dtype=dtype, device=device, placement=placement
    ) as decoder:
        result = decoder.generate(
            messages,
            listed,
            method=method,
            temperature=temperature,
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=stop or (),
        )
    if as_json:
        sys.stdout.write(_one_line(result.to_dict()) + "\n")
        return
    sys.stdout.write(result.text.strip() + "\n")
    sys.stderr.write(
        f"{len(result.output_ids)} tokens in {result.num_rounds} rounds, {result.total_ms / 1e3:.2f} s "
        f"(prefill {result.prefill_ms / 1e3:.2f} s); by source: {result.accepted_by_source}\n"
    )


@app.command()
@clean_errors
def demo(
    target: Target = DEFAULT_TARGET,
    sidecar: Sidecar = AUTO,
    adapter: Adapter = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    placement: PlacementName = "shared",
    data: Annotated[Path | None, typer.Option(help="Folder with bfcl/: adds requests of that benchmark.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Requests taken from BFCL, where it is there.")] = 3,
    prefix: Prefix = "warm",
    html: Annotated[Path | None, typer.Option(help="Also write the timeline as a self-contained page.")] = None,
) -> None:
    """Run AR, ToolSpec and OoO-Spec back to back on real requests and show what happened when."""
    from ooospec.bench.datasets import load_benchmark
    from ooospec.demo.run import run_demo

    _check_prefix(prefix)
    if html is not None and html.is_dir():
        raise UsageError(f"--html needs the name of a file; {str(html)!r} is a folder.")
    if html is not None and not html.absolute().parent.is_dir():
        raise UsageError(f"No folder {str(html.absolute().parent)!r} for --html; create it first.")
    if data is not None and limit:
        load_benchmark("bfcl", data)  # told before models are loaded
    with open_decoder(target, sidecar, adapter=adapter, dtype=dtype, device=device, placement=placement) as decoder:
        if run_demo(Console(), decoder, data, limit, html, prefix):
            raise typer.Exit(1)


@app.command()
@clean_errors
def verify(
    target: Target = DEFAULT_TARGET,
    sidecar: Sidecar = AUTO,
    adapter: Adapter = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    placement: PlacementName = "shared",
    benchmark: Annotated[str, typer.Option(help="examples, api_bank, toolalpaca or bfcl.")] = "examples",
    data: Annotated[Path | None, typer.Option(help="Folder with the benchmark's data.")] = None,
    limit: Annotated[int, typer.Option(min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Chooses and orders the requests.")] = 0,
    methods: Annotated[str, typer.Option(help="Comma-separated methods to compare with ar.")] = "lookup,toolspec,ooo",
    prefix: Prefix = "warm",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = DEFAULT_MAX_NEW_TOKENS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare outputs with and without speculation, token by token."""
    from ooospec.demo.verify import VerifySettings, run_verify

    _check_prefix(prefix)
    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    options = {"adapter": adapter, "dtype": dtype, "device": device, "placement": placement}
    ok = run_verify(
        lambda: open_decoder(target, sidecar if "ooo" in chosen else "none", **options),
        VerifySettings(benchmark, data, limit, seed, tuple(chosen), max_new_tokens, prefix),
        as_json,
    )
    if not ok:
        raise typer.Exit(1)


@app.command()
@clean_errors
def doctor(
    target: Target = DEFAULT_TARGET,
    dtype: Dtype = "auto",
    device: Device = None,
    fresh: Annotated[bool, typer.Option(help="Measure the cost curve again.")] = False,
) -> None:
    """Show versions, device, models and the target's measured verify cost."""
    from ooospec.demo.doctor import run_doctor

    run_doctor(Console(), lambda: open_decoder(target, "none", dtype=dtype, device=device), fresh)


@app.command()
@clean_errors
def sidecar(
    model: Annotated[str, typer.Option(help="Model as for --target.")] = DEFAULT_SIDECAR,
    adapter: Adapter = "auto",
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "tcp://127.0.0.1:7777",
    dtype: Annotated[
        str, typer.Option(help="auto = int8 on CPUs where it pays; int8, bfloat16, float16, float32.")
    ] = "auto",
    device: Device = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Serve a sidecar for engines on this or other machines (no authentication: trusted networks only)."""
    from ooospec.models.resolver import resolve_model
    from ooospec.sidecar.adapter import find_adapter
    from ooospec.sidecar.quantize import check_sidecar_dtype
    from ooospec.sidecar.server import main as serve
    from ooospec.target.loading import check_adapter, parse_device

    check_sidecar_dtype(dtype)
    folder = find_adapter(adapter, model)
    check_adapter(folder)
    parse_device(device)
    with progress_bars() as progress:
        path = resolve_model(model, progress)
    arguments = [
        "--path",
        str(path),
        "--name",
        model,
        "--address",
        address,
        "--dtype",
        dtype,
        "--threads",
        str(threads),
    ]
    for flag, value in (("--adapter", folder), ("--device", device)):
        arguments += [flag, value] if value else []
    serve(arguments)


@models_app.command("list")
@clean_errors
def models_list() -> None:
    """List the embedded models and whether they are here."""
    from ooospec.models.catalogue import catalogue
    from ooospec.models.resolver import converted_folder

    table = Table(box=None)
    for heading in ("name", "download", "here", "licence", "note"):
        table.add_column(heading, no_wrap=heading != "note", overflow="fold")
    for name, entry in catalogue().items():
        here = "yes" if converted_folder(name).is_dir() else "no"
        table.add_row(name, f"{entry.bytes / 1e6:.0f} MB", here, entry.license, f"{entry.hub}: {entry.note}")
    Console().print(table)


@models_app.command("pull")
@clean_errors
def models_pull(names: Annotated[list[str], typer.Argument(help="Names of models.")]) -> None:
    """Fetch and convert models."""
    from ooospec.models.resolver import resolve_model

    for name in names:
        with progress_bars() as progress:
            path = resolve_model(name, progress)
        sys.stdout.write(f"{path}\n")


@models_app.command("path")
@clean_errors
def models_path(name: Annotated[str, typer.Argument(help="Name of a model.")]) -> None:
    """Print the folder of a model, fetching it first if it is not here."""
    models_pull([name])


app.command("serve")(serve)
add_bench_commands(app)
add_train_commands(app)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
