"""OpenTelemetry spans of requests: arrival to last token, with prefill, decode and the sidecar's wave inside.

Names of attributes are those of vLLM and of OpenTelemetry's conventions for generative AI where they have one. A span
never holds messages, arguments or text.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ooospec.core import BONUS
from ooospec.errors import UsageError
from ooospec.generation import Generation
from ooospec.server.worker import Job

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


logger = logging.getLogger("ooospec.server")


def check_endpoint(endpoint: str) -> None:
    """Raise UsageError for what is no URL, or where OpenTelemetry is not installed."""
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--otlp-traces-endpoint must be an http:// or https:// URL; got {endpoint!r}.")
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        importlib.import_module("opentelemetry.sdk.trace.export")
    except ImportError:
        raise UsageError("--otlp-traces-endpoint needs OpenTelemetry; install the extra: ooo-spec[otel].") from None


class Tracing:
    """Writes one trace per answered choice. Continues the client's trace where the request has a `traceparent`."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._tracer, self._model = provider, provider.get_tracer("ooospec"), model
        self._read = TraceContextTextMapPropagator().extract

    @classmethod
    def to(cls, endpoint: str, model: str) -> Tracing:
        """Send spans to an OTLP/HTTP endpoint, such as http://127.0.0.1:4318/v1/traces. Raises UsageError."""
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "ooospec"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        return cls(provider, model)

    def observe(self, kind: str, value: Any) -> None:
        """Take a report of the worker; only answers are traced."""
        if kind != "result":
            return
        try:
            self._record(*value)
        except Exception:  # an answer must not fail because its trace does
            logger.exception("a request could not be traced")

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _record(self, job: Job, result: Generation) -> None:
        from opentelemetry.trace import SpanKind

        now, wall = time.perf_counter(), time.time_ns()

        def at(ms: float) -> int:
            """Return the time `ms` after arrival, in ns since the epoch."""
            return wall - round((now - job.arrived) * 1e9) + round(ms * 1e6)

        queued = (job.started - job.arrived) * 1e3
        span = self._tracer.start_span(
            "llm_request", self._read(job.trace), SpanKind.SERVER, _attributes(self._model, job, result, queued),
            start_time=at(0),
        )  # fmt: skip
        begun = max(queued, result.rounds[0].start_ms)
        parts = [("prefill", begun, result.prefill_ms), ("decode", result.prefill_ms, result.total_ms)]
        hint = result.hint
        if hint is not None and hint.ready_ms is not None:
            ended = hint.complete_ms if hint.complete_ms is not None else result.total_ms
            parts.append(("sidecar_wave", max(0.0, ended - hint.prefill_ms - hint.wave_ms), ended))
        from opentelemetry.trace import set_span_in_context

        for name, start, end in parts:
            part = self._tracer.start_span(name, set_span_in_context(span), start_time=at(start))
            part.end(at(max(start, end)))
        span.end(at(result.total_ms))


def _attributes(model: str, job: Job, result: Generation, queued_ms: float) -> Mapping[str, str | int | float]:
    named: dict[str, str | int | float] = {
        "gen_ai.request.id": job.id,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": result.prompt_tokens,
        "gen_ai.usage.completion_tokens": len(result.output_ids),
        "gen_ai.latency.time_in_queue": queued_ms / 1e3,
        "gen_ai.latency.time_to_first_token": result.prefill_ms / 1e3,
        "gen_ai.latency.e2e": result.total_ms / 1e3,
        "ooospec.finish_reason": result.finish_reason,
        "ooospec.cached_tokens": result.cached_tokens,
        "ooospec.rounds": result.num_rounds,
    }
    for source, count in result.accepted_by_source.items():
        if source != BONUS:
            named[f"ooospec.accepted.{source}"] = count
    if result.hint is not None:
        named["ooospec.hint.payload_bytes"] = result.hint.payload_bytes
        if result.hint.ready_round is not None:
            named["ooospec.hint.ready_round"] = result.hint.ready_round
    return named
