"""`ooospec bench-vllm`: OoO-Spec inside vLLM against plain vLLM and vLLM's own speculative methods.

For each method a server of its own, started with the same flags. Every request is timed once, at one of the
concurrencies (the requests are dealt out to them), so no cache and no memory has seen it before; with a warm
prefix its tools and system prompt have been, in a request of another user. The time is that of a call at the client.
Greedy outputs are compared with plain vLLM's, token by token; where they differ, the gap between plain vLLM's two best
log-probabilities at that place tells a rounding tie from a fault.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ooospec.bench.datasets import BenchRequest
from ooospec.bench.provenance import describe_run, origin_text
from ooospec.bench.rows import Run
from ooospec.bench.vllm_server import METHODS, START_LIMIT_S, Served, VllmSettings, served
from ooospec.chat.schema import openai_tools
from ooospec.chat.template import read_request
from ooospec.config import DEFAULT_SIDECAR
from ooospec.errors import UsageError
from ooospec.models.progress import Progress
from ooospec.sidecar.client import SidecarClient
from ooospec.sidecar.prompt import NEUTRAL_DIALOGUE

TIE_GAP = 0.5
"""Largest gap of log-probabilities, in nats, that counts as a rounding tie in bfloat16."""
FEW = 4
"""A concurrency gets requests in proportion to itself, and as many as one of `FEW` at least."""
LOCAL = ("model", "sidecar_command", "draft")
"""Settings that are paths of this machine; the command has their names."""
OTHER_USER = {"role": "user", "content": "Say hello in one word."}


class VllmRow(msgspec.Struct, kw_only=True):
    """One call."""

    target: str
    method: str
    concurrency: int
    benchmark: str
    request: str
    prefix: str = "cold"
    cores: str | None = None
    dtype: str = "bfloat16"
    sidecar: str | None = DEFAULT_SIDECAR
    """Of method ooo."""
    first_ms: float = 0.0
    """When the first tokens came."""
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
    if not done.issuperset(todo):
        with (out / "runs.jsonl").open("ab") as sink:
            shown = {name: value for name, value in asdict(settings).items() if name not in LOCAL}
            sink.write(msgspec.json.encode(describe_run(shown, {})) + b"\n")
    for method in todo:
        if method in done:
            continue
        progress.update("bench", finished, total, f"starting vLLM: {method}")
        with served(settings, method, out / f"{label}-{method}.log") as at:
            new = asyncio.run(_measure(settings, method, requests, at, progress, finished, total))
            if method == "plain":
                gaps = asyncio.run(_gaps(settings, requests, at.url))
                (out / f"{label}-gaps.json").write_bytes(msgspec.json.encode(gaps))
        known = msgspec.json.decode((out / f"{label}-gaps.json").read_bytes(), type=dict[str, Gaps])
        _compare(new, [row for row in rows if row.target == settings.name and row.method == "plain"] or new, known)
        rows += new
        finished += len(new)
        with path.open("ab") as sink:
            sink.write(b"".join(msgspec.json.encode(row) + b"\n" for row in new))
    runs_file = out / "runs.jsonl"
    lines = runs_file.read_bytes().splitlines() if runs_file.exists() else []
    runs = [msgspec.json.decode(line, type=Run) for line in lines]
    (out / "vllm.md").write_text(report(rows, runs), "utf-8")
    return path


def _check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("This needs vLLM in the same environment; see docs/vllm.md (`make venv-vllm`).")


def _check_same(
    settings: VllmSettings, requests: Mapping[str, Sequence[BenchRequest]], rows: Sequence[VllmRow], out: Path
) -> None:
    """Raise UsageError where the folder's plain rows are not of the same requests and conditions."""
    for row in rows:
        if (row.prefix, row.cores, row.dtype) != (settings.prefix, settings.cores, settings.dtype):
            raise UsageError(
                f"{out} was measured with --prefix {row.prefix}, --cores {row.cores} and --dtype {row.dtype}, not with "
                f"{settings.prefix}, {settings.cores} and {settings.dtype}; give those or another --out."
            )
    for row in rows:
        if row.method == "ooo" and row.target == settings.name and row.sidecar != settings.sidecar:
            kept = row.sidecar or "none"
            raise UsageError(
                f"{out} has OoO-Spec with --sidecar {kept}, this would be {settings.sidecar or 'none'}; give --sidecar "
                f"{kept} or another --out."
            )
    had = {(row.request, row.concurrency) for row in rows if row.target == settings.name and row.method == "plain"}
    wanted = {
        (request.id, concurrency)
        for listed in requests.values()
        for concurrency, share in deal(listed, settings.concurrency)
        for request in share
    }
    if had and had != wanted:
        raise UsageError(
            f"{out} has {len(had)} requests of {settings.name}, these settings choose {len(wanted)} or share them out "
            "otherwise; give the same --benchmarks, --limit and --concurrency to go on with it, or another --out."
        )


