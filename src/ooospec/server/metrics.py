"""Prometheus metrics: vLLM's names where it has them, each with the draft's source, and this project's own."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ooospec.core import BONUS, Commit
from ooospec.generation import Generation


class Metrics:
    """Counts over all requests of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        self.drafts = Counter("vllm:spec_decode_num_drafts", "Rounds that verified a draft.", **make)
        self.draft_tokens = Counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens verified.", **make)
        self.accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted, by source.", ["source"], **make
        )
        self.per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by place in the draft.",
            ["position"],
            **make,
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens.", **make)
        self.output_tokens = Counter("vllm:generation_tokens", "Tokens written.", **make)
        self.looked_up = Counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", **make)
        self.cached_tokens = Counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", **make)
        self.requests = Counter("vllm:request_success", "Requests answered.", ["finished_reason"], **make)
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests in the queue.", **make)
        self.running = Gauge("vllm:num_requests_running", "Requests being decoded.", **make)
        self.errors = Counter("ooospec:error_responses", "Answers that are an error, by status.", ["status"], **make)
        self.memory = Gauge("ooospec:memory_bytes", "What all memories of earlier calls take.", **make)
        self._counters = {
            "refused": Counter("ooospec:requests_refused", "Requests refused because the queue was full.", **make),
            "aborted": Counter("ooospec:requests_aborted", "Requests whose client went away.", **make),
            "timed_out": Counter("ooospec:requests_timed_out", "Requests that took longer than allowed.", **make),
            "dropped": Counter("ooospec:requests_dropped", "Requests ended because the server was stopped.", **make),
            "failed": Counter("ooospec:requests_failed", "Requests that failed inside the server.", **make),
            "memories_dropped": Counter(
                "ooospec:memories_dropped", "Memories of keys and salts that made room.", **make
            ),
        }
        self.undrafted = Counter(
            "ooospec:rounds_without_draft", "Rounds in which no draft was worth verifying.", **make
        )
        self.ready_round = Histogram(
            "ooospec:hint_ready_round",
            "Round that first had the function choice.",
            buckets=(0, 1, 2, 3, 5, 8, 13),
            **make,
        )
        self.no_hint = Counter("ooospec:requests_without_hint", "Requests with tools whose hint never came.", **make)
        self.wave_s = Histogram("ooospec:sidecar_wave_seconds", "Time of the sidecar's wave.", **make)
        self.payload = Histogram(
            "ooospec:hint_payload_bytes", "Bytes of a hint.", buckets=(16, 32, 64, 96, 128, 256, 512), **make
        )
        self.first_token = Histogram("vllm:time_to_first_token_seconds", "Arrival to first commit.", **make)
        self.total = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", **make)
        self.warnings = Gauge("ooospec:warnings", "Faults of the sidecar and of proposers, by kind.", ["kind"], **make)

    def observe(self, kind: str, value: Any) -> None:
        """Take a report of the worker."""
        if kind == "result":
            self._result(value[1])
        elif kind in ("waiting", "running"):
            (self.waiting if kind == "waiting" else self.running).set(value)
        elif kind == "memory_bytes":
            self.memory.set(value)
        else:
            self._counters[kind].inc(value)

    def _result(self, result: Generation) -> None:
        for commit in result.rounds:
            self._commit(commit)
        self.prompt_tokens.inc(result.prompt_tokens)
        self.looked_up.inc(result.prompt_tokens)
        self.cached_tokens.inc(result.cached_tokens)
        self.output_tokens.inc(len(result.output_ids))
        self.requests.labels("length" if result.finish_reason == "length" else "stop").inc()
        self.first_token.observe(result.prefill_ms / 1e3)
        self.total.observe(result.total_ms / 1e3)
        if result.hint is not None:
            if result.hint.ready_round is None:
                self.no_hint.inc()
            else:
                self.ready_round.observe(result.hint.ready_round)
            if result.hint.wave_ms:
                self.wave_s.observe(result.hint.wave_ms / 1e3)
            self.payload.observe(result.hint.payload_bytes)
        for kind, count in result.warnings.items():
            self.warnings.labels(kind).set(count)

    def _commit(self, commit: Commit) -> None:
        if not commit.drafted:
            self.undrafted.inc()
            return
        self.drafts.inc()
        self.draft_tokens.inc(commit.drafted)
        for position, source in enumerate(commit.sources):
            if source != BONUS:
                self.accepted.labels(source).inc()
                self.per_position.labels(str(position)).inc()

    def text(self) -> bytes:
        """Write all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


def speculation_of(results: list[Generation]) -> dict[str, Any]:
    """Sum up the speculation of one answer, with vLLM's field names."""
    rounds = [commit for result in results for commit in result.rounds]
    drafted = [commit for commit in rounds if commit.drafted]
    by_source: dict[str, int] = {}
    positions: list[int] = []
    for commit in drafted:
        for position, source in enumerate(commit.sources):
            if source != BONUS:
                by_source[source] = by_source.get(source, 0) + 1
                positions += [0] * (position + 1 - len(positions))
                positions[position] += 1
    accepted = sum(by_source.values())
    hint = results[0].hint if results else None
    return {
        "num_drafts": len(drafted),
        "num_draft_tokens": sum(commit.drafted for commit in drafted),
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": positions,
        "mean_acceptance_length": round(1 + accepted / len(drafted), 4) if drafted else 1.0,
        "num_rounds": len(rounds),
        "accepted_by_source": by_source,
        "hint_ready_round": hint.ready_round if hint is not None else None,
        "hint_payload_bytes": hint.payload_bytes if hint is not None else None,
    }
