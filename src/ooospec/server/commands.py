"""The command that serves: `ooospec serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ooospec.config import AUTO, DEFAULT_TARGET
from ooospec.console import Adapter, Device, Dtype, PlacementName, Sidecar, clean_errors, open_decoder


@clean_errors
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Target: hub id, local folder, .gguf file or embedded name.")] = (
        DEFAULT_TARGET
    ),
    sidecar: Sidecar = AUTO,
    adapter: Adapter = "auto",
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests use; may be given several times.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 = all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that requests must send; also OOOSPEC_API_KEY. Default: none.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=8, help="Longest prompt and answer together.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file, or template text, instead of the model's.")
    ] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="Call format; default: read off the template.")] = None,
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        typer.Option(
            "--exclude-tools-when-tool-choice-none", help="Leave tools out of the prompt under tool_choice none."
        ),
    ] = False,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="Accepted for vLLM's sake: <think> blocks are always told apart.")
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Accepted for vLLM's sake: it is always on.")
    ] = True,
    speculative_config: Annotated[
        str | None, typer.Option(help='JSON: {"method": "ooo", "num_speculative_tokens": 63}.')
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")] = 64,
    request_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds a request may take, waiting included.")
    ] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest request body.")] = 4 << 20,
    memory_bytes: Annotated[
        int, typer.Option(min=0, help="For what is remembered of earlier calls, all keys together; 0 = nothing.")
    ] = 1 << 29,
    prefix_cache_bytes: Annotated[int, typer.Option(min=0, help="For the KV cache of earlier prompts; 0 = none.")] = 1
    << 30,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="Send OpenTelemetry spans there, as in http://127.0.0.1:4318/v1/traces.")
    ] = None,
    ui: Annotated[bool, typer.Option(help="Serve the inspector at /ui.")] = True,
    dtype: Dtype = "auto",
    device: Device = None,
    placement: PlacementName = "shared",
    config: Annotated[Path | None, typer.Option(help="YAML file with the same names as these flags.")] = None,
) -> None:
    """Serve an OpenAI-compatible API (chat completions with tools, streaming, metrics, an inspector at /ui)."""
    from ooospec.server import flags as read

    read.check_installed()
    given = {name: value for name, value in context.params.items() if name != "config"}
    values = read.merged(given, lambda name: "COMMANDLINE" in str(context.get_parameter_source(name)), config)
    speculation = read.speculative_options(values["speculative_config"])
    call_format = read.parser_format(values["tool_call_parser"])
    settings = read.read_settings(values)
    read.check_values(settings)
    template = read.read_template(settings.chat_template)
    options = {name: values[name] for name in ("adapter", "dtype", "device", "placement")}
    options["prefix_cache_bytes"] = settings.prefix_cache_bytes
    if speculation.get("num_speculative_tokens"):
        options["max_nodes"] = speculation["num_speculative_tokens"] + 1
    method = speculation.get("method", "ooo")
    beside = values["sidecar"] if method == "ooo" else "none"
    with (
        read.listen(settings.host, settings.port) as listening,
        open_decoder(settings.model, beside, call_format=call_format, **options) as decoder,
    ):
        decoder.default_method = method
        if template is not None:
            read.use_template(decoder, template)
        read.warn_of_other_format(call_format, decoder.loaded.tokenizer)
        if settings.max_model_len is not None:
            read.limit_context(decoder, settings.max_model_len)
        read.run_server(decoder, settings, listening)
