"""Real vLLM on a CPU with the plug-in: `make test-vllm`. The target is the embedded 0.5B model."""

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from ooospec.bench.datasets import BenchRequest
from ooospec.bench.vllm_engine import (
    TIE_GAP,
    VllmSettings,
    _ask,
    _compare,
    _gaps,
    _measure,
    _served,
    read_rows,
    run_vllm_bench,
)
from ooospec.demo.examples import examples
from ooospec.models.progress import Silent
from ooospec.models.resolver import resolve_model

pytestmark = pytest.mark.vllm
TARGET = "qwen2.5-coder-0.5b-instruct"
CITIES = ("Oslo", "Rome", "Kuala Lumpur", "São José", "Nuuk", "Port-au-Prince", "Ulaanbaatar", "Reykjavík")


@pytest.fixture(scope="module")
def settings():
    beside = [sys.executable, "-m", "ooospec.cli", "sidecar", "--model", TARGET, "--address", "{address}"]
    return VllmSettings(
        model=str(resolve_model(TARGET, Silent())), name=TARGET, sidecar=beside, draft=None, methods=("plain", "ooo"),
        concurrency=(8,), max_new_tokens=96, max_model_len=2048,
    )  # fmt: skip


def asked() -> list[BenchRequest]:
    """Thirty requests with tools of their own; many that look alike, so that a mix-up would show."""
    known = [BenchRequest(f"demo-{r.id}", tuple(r.messages), r.tools) for r in examples()][:6]
    tools = known[0].tools
    made = [
        BenchRequest(f"{verb}-{city}", ({"role": "user", "content": f"{text} {city}?"},), tools)
        for verb, text in (
            ("a", "What is the weather in"),
            ("b", "Will it rain tomorrow in"),
            ("c", "How warm is it in"),
        )
        for city in CITIES
    ]
    return (known + made)[:30]


@pytest.fixture(scope="module")
def plain(settings, tmp_path_factory):
    """What plain vLLM writes, one request at a time, and how close its decisions were."""
    folder = tmp_path_factory.mktemp("plain")
    listed = {"demo": asked()}
    alone = replace(settings, concurrency=(1,))
    with _served(alone, "plain", folder / "plain.log") as url:
        rows = asyncio.run(_measure(alone, "plain", listed, url, Silent(), 0, 30))
        return rows, asyncio.run(_gaps(alone, listed, url))


def check(rows, plain):
    expected, gaps = plain
    _compare(rows, expected, gaps)
    wrong = [row for row in rows if not row.identical and not (row.gap is not None and row.gap <= TIE_GAP)]
    assert not wrong, [(row.request, row.gap) for row in wrong]
    return sum(row.identical for row in rows)


def test_a_batch_of_eight_writes_what_plain_vllm_writes(settings, plain, tmp_path):
    """Rows join and finish all the time; every request must be named, and none may get another one's draft."""
    log = tmp_path / "ooo.log"
    with _served(settings, "ooo", log) as url:
        rows = asyncio.run(_measure(settings, "ooo", {"demo": asked()}, url, Silent(), 0, 30))
        metrics = httpx.get(url.removesuffix("/v1") + "/metrics").text
    assert check(rows, plain) >= 27
    counts = msgspec.json.decode(log.with_suffix(".stats.json").read_bytes())
    assert counts.get("faults", 0) == 0 and counts["named"] == 30 and counts["requests"] == 32
    assert counts["accepted_hint"] > 200
    accepted = sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines()
                   if line.startswith("vllm:spec_decode_num_accepted_tokens_total"))  # fmt: skip
    assert accepted > 200


def test_rows_that_are_preempted_come_back_as_themselves(settings, plain, tmp_path):
    log = tmp_path / "small.log"
    small = replace(settings, extra=("--num-gpu-blocks-override", "12"), max_model_len=1024)
    with _served(small, "ooo", log) as url:
        rows = asyncio.run(_measure(small, "ooo", {"demo": asked()[6:22]}, url, Silent(), 0, 16))
        metrics = httpx.get(url.removesuffix("/v1") + "/metrics").text
    check(rows, plain)
    preempted = [float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines()
                 if line.startswith("vllm:num_preemptions_total")]  # fmt: skip
    assert sum(preempted) > 0, "the cache was not small enough for this test"


def test_a_sidecar_killed_in_mid_run_costs_speed_only(settings, plain, tmp_path):
    log = tmp_path / "killed.log"
    with _served(settings, "ooo", log) as url:
        first = asyncio.run(_measure(settings, "ooo", {"demo": asked()[:8]}, url, Silent(), 0, 8))
        pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and _is_sidecar(p)]
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        rest = asyncio.run(_measure(settings, "ooo", {"demo": asked()[8:16]}, url, Silent(), 0, 8))
    check(first + rest, plain)


def _is_sidecar(process: Path) -> bool:
    try:
        command = (process / "cmdline").read_bytes().split(b"\0")
        parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return False
    return b"sidecar" in command and parent == os.getpid()


def test_two_ranks_write_what_one_writes(settings, plain, tmp_path):
    two = replace(settings, cores="0|1", extra=("--tensor-parallel-size", "2"))
    with _served(two, "ooo", tmp_path / "two.log") as url:
        rows = asyncio.run(_measure(two, "ooo", {"demo": asked()[:10]}, url, Silent(), 0, 10))
    check(rows, plain)
    counts = msgspec.json.decode((tmp_path / "two.stats.json").read_bytes())
    assert counts.get("faults", 0) == 0 and counts["named"] == 10


def test_the_benchmark_measures_reports_and_goes_on(settings, tmp_path):
    short = replace(settings, concurrency=(1, 4), max_new_tokens=32)
    listed = {"demo": asked()[:4]}
    path = run_vllm_bench(short, listed, tmp_path, Silent())
    assert len(list(read_rows(path))) == 8
    text = (tmp_path / "vllm.md").read_text()
    assert f"## {TARGET}" in text and "| demo | 4 | 2 |" in text
    before = path.read_bytes()
    assert run_vllm_bench(short, listed, tmp_path, Silent()).read_bytes() == before


def test_the_servers_own_tool_calls_and_streams_work(settings, tmp_path):
    """Tool parsing and streaming are vLLM's; drafts must not disturb them."""
    request = asked()[6]
    with _served(settings, "ooo", tmp_path / "stream.log") as url:

        async def ask():
            async with httpx.AsyncClient(timeout=120) as client:
                return await _ask(client, settings, url, request.messages, request.tools, tool_choice="required")

        call = asyncio.run(ask())["message"]["tool_calls"][0]["function"]
    assert call["name"] in {tool["function"]["name"] for tool in request.tools}
