"""The front end's side of the vLLM plug-in, without vLLM: waves start at arrival and reach the workers by prompt."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from conftest import WEATHER
from ooospec.errors import UsageError
from ooospec.integrations.rows import RowDrafter, Situation, prompt_key
from ooospec.integrations.vllm import OooSpecMiddleware, OooSpecProposer, announce
from ooospec.integrations.vllm.connection import ADDRESS_VARIABLE, STATS_VARIABLE, Connection
from ooospec.integrations.vllm.front import _has_media
from ooospec.integrations.vllm.worker import _Hints, _tokens_run, check_version
from ooospec.sidecar.client import SidecarClient
from ooospec.sidecar.protocol import Announce, Function, SlotValue
from ooospec.sidecar.server import SidecarServer, bind
from test_sidecar import wait_for

MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]
PROMPT = [5, 6, 7, 8]


class Predictor:
    """Says the last word of the dialogue; waits for `go` before the slots."""

    def __init__(self):
        self.go, self.asked = threading.Event(), []
        self.go.set()

    def wave(self, request):
        self.asked.append(request)
        if request.only >= 0:
            yield SlotValue(request.request, request.only, max(0, request.slot), 70, request.written + " more")
            return
        yield Function(request.request, (0,), (90,))
        while not self.go.is_set():
            yield None
            time.sleep(0.001)
        yield SlotValue(request.request, 0, 0, 80, request.dialogue[-1].text.rstrip("?").split()[-1])

    def timings(self):
        return 1, 2, 3


@pytest.fixture(autouse=True)
def _closed(monkeypatch):
    """Close every connection that a test made."""
    made, begin = [], Connection.__init__
    monkeypatch.setattr(Connection, "__init__", lambda self, *given: (made.append(self), begin(self, *given))[1])
    yield
    for connection in made:
        connection.close()


@pytest.fixture
def sidecar(monkeypatch):
    """A sidecar in a thread; yields its predictor."""
    socket, address = bind("tcp://127.0.0.1:*")
    predictor, ended = Predictor(), threading.Event()
    server = SidecarServer(predictor, "stub", socket)

    def serve():
        while not ended.is_set():
            if socket.poll(10) or server._job is not None or server._queue:
                server.turn()
        socket.close(0)

    thread = threading.Thread(target=serve)
    thread.start()
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    yield predictor
    ended.set()
    thread.join()


def app_with(seen, tokenize=None, hold=None):
    """An app that answers as vLLM does on the two routes, a chat when `hold` is set."""

    async def chat(request: Request):
        seen.append(("chat", await request.json()))
        while hold is not None and not hold.is_set():
            await asyncio.sleep(0.005)
        return JSONResponse({"ok": True})

    async def tokens(request: Request):
        seen.append(("tokenize", await request.json()))
        return tokenize() if tokenize is not None else JSONResponse({"tokens": PROMPT})

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/tokenize", tokens, methods=["POST"])]
    return OooSpecMiddleware(Starlette(routes=routes))


def post(app, body, **options):
    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            answer = await client.post("/v1/chat/completions", content=body, **options)
            await asyncio.sleep(0.1)  # the request is named behind the answer
            return answer

    return asyncio.run(send())


def test_a_hint_travels_from_the_front_end_to_the_worker(sidecar):
    sidecar.go.clear()
    hints, seen, hold = _Hints(), [], threading.Event()
    body = {"model": "m", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 5, "chat_template_kwargs": {"a": 1}}
    answers = []
    asking = threading.Thread(target=lambda: answers.append(post(app_with(seen, hold=hold), json.dumps(body))))
    asking.start()
    assert wait_for(lambda: len(seen) == 2) and dict(seen)["chat"] == body
    assert dict(seen)["tokenize"] == {key: value for key, value in body.items() if key != "max_tokens"}
    tools, poll, ask = wait_for(lambda: hints.find(prompt_key(PROMPT)))
    assert tools[0].name == "get_weather" and tools[0].slots[0].name == "city" and tools[0].slots[0].required
    assert wait_for(lambda: poll().function).names == ("get_weather",)
    assert not poll().slots  # streamed: the function is here before the slots
    sidecar.go.set()
    assert wait_for(lambda: poll().complete) and poll().slots["get_weather", "city"].value == "Oslo"
    assert ask("get_weather", "city", "Os")  # the target has begun the value otherwise
    assert wait_for(lambda: poll().slots["get_weather", "city"].value == "Os more" and poll().complete)
    assert sidecar.asked[-1].dialogue == sidecar.asked[0].dialogue and sidecar.asked[-1].written == "Os"
    assert hints.find(prompt_key([*PROMPT, 9])) is None
    hold.set()
    asking.join()
    assert answers[0].json() == {"ok": True}


def test_the_wave_of_an_answered_request_is_stopped(sidecar):
    sidecar.go.clear()
    hints = _Hints()
    post(app_with([]), json.dumps({"messages": MESSAGES, "tools": [WEATHER]}))
    _, poll, _ = wait_for(lambda: hints.find(prompt_key(PROMPT)))
    assert wait_for(lambda: poll().failed) and not poll().slots


@pytest.mark.parametrize(
    "body",
    ["[]", "5", '"x"', json.dumps({"messages": 5, "tools": [WEATHER]}), json.dumps({"messages": MESSAGES}),
     json.dumps({"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "none"}),
     json.dumps({"messages": MESSAGES, "tools": 7})],
)  # fmt: skip
def test_other_requests_pass_unread(sidecar, body):
    seen = []
    assert post(app_with(seen), body).status_code == 200
    assert not sidecar.asked and "tokenize" not in dict(seen)


@pytest.mark.parametrize("body", ["", "{", "\xff"])
def test_what_is_no_json_is_left_to_the_server(sidecar, body):
    with pytest.raises(json.JSONDecodeError):
        post(app_with([]), body)
    assert not sidecar.asked


@pytest.mark.parametrize("broken", [lambda: JSONResponse({"error": "no"}, 400), lambda: 1 / 0])
def test_a_request_that_cannot_be_named_goes_on_without_hints(sidecar, broken):
    seen = []
    answer = post(app_with(seen, broken), json.dumps({"messages": MESSAGES, "tools": [WEATHER]}))
    assert answer.status_code == 200 and _Hints().find(prompt_key(PROMPT)) is None


def test_without_a_sidecar_everything_goes_on(monkeypatch, caplog):
    monkeypatch.setenv(ADDRESS_VARIABLE, "tcp://127.0.0.1:9")
    seen = []
    assert post(app_with(seen), json.dumps({"messages": MESSAGES, "tools": [WEATHER]})).status_code == 200
    assert [route for route, _ in seen] == ["chat"]  # there is nobody to name it to
    assert _Hints().find(b"x") is None and "No sidecar at tcp://127.0.0.1:9 yet" in caplog.text
    monkeypatch.setenv(ADDRESS_VARIABLE, "nonsense")
    assert _Hints().find(b"x") is None and "No hints: Cannot use sidecar address 'nonsense'" in caplog.text
    monkeypatch.setenv(ADDRESS_VARIABLE, "none")
    assert _Hints().find(b"x") is None


def test_bodies_in_pieces_and_other_routes(sidecar):
    got = []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        got.append((scope["path"], body))

    async def call(path, parts):
        messages = [{"type": "http.request", "body": p, "more_body": i + 1 < len(parts)} for i, p in enumerate(parts)]

        async def receive():
            return messages.pop(0)

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await OooSpecMiddleware(app)(scope, receive, send)

    asyncio.run(call("/v1/chat/completions", [b'{"mess', b'ages": [', b"]}"]))
    asyncio.run(call("/v1/completions", [b"a", b"b"]))
    assert got == [("/v1/chat/completions", b'{"messages": []}'), ("/v1/completions", b"ab")]


def test_announce_for_offline_use(sidecar, codec, monkeypatch):
    monkeypatch.setattr("ooospec.integrations.vllm.front._offline", None)

    class Tokenizer:
        def apply_chat_template(self, messages, **kwargs):
            return codec.encode(json.dumps([messages, kwargs["tools"]]))

    hints = _Hints()
    assert announce(Tokenizer(), MESSAGES, [WEATHER]) and not announce(Tokenizer(), MESSAGES)
    prompt = codec.encode(json.dumps([MESSAGES, [WEATHER]]))
    _, poll, _ = wait_for(lambda: hints.find(prompt_key(prompt)))
    assert wait_for(lambda: poll().complete)
    drafter = RowDrafter(Situation(codec, "json", False), 24, 4096, hints)
    row = np.array([[*prompt, codec.encode("{")[0]]], dtype=np.int32)
    (draft,) = drafter.propose([[int(row[0, -1])]], np.array([row.shape[1]]), row)
    assert drafter.counts["named"] == 1 and "get_weather" in codec.decode(draft)


def test_subscribers_hear_of_every_client_and_those_that_ask_hear_only_of_their_own(sidecar):
    import os

    address = os.environ[ADDRESS_VARIABLE]
    first, second, follower = SidecarClient(address), SidecarClient(address), SidecarClient(address)
    follower.subscribe()
    wait_for(lambda: follower.model or follower.receive())
    from ooospec.chat.schema import read_tools

    boxes = [client.submit(read_tools([WEATHER]), [("user", f"in {city}")])
             for client, city in ((first, "Oslo"), (second, "Rome"))]  # fmt: skip
    for client, box, key in ((first, boxes[0], b"a"), (second, boxes[1], b"b")):
        client.name(box, key)
    for key, box, city in ((b"a", boxes[0], "Oslo"), (b"b", boxes[1], "Rome")):
        followed = wait_for(lambda key=key: follower.announced(key))
        assert wait_for(lambda f=followed: f.poll().complete) and wait_for(lambda b=box: b.poll().complete)
        assert followed.hint.slots["get_weather", "city"].value == box.hint.slots["get_weather", "city"].value == city
    assert not first.warnings and not second.warnings and not follower.warnings
    for client in (first, second, follower):
        client.close()


def test_a_subscriber_finds_a_sidecar_that_was_started_again(monkeypatch):
    from ooospec.sidecar import client as module

    monkeypatch.setattr(module, "RESUBSCRIBE_SECONDS", 0.05)
    socket, address = bind("tcp://127.0.0.1:*")
    follower = SidecarClient(address)
    follower.subscribe()
    socket.close(0)
    time.sleep(0.1)
    socket, _ = bind(address)
    server = SidecarServer(Predictor(), "stub", socket)
    asking = SidecarClient(address)
    from ooospec.chat.schema import read_tools

    box = asking.submit(read_tools([WEATHER]), [("user", "in Oslo")])
    asking.name(box, b"k")
    while socket.poll(200) or server._job is not None:
        server.turn()  # usually the request is named and answered before the follower has come back

    def found():
        if socket.poll(10):
            server.turn()
        return follower.announced(b"k")

    followed = wait_for(found)
    assert wait_for(lambda: followed.poll().complete) and followed.hint.slots["get_weather", "city"].value == "Oslo"
    for each in (asking, follower):
        each.close()
    socket.close(0)


def test_a_subscriber_that_comes_late_is_told_once_of_what_is_under_way(sidecar):
    import os

    asking, follower = (SidecarClient(os.environ[ADDRESS_VARIABLE]) for _ in range(2))
    from ooospec.chat.schema import read_tools

    box = asking.submit(read_tools([WEATHER]), [("user", "in Oslo")])
    asking.name(box, b"k")
    assert wait_for(lambda: box.poll().complete)
    follower.subscribe()
    told = wait_for(lambda: follower.announced(b"k"))
    assert wait_for(lambda: told.poll().complete) and told.hint.slots["get_weather", "city"].value == "Oslo"
    follower.subscribe()
    follower._follow(Announce(told.request, b"k", ()))
    box = asking.submit(read_tools([WEATHER]), [("user", "in Rome")])
    asking.name(box, b"l")
    assert wait_for(lambda: follower.announced(b"l"))
    assert follower.announced(b"k") is told
    for each in (asking, follower):
        each.close()


@pytest.mark.parametrize(
    ("content", "media"),
    [
        ("hi", False), (None, False), ([{"type": "text", "text": "hi"}, "odd"], False),
        ([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}], True),
        ([{"type": "input_audio"}], True),
    ],
)  # fmt: skip
def test_requests_with_images_are_not_tokenized_twice(content, media):
    assert _has_media([{"role": "user", "content": content}]) == media
    assert not _has_media(None) and not _has_media(["odd"])


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.0.0"])
def test_other_versions_of_vllm_are_refused(found):
    with pytest.raises(UsageError, match=f"tested with vLLM from 0.32.0 to before 0.33.0; this is {found}"):
        check_version(found)
    check_version("0.32.0")
    check_version("0.32.1+cpu")


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        ({"is_hybrid": True}, {}, "keeps a recurrent state"),
        ({"is_attention_free": True}, {}, "keeps a recurrent state"),
        ({}, {"distributed_executor_backend": "external_launcher"}, "every rank schedules by itself"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2: several batches are under way"),
    ],
)
def test_targets_and_backends_that_cannot_be_right_are_refused_at_start(monkeypatch, model, parallel, words):
    """A hybrid target's state is not rolled back; ranks that schedule for themselves could draft differently."""
    monkeypatch.setattr("ooospec.integrations.vllm.worker.version_of_vllm", lambda: "0.32.0")
    config = SimpleNamespace(
        model_config=SimpleNamespace(**{"model": "m", "is_hybrid": False, "is_attention_free": False, **model}),
        parallel_config=SimpleNamespace(**{"distributed_executor_backend": "mp", **parallel}),
    )
    with pytest.raises(UsageError, match=words):
        OooSpecProposer(config)


