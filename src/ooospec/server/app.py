"""The HTTP side: routes, streaming, limits, errors. The model side is `server.worker`."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ooospec.chat.template import RawPrompt
from ooospec.errors import OooSpecError
from ooospec.request import check_request
from ooospec.runtime import Decoder
from ooospec.server.answers import ChatAnswer, TextAnswer
from ooospec.server.bodies import Body, ChatBody, CompletionBody
from ooospec.server.errors import ApiError, as_api_error, validation_error
from ooospec.server.metrics import Metrics
from ooospec.server.tracing import Tracing
from ooospec.server.worker import AllDone, Failed, Item, Job, Worker

logger = logging.getLogger("ooospec.server")
KEPT_FOR_INSPECTOR = 50
INSPECT_HEADER = "x-ooospec-inspect"
TRACE_HEADERS = ("traceparent", "tracestate")
OF_A_COMPLETION = {"role": "user", "content": ""}
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class ServerSettings:
    """How the server behaves."""

    names: tuple[str, ...]
    """Model names it answers to; the first is the one it reports."""
    api_keys: tuple[str, ...] = ()
    max_queue: int = 64
    time_limit_s: float = 600.0
    max_body_bytes: int = 4 << 20
    memory_bytes: int = 1 << 29
    inspector: bool = True
    otlp_traces_endpoint: str | None = None
    exclude_unused_tools: bool = False
    """Under tool_choice none the prompt holds no tools."""


@dataclass
class _State:
    """What the routes share."""

    decoder: Decoder
    settings: ServerSettings
    metrics: Metrics
    worker: Worker
    started: float = field(default_factory=time.time)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_FOR_INSPECTOR))

    def remember(self, record: dict[str, Any]) -> None:
        """Keep what the inspector shows of a request."""
        if self.settings.inspector:
            self.recent.appendleft(record)


def create_app(decoder: Decoder, settings: ServerSettings, tracing: Tracing | None = None) -> FastAPI:
    """Build the application around a loaded decoder; the worker starts and ends with it. Raises UsageError."""
    metrics = Metrics()
    if settings.otlp_traces_endpoint:
        tracing = Tracing.to(settings.otlp_traces_endpoint, settings.names[0])

    def observe(kind: str, value: Any) -> None:
        metrics.observe(kind, value)
        if tracing is not None:
            tracing.observe(kind, value)

    state = _State(decoder, settings, metrics, Worker(decoder, settings.max_queue, settings.memory_bytes, observe))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.worker.start()
        yield
        await asyncio.to_thread(state.worker.drain, settings.time_limit_s)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="OoO-Spec", version=version("ooo-spec"), lifespan=lifespan,
        description="OpenAI-compatible chat completions with faster tool calls.",
    )  # fmt: skip
    app.state.ooospec = state
    _add_errors(app, metrics)
    app.add_middleware(_Limits, settings=settings, metrics=metrics)
    _add_routes(app, state)
    return app


# ---------------------------------------------------------------- errors and limits


def _error_response(error: ApiError, metrics: Metrics) -> JSONResponse:
    metrics.errors.labels(str(error.status)).inc()
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    def answer(error: ApiError) -> JSONResponse:
        return _error_response(error, metrics)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(validation_error(error.errors(), error.body))

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        why = f": {error.__cause__}" if error.__cause__ is not None else ""  # such as a number of 5,000 digits
        text = f"{request.method} {request.url.path}: {error.detail}{why}"
        return answer(ApiError(error.status_code, text, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        logger.exception("unforeseen error")
        return answer(as_api_error(error))


class _Limits:
    """ASGI middleware: API keys, and a bound on bodies however they are sent."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, limit, size = Request(scope), self.settings.max_body_bytes, 0
        try:
            if scope["path"].startswith("/v1"):
                _check_key(request, self.settings.api_keys)
            length = request.headers.get("content-length", "0")
            if length.isdecimal() and int(length) > limit:
                raise ApiError(413, f"The body has {length} bytes; this server takes {limit} (--max-body-bytes).")
        except ApiError as error:
            await _error_response(error, self.metrics)(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, f"The body has more bytes than this server takes ({limit}; --max-body-bytes).")
            return message

        await self.app(scope, counted, send)


def _check_key(request: Request, keys: tuple[str, ...]) -> None:
    if not keys:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = key.strip().encode()
    if scheme.lower() != "bearer" or not any(secrets.compare_digest(given, known.encode()) for known in keys):
        raise ApiError(
            401, "Wrong or missing API key; send `Authorization: Bearer KEY`.", "authentication_error",
            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip


# ---------------------------------------------------------------- routes


def _add_routes(app: FastAPI, state: _State) -> None:
    _add_plain_routes(app, state)
    settings, codec = state.settings, state.decoder.loaded.codec

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatBody) -> Response:
        _check_model(settings, body.model)
        options = body.options()
        unused = state.settings.exclude_unused_tools and body.tool_choice == "none"
        tools = None if unused else body.tools
        _check(body.messages, tools, options)
        job = _job(state, request, body, body.messages, tools, options, body.n)
        state.worker.submit(job)
        inspect = INSPECT_HEADER in request.headers
        return await _respond(request, body, job, ChatAnswer(codec, body, job.salt, inspect, state.remember))

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        _check_model(settings, body.model)
        prompts = [_raw(state, prompt) for prompt in body.prompts()]
        options = body.options()
        _check([OF_A_COMPLETION], None, options)
        job = _job(state, request, body, prompts, None, options, body.n * len(prompts))
        state.worker.submit(job)
        return await _respond(request, body, job, TextAnswer(codec, body, prompts))

    if settings.inspector:
        _add_inspector(app, state)


