"""bench-vllm against a stub of vLLM's server: what is asked, compared, kept and reported."""

import contextlib
import json
import threading
import time

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from ooospec.bench import vllm_engine, vllm_server
from ooospec.bench.datasets import BenchRequest
from ooospec.bench.vllm_engine import read_rows, run_vllm_bench
from ooospec.bench.vllm_server import Served, VllmSettings, speculative_config
from ooospec.cli import app
from ooospec.config import DEFAULT_SIDECAR
from ooospec.errors import UsageError
from ooospec.models.progress import Silent

REQUESTS = {"demo": [BenchRequest(f"r{n}", ({"role": "user", "content": str(n)},), None) for n in range(6)]}
DELAY_S = {"plain": 0.06, "ngram": 0.04, "ooo": 0.01}


@pytest.fixture
def stub(monkeypatch):
    """Servers that answer with three tokens; ngram writes another third one for r1 and another second one for r2."""
    asked, running = [], []

    def answer(method, body):
        number = body["messages"][0]["content"]
        ids = [1, 2, 3]
        if method == "ngram" and number in "12":
            ids = [1, 2, 9] if number == "1" else [1, 8, 3]
        places = [{"top_logprobs": [{"logprob": -0.1}, {"logprob": -0.1 - gap}]} for gap in (5.0, 4.0, 0.2)]
        return {"token_ids": ids, "finish_reason": "stop", "message": {}, "logprobs": {"content": places}}

    @contextlib.contextmanager
    def served(settings, method, log):
        async def chat(request: Request):
            body = await request.json()
            asked.append((method, body))
            if not body.get("stream"):
                return JSONResponse({"choices": [answer(method, body)]})
            choice = answer(method, body)
            parts = [
                {"token_ids": choice["token_ids"][:1], "finish_reason": None},
                {"token_ids": choice["token_ids"][1:]},
            ]
            parts[1]["finish_reason"] = choice["finish_reason"]

            def stream():
                yield 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
                for part in parts:
                    time.sleep(DELAY_S[method] / 2)
                    yield f"data: {json.dumps({'choices': [part]})}\n\n"
                yield 'data: {"choices": []}\n\ndata: [DONE]\n\n'

            return StreamingResponse(stream(), media_type="text/event-stream")

        routes = [Route("/v1/chat/completions", chat, methods=["POST"])]
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        running.append(method)
        yield Served(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", None)
        server.should_exit = True
        thread.join()

    monkeypatch.setattr(vllm_engine, "served", served)
    monkeypatch.setattr(vllm_engine, "_check_installed", lambda: None)
    return asked, running


def settings(*methods, name="org/model", concurrency=(1, 2), prefix="cold", cores=None, sidecar="small"):
    return VllmSettings(
        model="/m", name=name, sidecar=sidecar, sidecar_command=(), draft=None, methods=methods,
        concurrency=concurrency, max_new_tokens=7, prefix=prefix, cores=cores,
    )  # fmt: skip


def test_every_request_is_timed_once_compared_and_reported(stub, tmp_path):
    asked, running = stub
    path = run_vllm_bench(settings("plain", "ngram", "ooo"), REQUESTS, tmp_path, Silent())
    rows = list(read_rows(path))
    assert running == ["plain", "ngram", "ooo"] and len(rows) == 18
    assert all(0 < row.first_ms < row.total_ms and row.output_ids[:1] == [1] for row in rows)
    timed = [body for method, body in asked if method == "ooo" and body["messages"][0]["content"].isdecimal()]
    assert len(timed) == 6 and all(b["temperature"] == 0 and b["max_tokens"] == 7 for b in timed)
    assert {(r.request, r.concurrency) for r in rows if r.method == "plain"} == {
        (f"r{n}", 1 if n % 2 == 0 else 2) for n in range(6)
    }
    assert {(r.request, r.gap) for r in rows if not r.identical} == {("r1", 0.2), ("r2", 4.0)}
    text = (tmp_path / "vllm.md").read_text()
    assert "## org/model, cold prefix, all cores shared\n" in text and "- Command: `" in text
    assert "- ngram: 4 of 6; 2 others, 1 of them near-ties (gaps 0.200, 4.000)" in text
    assert "- ooo: 6 of 6\n" in text
    line = next(line for line in text.splitlines() if line.startswith("| demo | 1 | 3 |"))
    assert "**" in line.split("|")[-2]  # the last column, ooo, is the fastest
    before = path.read_bytes()
    assert run_vllm_bench(settings("plain", "ngram", "ooo"), REQUESTS, tmp_path, Silent()).read_bytes() == before
    assert len(running) == 3


@pytest.mark.parametrize("sidecar", ["small", None])
def test_the_report_says_where_there_was_no_sidecar(stub, tmp_path, sidecar):
    rows = list(read_rows(run_vllm_bench(settings("plain", "ooo", sidecar=sidecar), REQUESTS, tmp_path, Silent())))
    assert {(row.method, row.sidecar) for row in rows} == {("plain", None), ("ooo", sidecar)}
    assert ("ooo has no sidecar here" in (tmp_path / "vllm.md").read_text()) is (sidecar is None)
    with pytest.raises(UsageError, match=f"--sidecar {sidecar or 'none'}, this would be other; give --sidecar"):
        run_vllm_bench(settings("plain", "ooo", sidecar="other"), REQUESTS, tmp_path, Silent())


@pytest.mark.parametrize(
    ("levels", "count", "sizes"),
    [((1, 4, 8), 16, [4, 4, 8]), ((1, 2), 5, [3, 2]), ((8,), 3, [3]), ((1, 32), 9, [1, 8]), ((1, 32), 7, [1, 6])],
)
def test_a_large_concurrency_gets_enough_requests_to_be_reached(levels, count, sizes):
    dealt = vllm_engine.deal(list(range(count)), levels)
    assert [level for level, _ in dealt] == list(levels) and [len(share) for _, share in dealt] == sizes
    assert sorted(number for _, share in dealt for number in share) == list(range(count))


def test_a_folder_of_other_requests_is_not_gone_on_with(stub, tmp_path):
    run_vllm_bench(settings("plain"), {"demo": REQUESTS["demo"][:4]}, tmp_path, Silent())
    with pytest.raises(UsageError, match="has 4 requests of org/model, these settings choose 6 or share"):
        run_vllm_bench(settings("plain", "ooo"), REQUESTS, tmp_path, Silent())
    with pytest.raises(UsageError, match="choose 4 or share them out otherwise"):
        few = {"demo": REQUESTS["demo"][:4]}
        run_vllm_bench(settings("plain", "ooo", concurrency=(1, 8)), few, tmp_path, Silent())
    with pytest.raises(UsageError, match="1 requests of a benchmark cannot be shared out to 2 concurrencies"):
        run_vllm_bench(settings("plain"), {"demo": REQUESTS["demo"][:1]}, tmp_path / "none", Silent())
    run_vllm_bench(settings("plain", "ooo"), {"demo": REQUESTS["demo"][:4]}, tmp_path, Silent())
    for name in ("runs.jsonl", "vllm.md"):  # as in a folder of an earlier version
        (tmp_path / name).unlink()
    run_vllm_bench(settings("plain", "ooo"), {"demo": REQUESTS["demo"][:4]}, tmp_path, Silent())
    assert "| demo |" in (tmp_path / "vllm.md").read_text()
    assert [row.method for row in read_rows(tmp_path / "vllm.jsonl")] == ["plain"] * 4 + ["ooo"] * 4


def test_a_warm_prefix_is_what_another_user_asked_with_the_same_tools_and_system_prompt(stub, tmp_path):
    asked, _ = stub
    said = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "1"})
    run_vllm_bench(
        settings("plain", prefix="warm", concurrency=(1,)),
        {"demo": [BenchRequest("r1", said, ({"name": "f"},))]},
        tmp_path,
        Silent(),
    )
    before, timed = [body for _, body in asked if len(body["messages"]) == 2][:2]
    assert before["messages"] == [said[0], vllm_engine.OTHER_USER] and before["max_tokens"] == 1
    assert timed["messages"] == list(said) and before["tools"] == timed["tools"] != []
    with pytest.raises(UsageError, match="--prefix warm, --cores None and --dtype bfloat16, not with warm, 0 and"):
        run_vllm_bench(settings("plain", prefix="warm", cores="0"), REQUESTS, tmp_path, Silent())