@pytest.mark.parametrize(("rank", "replica"), [(0, 0), (1, 0), (0, 1)])
def test_one_rank_drafts_and_nothing_it_is_given_can_raise(monkeypatch, folder_of_tiny, tmp_path, rank, replica):
    monkeypatch.setattr("ooospec.integrations.vllm.worker.version_of_vllm", lambda: "0.32.0")
    monkeypatch.setenv(ADDRESS_VARIABLE, "none")
    monkeypatch.setenv(STATS_VARIABLE, str(tmp_path / "stats"))
    path = str(folder_of_tiny)
    model = SimpleNamespace(
        model=path, tokenizer=path, tokenizer_revision=None, revision=None, trust_remote_code=False,
        is_hybrid=False, is_attention_free=False, max_model_len=512, get_vocab_size=lambda: 300,
    )  # fmt: skip
    parallel = SimpleNamespace(
        distributed_executor_backend="mp", rank=rank, tensor_parallel_size=2, pipeline_parallel_size=1,
        data_parallel_size=1, data_parallel_index=replica,
    )  # fmt: skip
    speculative = SimpleNamespace(num_speculative_tokens=8, draft_model_config=model)
    proposer = OooSpecProposer(
        SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=speculative)
    )
    assert (model.max_model_len, speculative.draft_model_config.max_model_len) == (512, 520)
    row = np.array([[5, 6, 7, 5, 6, 7, 5, 6]], dtype=np.int32)
    (draft,) = proposer.propose([[6]], np.array([8]), row)
    assert len(draft) <= 8 and (rank == 0 or draft == [])
    assert proposer.propose([[1], []], None, None) == [[], []]
    assert proposer.drafter.counts["faults"] == (rank == 0)
    monkeypatch.setattr(_Hints, "drain", lambda self: 1 / 0)
    assert bool(proposer.propose([[6]], np.array([8]), row)[0]) == (rank == 0)
    assert proposer.drafter.counts["faults"] == 2 * (rank == 0)
    proposer._report()
    counts = json.loads((tmp_path / ("stats.1" if replica else "stats")).read_text())
    assert counts.get("faults", 0) == 2 * (rank == 0) and len(list(tmp_path.iterdir())) == 1


def test_the_tokens_of_a_step_are_read_off_the_slot_mappings():
    layer, other = (SimpleNamespace(shape=(size,)) for size in (40, 24))
    assert _tokens_run({"a": layer, "b": layer}) == 40
    assert _tokens_run([{"a": layer}, {"a": other}]) == 64
    assert all(_tokens_run(nothing) is None for nothing in (None, {}, [], [{}]))
