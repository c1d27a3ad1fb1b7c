"""The settings of `ooospec serve`, from flags and a file; and the listening."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ooospec.chat.formats.registry import NO_SIGN, format_named
from ooospec.chat.template import render, template_format
from ooospec.errors import UsageError
from ooospec.methods import served_methods
from ooospec.runtime import Decoder
from ooospec.server.tracing import check_endpoint
from ooospec.server.worker import Worker

logger = logging.getLogger("ooospec.server")
REPEATED_S = 0.5
"""A signal so soon after another is the same one."""
KEY_VARIABLE = "OOOSPEC_API_KEY"
PARSERS = {
    "qwen3_xml": "qwen3_coder", "phi4_mini_json": "phi", "openai": "harmony", "glm45": "glm",
    "llama4_pythonic": "pythonic", "llama4_json": "llama3_json", "granite-20b-fc": "granite",
}  # fmt: skip
"""vLLM's names of call parsers that are called otherwise here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The flags of `ooospec serve`, named as vLLM names them where it has them."""

    model: str
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    api_key: tuple[str, ...] = ()
    max_model_len: Annotated[int, msgspec.Meta(ge=8)] | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    speculative_config: str | dict[str, Any] | None = None
    max_queue: Annotated[int, msgspec.Meta(ge=1)] = 64
    request_timeout: Annotated[float, msgspec.Meta(ge=1)] = 600.0
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 4 << 20
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 29
    prefix_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30
    ui: bool = True
    otlp_traces_endpoint: str | None = None