def test_the_sidecar_gets_the_cores_that_vllm_does_not_use():
    import os
    import subprocess
    import sys

    mine = sorted(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for cores, left in ((None, mine), (f"{mine[0]}-{mine[-1]}|{mine[0]}", mine), (str(mine[0]), mine[1:] or mine)):
            vllm_server.keep_off(child.pid, cores)
            assert sorted(os.sched_getaffinity(child.pid)) == left
    finally:
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "ooo"], "must contain plain"),
        (["--methods", "plain,eagle"], "--methods takes plain, ngram"),
        (["--methods", "plain,draft_model"], "needs --draft MODEL"),
        (["--concurrency", "1,x"], "--concurrency takes whole numbers"),
        (["--concurrency", "0"], "numbers from 1"),
        (["--methods", "plain", "--prefix", "hot"], "--prefix takes warm or cold; got 'hot'"),
        (["--methods", "plain", "--cores", "a"], "--cores takes cores as in 0, 0-3 or 0-3|4-7; got 'a'"),
        (["--methods", "plain", "--cores", "0-3-5"], "--cores takes cores as in 0, 0-3 or 0-3|4-7; got '0-3-5'"),
    ],
)
def test_wrong_settings_are_told_in_a_line(arguments, words, monkeypatch, tmp_path, folder_of_tiny):
    monkeypatch.setattr("ooospec.bench.datasets.load_benchmark", lambda name, data: [])
    monkeypatch.setattr("ooospec.bench.datasets.suite", lambda suite, name, listed: listed)
    options = ["--out", str(tmp_path), "--target", str(folder_of_tiny), "--benchmarks", "bfcl"]
    result = CliRunner().invoke(app, ["bench-vllm", *options, *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "sidecar"),
    [
        ([], None),  # the tiny target is smaller than the sidecar, and both would use the same cores
        (["--cores", "0"], DEFAULT_SIDECAR),
        (["--adapter", "mine"], DEFAULT_SIDECAR),
        (["--sidecar", "org/small"], "org/small"),
        (["--sidecar", "none", "--cores", "0"], None),
    ],
)
def test_the_default_sidecar_is_measured_where_it_pays(arguments, sidecar, monkeypatch, tmp_path, folder_of_tiny):
    given = []
    monkeypatch.setattr("ooospec.bench.datasets.load_benchmark", lambda name, data: [])
    monkeypatch.setattr("ooospec.bench.datasets.suite", lambda suite, name, listed: listed)
    monkeypatch.setattr("ooospec.target.loading.default_device", lambda: "cpu")
    monkeypatch.setattr(vllm_engine, "run_vllm_bench", lambda chosen, *rest: given.append(chosen) or tmp_path / "rows")
    options = ["--out", str(tmp_path), "--target", str(folder_of_tiny), "--methods", "plain,ooo"]
    result = CliRunner().invoke(app, ["bench-vllm", *options, *arguments])
    assert result.exit_code == 0 and given[0].sidecar == sidecar, result.output
    if sidecar is not None:
        command = list(given[0].sidecar_command)
        assert command[command.index("--model") + 1] == sidecar and command[-2:] == ["--address", "{address}"]


def test_a_server_that_does_not_start_says_its_last_words(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_server, "SERVER", "no.such.module")
    started = vllm_server.served(settings("plain"), "plain", tmp_path / "plain.log")
    with pytest.raises(UsageError, match=r"vLLM did not start; see .*plain.log.*No module named"), started:
        pass


def test_configurations_are_those_of_vllm():
    chosen = VllmSettings(
        model="m", name="m", sidecar=None, sidecar_command=(), draft="d", methods=("plain",), concurrency=(1,),
        num_speculative_tokens=12,
    )  # fmt: skip
    assert speculative_config(chosen, "plain") is None
    assert speculative_config(chosen, "draft_model")["model"] == "d"
    assert speculative_config(chosen, "ooo") == {
        "method": "custom_class", "model": "ooospec.integrations.vllm.OooSpecProposer", "num_speculative_tokens": 12
    }  # fmt: skip
