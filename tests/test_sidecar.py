"""The sidecar: its wave on tiny models, its protocol, and every way it can fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ooospec.chat.schema import read_tools
from ooospec.errors import RequestStopped, SidecarError
from ooospec.memory import Memory
from ooospec.placement import Placement
from ooospec.request import MAX_VAIN_QUESTIONS
from ooospec.runtime import Decoder
from ooospec.sidecar import protocol
from ooospec.sidecar.client import SidecarClient
from ooospec.sidecar.mailbox import Mailbox, Turns
from ooospec.sidecar.process import SidecarProcess, SidecarSpec
from ooospec.sidecar.protocol import Done, Function, Welcome
from served import CALL, WEATHER, ByPrompt

FAKE = Path(__file__).with_name("fake_sidecar.py")
THREADS = Placement(1, 2, 1)


def fake(kind):
    spec = SidecarSpec(Path(), "fake")
    return SidecarProcess(spec, [sys.executable, str(FAKE), kind])


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def decoder(tiny_llama):
    made = []

    def make(kind, placement=THREADS):
        decoder = Decoder(tiny_llama, None, budget="fixed", placement=placement)
        decoder._client = SidecarClient(process=fake(kind))
        decoder._client.wait_ready(20)
        made.append(decoder)
        return decoder

    yield make
    for each in made:
        each.close()


MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]


def test_a_sidecar_that_was_waited_for_in_vain_gets_its_turn_again():
    """On shared cores: fewer and fewer turns while they bring nothing, each one again as soon as an answer came."""

    class Stub:
        turns, worth = Turns(), Turns()

        def receive(self):
            pass

        cancel = release = lambda self, mailbox: None
        answered_all_but = lambda self, mailbox: True  # noqa: E731

    waited = []

    def request(number, useful):
        mailbox = Mailbox(Stub(), number, read_tools([{"name": "f"}]))

        def wait(seconds, check):
            waited.append(number)
            if useful:
                mailbox.put(Function(number, (0,), (90,)), 5)

        mailbox.wait = wait
        mailbox.take_turn(1.5)

    for number in range(60):
        request(number, useful=False)
    assert waited == [0, 3, 8, 17, 34, 51]
    waited.clear()
    for number in range(60, 80):
        request(number, useful=number != 70)
    assert waited[0] == 68 and waited[1:] == [69, 70, *range(73, 80)]


def test_hints_of_no_use_cost_fewer_and_fewer_turns(decoder, tiny_llama, tools, monkeypatch):
    """The sidecar answers at once; the target writes something else altogether."""
    waited, answers = [], []
    wait = Mailbox.wait
    monkeypatch.setattr(Mailbox, "wait", lambda box, *limits: (waited.append(len(answers)), wait(box, *limits)))
    made = decoder("good", TURNS)
    expected = reference(tiny_llama, tools)
    for _ in range(20):
        answers.append(made.generate(MESSAGES, tools, max_new_tokens=40))
        assert answers[-1].output_ids == expected and "hint" not in answers[-1].accepted_by_source
    assert waited == [0, 1, 2, 3, 6, 11]
    made._client.worth.taken(True)
    made.generate(MESSAGES, tools, max_new_tokens=40)
    assert waited[-1] == 20


def test_a_request_that_is_stopped_does_not_wait_for_its_wave(decoder, tools, monkeypatch):
    monkeypatch.setattr("ooospec.runtime.TURN_S", 60.0)
    monkeypatch.setattr("ooospec.sidecar.mailbox.WAVE_SECONDS", 60.0)
    made = decoder("hang", TURNS)
    request = made.request(MESSAGES, tools)
    threading.Timer(0.2, request.stop).start()
    start = time.perf_counter()
    with pytest.raises(RequestStopped):
        list(request.run())
    assert time.perf_counter() - start < 30


def reference(tiny_llama, tools):
    with Decoder(tiny_llama, None, budget="fixed", placement=THREADS) as plain:
        return plain.generate(MESSAGES, tools, method="ar", max_new_tokens=40).output_ids


FAULTS = {
    "good": [],
    "garbage": ["garbage"],
    "stranger": ["stray"],
    "error": ["error"],
    "hang": [],
    "suicide": ["restarted"],
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_sidecar_costs_speed_only(decoder, tiny_llama, tools, kind, caplog):
    expected = reference(tiny_llama, tools)
    runner = decoder(kind)
    with caplog.at_level(logging.WARNING, "ooospec"):
        for _ in range(3):
            result = runner.generate(MESSAGES, tools, max_new_tokens=40)
            assert result.output_ids == expected
            time.sleep(0.1)
    for warning in FAULTS[kind]:
        assert runner.warnings[warning] >= 1
        assert any("sidecar" in record.getMessage() for record in caplog.records)
    if kind == "good":
        assert runner.warnings == {}


def test_sigkill_in_mid_wave(decoder, tiny_llama, tools):
    expected = reference(tiny_llama, tools)
    runner = decoder("hang")
    commits = runner.stream(MESSAGES, tools, max_new_tokens=40)
    tokens = list(next(commits).tokens)
    os.kill(runner._client._process.pid, signal.SIGKILL)
    for commit in commits:
        tokens += commit.tokens
    assert tuple(tokens) == expected
    assert runner.generate(MESSAGES, tools, max_new_tokens=40).output_ids == expected  # started again


def test_the_good_hint_arrives(decoder, tools):
    runner = decoder("good")
    mailbox = runner._client.submit(read_tools(tools), [("user", "Oslo")])
    assert wait_for(lambda: mailbox.poll().complete)
    hint = mailbox.hint
    assert hint.function.names == ("get_weather",)
    assert hint.slots["get_weather", "city"].value == "Oslo"
    assert 0 < hint.payload_bytes < 40


def test_what_is_asked_again_and_what_is_not():
    asked = []
    stub = SimpleNamespace(ask=lambda mailbox, *more: asked.append(more), turns=Turns())
    mailbox = Mailbox(stub, 1, read_tools([{"name": "f"}, {"name": "g", "parameters": {"properties": {"x": {}}}}]))
    assert not mailbox.ask("g", "", "")  # it still works
    mailbox.put(Done(1), 1)
    assert not mailbox.ask("g", "", "")  # it never said a function
    mailbox.put(Function(1, (0,), (90,)), 5)
    assert not mailbox.ask("nobody", "", "") and mailbox.ask("g", "", "")
    assert not mailbox.ask("g", "x", '"a')  # one at a time
    mailbox.put(Done(1), 1)
    assert not mailbox.ask("g", "", "") and mailbox.ask("g", "x", '"a')  # nothing twice
    mailbox.stopped = True
    assert not mailbox.ask("g", "x", '"ab')  # the last question had no answer in time
    assert asked == [(1, -1, ""), (1, 0, '"a')]


@pytest.mark.parametrize("placement", [THREADS, Placement(0, 2, 1)], ids=["beside", "by turns"])
def test_a_tool_that_the_target_chose_against_the_hint_gets_its_slots(decoder, placement):
    """The fake sidecar believes in the first tool; the target calls the second."""
    runner = decoder("good", placement)
    runner.target = ByPrompt(runner.loaded.codec)
    other = {"type": "function", "function": {"name": "other", "parameters": {"properties": {"x": {"type": "string"}}}}}
    rounds = []
    for asking in (True, False):
        request = runner.request(
            [{"role": "user", "content": "the weather in Oslo"}], [other, WEATHER], memory=Memory()
        )
        if not asking:
            request._ask_slots = lambda *asked: None
        decoded = request.run()
        for _ in decoded:
            time.sleep(0.02)  # answers come between rounds
        assert request.result().text == CALL
        hint = request.mailbox.hint
        assert hint.function.names == ("other",)
        assert (hint.slots.get(("get_weather", "city")) is not None) == asking
        assert hint.slots["other", "x"].value == "the weather in Oslo"
        assert not runner._client._mailboxes
        rounds.append(len(request.commits))
    assert runner.warnings == {} and rounds[0] <= rounds[1]


@pytest.mark.parametrize("placement", [THREADS, Placement(0, 2, 1)], ids=["beside", "by turns"])
def test_a_value_that_the_target_begins_otherwise_is_asked_for_again(decoder, placement):
    runner = decoder("good", placement)
    runner.target = ByPrompt(runner.loaded.codec)
    request = runner.request([{"role": "user", "content": "Rome; the weather there"}], [WEATHER], memory=Memory())
    for _ in request.run():
        time.sleep(0.02)
    assert request.result().text == CALL
    assert len(request.mailbox.numbers) > 1
    assert runner.warnings == {}


@pytest.mark.parametrize("placement", [THREADS, Placement(0, 2, 1)], ids=["beside", "by turns"])
def test_questions_that_do_not_pay_come_to_an_end_where_the_target_waits(decoder, tiny_llama, placement):
    """The target writes letters that no answer foresees: each of them would be a reason to ask again."""
    runner = decoder("good", placement)
    runner.target = ByPrompt(runner.loaded.codec)
    request = runner.request([{"role": "user", "content": "letters"}], [WEATHER], memory=Memory(), max_nodes=2)
    for _ in request.run():
        time.sleep(0.02)
    assert json.loads(request.result().text)["arguments"]["city"] == "qwxzvkjyp"
    questions = len(request.mailbox.numbers) - 1
    assert (questions == MAX_VAIN_QUESTIONS) if placement.target_busy == 0 else (questions > MAX_VAIN_QUESTIONS)


@pytest.mark.parametrize("placement", [THREADS, Placement(0, 2, 1)], ids=["beside", "by turns"])
def test_a_sidecar_that_does_not_answer_again_is_asked_once(decoder, placement, monkeypatch):
    monkeypatch.setattr("ooospec.runtime.TURN_S", 0.3)
    runner = decoder("deaf", placement)
    runner.target = ByPrompt(runner.loaded.codec)
    request = runner.request([{"role": "user", "content": "Rome; the weather there"}], [WEATHER], memory=Memory())
    start = time.monotonic()
    for _ in request.run():
        time.sleep(0.02)
    assert request.result().text == CALL and len(request.mailbox.numbers) == 2
    assert time.monotonic() - start < 5


def test_a_request_that_is_stopped_while_it_asks_again_is_no_fault_of_a_proposer(decoder, monkeypatch):
    monkeypatch.setattr("ooospec.runtime.TURN_S", 60.0)
    monkeypatch.setattr("ooospec.sidecar.mailbox.WAVE_SECONDS", 60.0)
    runner = decoder("deaf", TURNS)
    runner.target = ByPrompt(runner.loaded.codec)
    request = runner.request([{"role": "user", "content": "Rome; the weather there"}], [WEATHER], memory=Memory())
    wait = Mailbox.wait

    def stopped_at_the_question(mailbox, *limits):
        if len(mailbox.numbers) > 1:
            threading.Timer(0.2, request.stop).start()
        wait(mailbox, *limits)

    monkeypatch.setattr(Mailbox, "wait", stopped_at_the_question)
    with pytest.raises(RequestStopped):
        list(request.run())
    assert len(request.mailbox.numbers) == 2 and runner.warnings == {} and not runner.faults


def test_two_engines_on_one_sidecar_do_not_mix_hints(tools):
    process = fake("good")
    clients = [SidecarClient(address=process.address) for _ in range(2)]
    try:
        boxes = [
            [c.submit(read_tools(tools), [("user", f"{who} {n}")]) for n in range(5)] for who, c in enumerate(clients)
        ]
        for who, mine in enumerate(boxes):
            for n, box in enumerate(mine):
                assert wait_for(lambda box=box: box.poll().complete)
                assert box.hint.slots["get_weather", "city"].value == f"{who} {n}"
    finally:
        for client in clients:
            client.close()
        process.stop()


def test_attaching_to_nobody_is_refused_clearly():
    with pytest.raises(SidecarError, match=r"No sidecar at tcp://127\.0\.0\.1:9"):
        SidecarClient(address="tcp://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SidecarClient(address=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(SidecarError, match="No sidecar answered at tcp://"):
            client.wait_ready(0.3)
        client.close()


def test_a_sidecar_that_cannot_start_says_why():
    spec = SidecarSpec(Path("/nonexistent/model"), "x")
    client = SidecarClient(process=SidecarProcess(spec))
    with pytest.raises(SidecarError, match="nonexistent"):
        client.wait_ready(60)
    client.close()


def test_the_sidecar_ends_with_its_parent():
    """Also when the parent is killed: the child watches its standard input."""
    script = (
        "import sys, time; from pathlib import Path; from ooospec.sidecar.process import *;"
        f"p = SidecarProcess(SidecarSpec(Path(), 'fake'), [sys.executable, {str(FAKE)!r}, 'good']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    for how in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as parent:
            child = int(parent.stdout.readline())
            parent.send_signal(how)
            parent.wait()
        assert wait_for(lambda child=child: not Path(f"/proc/{child}").exists() or "zombie" in _state(child))


def _state(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return "zombie"


def test_another_protocol_version_is_counted(tools):
    process = fake("good")
    client = SidecarClient(address=process.address)
    client._file(protocol.encoder.encode(Welcome("old", 99)))
    assert client.warnings["version"] == 1
    client.close()
    process.stop()


TURNS = Placement(0, 2, 2)


def test_on_few_cores_the_hint_is_there_before_the_first_round(decoder, tiny_llama, tools):
    result = decoder("good", TURNS).generate(MESSAGES, tools, max_new_tokens=40)
    assert result.output_ids == reference(tiny_llama, tools)
    assert result.hint.ready_round == 0


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "good"])
def test_a_faulty_sidecar_is_waited_for_once_at_most(decoder, tiny_llama, tools, kind, monkeypatch):
    monkeypatch.setattr("ooospec.runtime.TURN_S", 0.4)
    waits: list[float] = []
    take_turn = Mailbox.take_turn

    def timed(mailbox: Mailbox, *limits) -> None:
        start = time.perf_counter()
        take_turn(mailbox, *limits)
        waits[-1] += time.perf_counter() - start

    monkeypatch.setattr(Mailbox, "take_turn", timed)
    made = decoder(kind, TURNS)
    expected = reference(tiny_llama, tools)
    for _ in range(3):
        waits.append(0.0)
        assert made.generate(MESSAGES, tools, max_new_tokens=40).output_ids == expected
    if kind in ("hang", "stranger", "garbage"):
        assert waits[0] > 0.4 > max(waits[1:])