def read_rows(path: Path) -> Iterator[VllmRow]:
    """Read the rows of a file; none where there is no file."""
    if path.exists():
        for line in path.read_bytes().splitlines():
            yield msgspec.json.decode(line, type=VllmRow)


# ---------------------------------------------------------------- calls


def deal(requests: Sequence[BenchRequest], concurrencies: Sequence[int]) -> list[tuple[int, list[BenchRequest]]]:
    """Deal requests out, each to one concurrency, so that the larger ones get enough to be reached.

    Raises UsageError for fewer requests than concurrencies.
    """
    if len(requests) < len(concurrencies):
        raise UsageError(
            f"{len(requests)} requests of a benchmark cannot be shared out to {len(concurrencies)} concurrencies; "
            "give a larger --limit or a shorter --concurrency."
        )
    weights = [max(FEW, concurrency) for concurrency in concurrencies]
    shares: list[list[BenchRequest]] = [[] for _ in concurrencies]
    for request in requests:
        empty = [level for level in range(len(weights)) if not shares[level]]
        least = min(empty or range(len(weights)), key=lambda level: (len(shares[level]) + 1) / weights[level])
        shares[least].append(request)
    return list(zip(concurrencies, shares, strict=True))


async def _measure(
    settings: VllmSettings, method: str, requests: Mapping[str, Sequence[BenchRequest]], at: Served, progress: Progress,
    finished: int, total: int,
) -> list[VllmRow]:  # fmt: skip
    rows, url = list[VllmRow](), at.url
    async with httpx.AsyncClient(timeout=START_LIMIT_S) as client:
        for _ in range(2):
            await _ask(client, settings, url, [OTHER_USER], None)
        for name, listed in requests.items():
            for concurrency, share in deal(listed, settings.concurrency):
                if settings.prefix == "warm":
                    progress.update("bench", finished + len(rows), total, f"{method} {name} x{concurrency}: prefixes")
                    await _warm(client, settings, at, share)
                room = asyncio.Semaphore(concurrency)

                async def one(request: BenchRequest, name: str = name, concurrency: int = concurrency,
                              room: asyncio.Semaphore = room) -> None:  # fmt: skip
                    async with room:
                        first, took, choice = await _timed(client, settings, url, request)
                    rows.append(
                        VllmRow(
                            target=settings.name, method=method, concurrency=concurrency, benchmark=name,
                            request=request.id, prefix=settings.prefix, cores=settings.cores, dtype=settings.dtype,
                            sidecar=settings.sidecar if method == "ooo" else None, first_ms=round(first, 2),
                            total_ms=round(took, 2), output_ids=choice["token_ids"],
                            finish_reason=choice["finish_reason"],
                        )
                    )  # fmt: skip
                    progress.update("bench", finished + len(rows), total, f"{method} {name} x{concurrency}")

                await asyncio.gather(*map(one, share))
    return rows


async def _warm(
    client: httpx.AsyncClient, settings: VllmSettings, at: Served, requests: Sequence[BenchRequest]
) -> None:
    """Let another user ask with the same tools and system prompts, so that both prefix caches know them."""
    beside = SidecarClient(at.sidecar) if at.sidecar is not None else None
    for request in requests:
        system = [message for message in request.messages[:1] if message["role"] == "system"]
        await _ask(client, settings, at.url, [*system, OTHER_USER], request.tools, max_tokens=1)
        _, tools, _ = read_request(list(request.messages), request.tools)
        if beside is not None and tools:  # the wave of the request above ended with its only token
            mailbox = beside.submit(tools, [(turn.role, turn.text) for turn in NEUTRAL_DIALOGUE])
            await asyncio.to_thread(mailbox.wait, START_LIMIT_S)
            mailbox.close()
    if beside is not None:
        beside.close()