def merged(flags: Mapping[str, Any], given: Callable[[str], bool], config: Path | None) -> dict[str, Any]:
    """Take settings from a YAML file, flags that were given on the command line first. Raises UsageError."""
    if config is None:
        return dict(flags)
    import yaml

    try:
        loaded = yaml.safe_load(config.read_text("utf-8")) or {}
    except OSError as error:
        raise UsageError(f"Cannot read --config {str(config)!r}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {str(config)!r} is not YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"--config {str(config)!r} must hold keys and values, as in `port: 8000`.")
    values = dict(flags)
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in values:
            known = ", ".join(sorted(flag.replace("_", "-") for flag in values))
            raise UsageError(f"--config {str(config)!r}: unknown key {key!r}; known keys: {known}.")
        if not given(name):
            values[name] = value
    return values


def read_settings(values: Mapping[str, Any]) -> ServeSettings:
    """Check the types of settings, which may come from a file. Raises UsageError."""
    chosen = {name: values[name] for name in ServeSettings.__dataclass_fields__ if values[name] is not None}
    for name in ("served_model_name", "api_key"):
        if isinstance(chosen.get(name), str):
            chosen[name] = [chosen[name]]
    try:
        return msgspec.convert(chosen, ServeSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"A setting is wrong: {error}.") from error


def check_values(settings: ServeSettings) -> None:
    """Refuse, before models are loaded, what could only fail or mislead later. Raises UsageError."""
    for flag, values in (("--api-key", settings.api_key), ("--served-model-name", settings.served_model_name)):
        if not all(value.strip() for value in values):
            raise UsageError(f"{flag} must not be empty; give a value or leave the flag out.")
    endpoint = settings.otlp_traces_endpoint
    if endpoint is not None:
        check_endpoint(endpoint)


def use_template(decoder: Decoder, template: str) -> None:
    """Give the target a chat template that renders. Raises UsageError."""
    decoder.loaded.tokenizer.chat_template = template
    try:
        render(decoder.loaded.tokenizer, "Hello.")
    except UsageError as error:
        raise UsageError(f"--chat-template cannot render a message: {error}") from error


def limit_context(decoder: Decoder, length: int) -> None:
    """Use fewer positions than the target was made for. Raises UsageError for more."""
    most = decoder.target.context_length
    if length > most:
        raise UsageError(f"--max-model-len {length} is more than the {most} tokens that this target was made for.")
    decoder.target.limit_context(length)


def parser_format(name: str | None) -> str | None:
    """Return the call format that a parser's name means; None = detect."""
    if name in (None, "auto"):
        return None
    return format_named(PARSERS.get(str(name), str(name))).name


def warn_of_other_format(chosen: str | None, tokenizer: Any) -> None:
    """Say so if a call format was chosen that is not the one the model's template asks for."""
    found, why = template_format(tokenizer)
    if chosen is not None and NO_SIGN not in why and format_named(chosen).scanner is not found.scanner:
        sys.stderr.write(
            f"--tool-call-parser: {chosen} was chosen, but the model seems to write {found.name}, because {why}; "
            "calls in another format stay in the content.\n"
        )


def speculative_options(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """Read --speculative-config: {"method": NAME, "num_speculative_tokens": N}. Raises UsageError."""
    if text is None:
        return {}
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise UsageError(f"--speculative-config is not JSON ({error}).") from error
    allowed = {"method", "num_speculative_tokens"}
    if not isinstance(value, dict) or not set(value) <= allowed:
        raise UsageError(f"--speculative-config takes {', '.join(sorted(allowed))}; got {str(value)[:100]}.")
    if value.get("method", "ooo") not in served_methods():
        raise UsageError(
            f"--speculative-config: unknown method {value['method']!r}; choose one of {', '.join(served_methods())}."
        )
    size = value.get("num_speculative_tokens")
    if size is not None and (not isinstance(size, int) or not 1 <= size <= 511):
        raise UsageError(f"num_speculative_tokens must be a whole number from 1 to 511; got {size!r}.")
    return value


def check_installed() -> None:
    """Raise UsageError where the packages of the extra `server` are missing."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"The server needs {', '.join(missing)}; install the extra: ooo-spec[server].")


def listen(host: str, port: int) -> socket.socket:
    """Take the address before models are loaded. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UsageError(f"Cannot listen on {host}:{port} ({error}); give another --host or --port.") from error
    return listening


def run_server(decoder: Decoder, settings: ServeSettings, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; requests that run are finished first."""
    import uvicorn

    from ooospec.server.app import ServerSettings, create_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    keys = settings.api_key or tuple(filter(None, [os.environ.get(KEY_VARIABLE, "")]))
    names = settings.served_model_name or (settings.model,)
    app = create_app(
        decoder,
        ServerSettings(
            names, keys, settings.max_queue, settings.request_timeout, settings.max_body_bytes,
            settings.memory_bytes, inspector=settings.ui, otlp_traces_endpoint=settings.otlp_traces_endpoint,
            exclude_unused_tools=settings.exclude_tools_when_tool_choice_none,
        ),
    )  # fmt: skip
    logger.info(
        "serving %s on http://%s:%d/v1%s", names[0], settings.host, settings.port,
        f", inspector at http://{settings.host}:{settings.port}/ui" if settings.ui else "",
    )  # fmt: skip
    if not keys and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning(
            "no --api-key: whoever reaches %s can use the model%s", settings.host,
            " and read the last requests" if settings.ui else "",
        )  # fmt: skip
    config = uvicorn.Config(
        app, log_level="warning", timeout_keep_alive=30, timeout_graceful_shutdown=int(settings.request_timeout)
    )
    make_server(config, app.state.ooospec.worker).run(sockets=[listening])


def make_server(config: Any, worker: Worker) -> Any:
    """Make uvicorn's server: the first signal asks it to finish what runs, the second to drop it."""
    import uvicorn

    class Server(uvicorn.Server):
        last_signal = -REPEATED_S

        def handle_exit(self, sig: int, frame: Any) -> None:
            now, left = time.monotonic(), worker.unfinished()
            if now - self.last_signal < REPEATED_S:  # the same one, sent to the group and passed on by a parent
                return
            self.last_signal = now
            self._captured_signals.append(sig)
            if not self.should_exit:
                self.should_exit = True
                if left:
                    logger.info("ending: %d requests are finished first; a second Ctrl-C drops them", left)
            elif left:
                worker.drop()
            else:  # connections that no request came from
                self.force_exit = True

    return Server(config)


def read_template(template: str | None) -> str | None:
    """Return a chat template given as a file or as text. Raises UsageError."""
    if template is None or "{" in template:
        return template
    try:
        return Path(template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {template!r} is no file that can be read and no Jinja template.") from error
