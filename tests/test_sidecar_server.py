"""The sidecar's server: answers in order, faults, cancelled waves."""

from __future__ import annotations

import time

import pytest

from ooospec.chat.schema import read_tools
from ooospec.sidecar import protocol
from ooospec.sidecar.client import signature
from ooospec.sidecar.protocol import (
    Announce,
    Cancel,
    Done,
    Function,
    Hello,
    Name,
    SlotValue,
    Submit,
    Subscribe,
    Turn,
    Welcome,
)
from ooospec.sidecar.server import SidecarServer, bind


class ScriptedPredictor:
    def __init__(self):
        self.waves = []

    def wave(self, request):
        self.waves.append(request.request)
        yield Function(request.request, (0,), (77,))
        yield None
        if request.dialogue and request.dialogue[0].text == "fail":
            raise RuntimeError("broken")
        yield SlotValue(request.request, 0, 0, 50, "v")
        yield None

    def timings(self):
        return 1, 2, 3


@pytest.fixture
def served():
    import zmq

    socket, address = bind("tcp://127.0.0.1:*")
    server = SidecarServer(ScriptedPredictor(), "scripted", socket)
    client = zmq.Context.instance().socket(zmq.DEALER)
    client.connect(address)

    def exchange(*messages, turns=12):
        for message in messages:
            client.send(message if isinstance(message, bytes) else protocol.encoder.encode(message))
        time.sleep(0.1)
        got = []
        for _ in range(turns):
            if server._job or server._queue or socket.poll(0):
                server.turn()
            time.sleep(0.01)
            while client.poll(0):
                got.append(protocol.from_sidecar.decode(client.recv()))
        return got

    yield server, exchange
    client.close(0)
    socket.close(0)


TOOL = (signature(read_tools([{"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}])[0]),)


def test_server_answers_in_order_and_survives_faults(served):
    server, exchange = served
    good, bad = Submit(1, TOOL, (Turn("user", "x"),)), Submit(2, TOOL, (Turn("user", "fail"),))
    got = exchange(Hello(), b"garbage", good, bad, Submit(3, TOOL, ()))
    assert got[0] == Welcome("scripted")
    assert [m.request for m in got if isinstance(m, Function)] == [1, 2, 3]
    ends = {m.request: m.error for m in got if isinstance(m, Done)}
    assert ends == {1: "", 2: "RuntimeError: broken", 3: ""}
    assert server.bad_messages == 1


def test_a_number_that_is_used_again_is_a_request_of_its_own(served):
    server, exchange = served
    exchange(Submit(1, TOOL, ()), Name(1, b"a"), Submit(1, TOOL, ()))
    assert not server._numbered
    server._tell(server._named, [b"x"])  # too late for it: nothing to tell
    got = exchange(Name(1, b"b"), Subscribe())
    assert [message.key for message in got if isinstance(message, Announce)] == [b"b"]


def test_server_cancels_waiting_and_running_waves(served):
    server, exchange = served
    got = exchange(Submit(1, TOOL, ()), Submit(2, TOOL, ()), Cancel(2), Cancel(1))
    assert server.predictor.waves in ([], [1])
    assert all(not isinstance(m, SlotValue) for m in got)