def _body(settings: VllmSettings, messages: Any, tools: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": settings.name, "messages": list(messages), "temperature": 0, "return_token_ids": True,
        "max_tokens": settings.max_new_tokens, **({"tools": openai_tools(tools)} if tools else {}), **more,
    }  # fmt: skip


async def _timed(
    client: httpx.AsyncClient, settings: VllmSettings, url: str, request: BenchRequest
) -> tuple[float, float, dict[str, Any]]:
    """Stream one answer; return milliseconds to its first tokens, in all, and the choice put together."""
    start, first = time.perf_counter(), 0.0
    choice: dict[str, Any] = {"token_ids": [], "finish_reason": ""}
    body = _body(settings, request.messages, request.tools, stream=True)
    async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise UsageError(f"vLLM answered {answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            for part in json.loads(data)["choices"] if line != data and data != "[DONE]" else ():
                choice["token_ids"] += part.get("token_ids") or []
                choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
                first = first or ((time.perf_counter() - start) * 1e3 if choice["token_ids"] else 0.0)
    return first, (time.perf_counter() - start) * 1e3, choice


async def _ask(
    client: httpx.AsyncClient, settings: VllmSettings, url: str, messages: Any, tools: Any, **more: Any
) -> dict[str, Any]:
    """Send one request; returns its only choice. Raises UsageError with what the server said."""
    answer = await client.post(f"{url}/chat/completions", json=_body(settings, messages, tools, **more))
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


def report(rows: Sequence[VllmRow], runs: Sequence[Run]) -> str:
    """Write a table for every target: seconds a call, and how many times faster than plain vLLM."""
    lines = [f"- {line}" for line in origin_text(runs)] + [""]
    for target in dict.fromkeys(row.target for row in rows):
        mine = [row for row in rows if row.target == target]
        methods = [name for name in METHODS if any(row.method == name for row in mine)]
        cells = list(dict.fromkeys((row.benchmark, row.concurrency) for row in mine))
        cores = f"cores {mine[0].cores} for vLLM, the others for the sidecar" if mine[0].cores else "all cores shared"
        lines += [f"## {target}, {mine[0].prefix} prefix, {cores}", ""]
        lines += [
            "Median seconds a call; ratio of summed times to plain vLLM's, and of what is left of them when plain's "
            "time to its first token is taken off both.",
            "",
        ]
        alone = [row for row in mine if row.method == "ooo" and row.sidecar is None]
        lines += ["ooo has no sidecar here: schemas, earlier calls and the prompt alone.", ""] if alone else []
        lines += ["| benchmark | concurrency | requests | " + " | ".join(methods) + " |"]
        lines += ["|---|---|---|" + "---|" * len(methods)]
        for benchmark, concurrency in cells:
            here = {
                name: {r.request: r for r in mine
                       if (r.method, r.benchmark, r.concurrency) == (name, benchmark, concurrency)}
                for name in methods
            }  # fmt: skip
            said = {name: _cell(here[name], here["plain"], name) for name in methods}
            best = max(methods, key=lambda name: said[name][1])
            shown = [f"**{said[name][0]}**" if name == best else said[name][0] for name in methods]
            lines.append(f"| {benchmark} | {concurrency} | {len(here['plain'])} | " + " | ".join(shown) + " |")
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


def _cell(rows: Mapping[str, VllmRow], plain: Mapping[str, VllmRow], name: str) -> tuple[str, float]:
    """Return a method's cell and its speedup."""
    pairs = [(plain[request], row) for request, row in rows.items() if request in plain]
    if not pairs:
        return "-", 0.0
    faster = sum(a.total_ms for a, _ in pairs) / sum(row.total_ms for _, row in pairs)
    seconds = statistics.median(row.total_ms for _, row in pairs) / 1e3
    if name == "plain":
        return f"{seconds:.2f}", faster
    after = [sum(row.total_ms - a.first_ms for a, row in pairs) for pairs in ([(a, a) for a, _ in pairs], pairs)]
    decode = f", decode {after[0] / max(1.0, after[1]):.2f}x" if all(a.first_ms for a, _ in pairs) else ""
    return f"{seconds:.2f} ({faster:.2f}x{decode})", faster