def _add_plain_routes(app: FastAPI, state: _State) -> None:
    settings = state.settings

    @app.get("/health")
    async def health() -> Response:
        alive = state.worker.is_alive()
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/version")
    async def version_() -> dict[str, str]:
        return {"version": app.version}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(state, name) for name in settings.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(settings, name)
        return _model_card(state, name)


def _add_inspector(app: FastAPI, state: _State) -> None:
    @app.get("/ui", response_class=HTMLResponse, include_in_schema=False)
    async def inspector() -> str:
        return (Path(__file__).parent / "inspector.html").read_text("utf-8")

    @app.get("/ui/recent", include_in_schema=False)
    async def recent(request: Request) -> list[dict[str, Any]]:
        _check_key(request, state.settings.api_keys)
        mine = f"{request.headers.get('authorization', '')}\n"
        return [{k: v for k, v in run.items() if k != "key"} for run in state.recent if run["key"].startswith(mine)]


def _model_card(state: _State, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": int(state.started), "owned_by": "ooospec",
        "max_model_len": state.decoder.target.context_length,
    }  # fmt: skip


def _check_model(settings: ServerSettings, name: str) -> None:
    if name not in settings.names:
        known = ", ".join(settings.names)
        raise ApiError(
            404, f"No model {name[:200]!r} here; this server has {known}.", param="model", code="model_not_found"
        )


def _raw(state: _State, prompt: str | list[int]) -> RawPrompt:
    if isinstance(prompt, str):
        if not prompt:
            raise ApiError(400, "prompt must not be empty.", param="prompt")
        return RawPrompt(prompt)
    size = state.decoder.target.vocabulary
    wrong = next((token for token in prompt if not 0 <= token < size), None)
    if wrong is not None:
        raise ApiError(400, f"prompt holds token id {wrong}; this model's ids go from 0 to {size - 1}.", param="prompt")
    return RawPrompt(state.decoder.loaded.codec.decode(prompt), tuple(prompt))


def _check(messages: Any, tools: Any, options: dict[str, Any]) -> None:
    """Refuse a wrong request at once, not when its turn has come. Raises ApiError."""
    try:
        check_request(messages, tools, **options)
    except OooSpecError as error:
        raise as_api_error(error) from error


def _job(
    state: _State, request: Request, body: Body, messages: Any, tools: Any, options: dict[str, Any], choices: int
) -> Job:
    """Describe the work; nothing of it has been done yet."""
    key = request.headers.get("authorization", "")
    salt = f"{key}\n{body.cache_salt or ''}"
    seed = body.seed if body.seed is not None else secrets.randbits(62)
    prediction = body.prediction.text() if body.prediction is not None else None
    raw = isinstance(messages, list) and messages and isinstance(messages[0], RawPrompt)

    def make(decoder: Decoder, choice: int, memory: Any) -> Any:
        chosen = dict(options)
        which = messages[choice // body.n] if raw else messages
        chosen["seed"] = (seed + choice % body.n) % 2**62
        if "max_new_tokens" not in chosen:
            chosen["max_new_tokens"] = decoder.target.context_length
        return decoder.request(which, tools, salt=salt, memory=memory, prediction=prediction, clock=arrived, **chosen)

    loop, limit, arrived = asyncio.get_running_loop(), state.settings.time_limit_s, time.perf_counter()
    trace = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
    return Job(
        make, choices, key, salt, loop, limit, arrived=arrived, trace=trace,
        prompt_field="prompt" if raw else "messages", include_stop=body.include_stop_str_in_output,
    )  # fmt: skip


# ---------------------------------------------------------------- answers


Answer = ChatAnswer | TextAnswer


async def _respond(request: Request, body: Body, job: Job, answer: Answer) -> Response:
    """Send the answer as it is made, or when it is whole; a client that goes away ends the work."""
    first = await _next_item(request, job)
    if isinstance(first, Failed):
        raise first.error
    if body.stream:
        events = _stream(request, body, job, answer, first)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
    item: Item | None = first
    while not isinstance(item, AllDone):
        if item is None:
            return Response(status_code=499)  # nobody reads it
        if isinstance(item, Failed):
            raise item.error
        answer.chunks(item)
        item = await _next_item(request, job)
    return JSONResponse(answer.whole())


async def _next_item(request: Request, job: Job) -> Item | None:
    """Wait for the worker's next item; None when the client has gone away."""
    waiting = asyncio.ensure_future(job.out.get())
    try:
        while not await request.is_disconnected():
            done, _ = await asyncio.wait({waiting}, timeout=0.1)
            if done:
                return waiting.result()
            if time.perf_counter() > job.arrived + job.time_limit_s + 1.0:
                job.abort("timed_out")
                return Failed(job.too_late())
        job.abort()
        return None
    except asyncio.CancelledError:
        job.abort()
        raise
    finally:
        waiting.cancel()


async def _stream(request: Request, body: Body, job: Job, answer: Answer, first: Item | None) -> AsyncIterator[str]:
    """Write server-sent events; a fault after the first byte becomes an error event."""
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    item = first
    try:
        while not isinstance(item, AllDone | Failed):
            if item is None:
                return
            for chunk in answer.chunks(item):
                yield _event({**chunk, "usage": None} if with_usage else chunk)
            item = await _next_item(request, job)
        if isinstance(item, Failed):
            yield _event(item.error.body())
        elif with_usage:
            summed = answer.envelope.whole([], answer.results, body.n)
            yield _event(answer.envelope.chunk([], usage=summed["usage"], metrics=summed["metrics"]))
        yield "data: [DONE]\n\n"
    finally:
        if not isinstance(item, AllDone | Failed):
            job.abort()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
