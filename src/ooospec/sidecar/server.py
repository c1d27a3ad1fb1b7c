"""The sidecar's process: one thread, one wave at a time, answers sent as they become known.

Started by an engine (`python -m ooospec.sidecar.server`, ends when its standard input closes) or by hand
(`ooospec sidecar`), the same protocol either way.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from ooospec.errors import OooSpecError, UsageError
from ooospec.sidecar import protocol
from ooospec.sidecar.process import READY
from ooospec.sidecar.protocol import (
    Announce,
    Ask,
    Cancel,
    Done,
    FromSidecar,
    Function,
    Hello,
    Name,
    SlotValue,
    Submit,
    Subscribe,
    Welcome,
)


class Predictor(Protocol):
    """What the server asks: yields answers, and None where it may look up."""

    def wave(self, request: Submit) -> Iterator[Function | SlotValue | None]:
        """Answer a request."""

    def timings(self) -> tuple[int, int, int]:
        """Return (prefill_ms, wave_ms, steps) of the last wave."""


MAX_SUBSCRIBERS, MAX_RECORDS = 64, 256
TOLD_AGAIN = 16
"""Named requests that a new subscriber is told of: it may be late for those that are being answered."""
Answer = Function | SlotValue | Done


@dataclass(slots=True)
class _Record:
    """What was asked and answered, for subscribers that are told of it later."""

    asked: Submit
    answers: list[Answer] = field(default_factory=list)
    number: int = 0
    """Number under which subscribers know it; 0 = it has no name yet."""
    key: bytes = b""
    """Its name."""


@dataclass(slots=True)
class _Job:
    client: bytes
    request: Submit
    answers: Iterator[Function | SlotValue | None]


class SidecarServer:
    """Serves one predictor to any number of clients; requests are answered in the order they came."""

    def __init__(self, predictor: Predictor, model: str, socket: zmq.Socket[bytes]) -> None:
        self.predictor, self.model, self.socket = predictor, model, socket
        self._queue: deque[tuple[bytes, Submit]] = deque()
        self._job: _Job | None = None
        self._records: OrderedDict[tuple[bytes, int], _Record] = OrderedDict()
        self._numbered: dict[int, tuple[bytes, int]] = {}
        self._subscribers: OrderedDict[bytes, None] = OrderedDict()
        self._named = secrets.randbits(48)
        """Number of the last named request; begins at random, so that a sidecar that was started again repeats none."""
        self.bad_messages = 0

    def serve(self) -> None:
        """Answer until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has arrived, waiting only when there is nothing to do, and advance the current wave a step."""
        idle = self._job is None and not self._queue
        while self.socket.poll(None if idle else 0):
            client, *parts = self.socket.recv_multipart()
            self._receive(client, parts[-1] if parts else b"")
            idle = False
        if self._job is None and self._queue:
            client, request = self._queue.popleft()
            self._job = _Job(client, request, self.predictor.wave(request))
        if self._job is not None:
            self._advance(self._job)

    def _receive(self, client: bytes, data: bytes) -> None:
        try:
            message = protocol.to_sidecar.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError):
            self.bad_messages += 1
            return
        if isinstance(message, Hello):
            self._send(client, Welcome(self.model))
        elif isinstance(message, Submit):
            later = (i for i, (_, waiting) in enumerate(self._queue) if waiting.only >= 0)
            self._queue.insert(next(later, len(self._queue)), (client, message))  # before what is asked for again
            replaced = self._records.pop((client, message.request), None)
            self._records[client, message.request] = _Record(message)
            if replaced is not None:
                self._numbered.pop(replaced.number, None)
            if len(self._records) > MAX_RECORDS:
                _, old = self._records.popitem(last=False)
                self._numbered.pop(old.number, None)
        elif isinstance(message, Subscribe):
            self._subscribe(client)
        elif isinstance(message, Name):
            self._name(client, message)
        elif isinstance(message, Ask):
            self._ask(message)
        else:
            self._cancel(client, message)

    def _subscribe(self, client: bytes) -> None:
        if client not in self._subscribers:
            for number in list(self._numbered)[-TOLD_AGAIN:]:
                self._tell(number, [client])
        self._subscribers[client] = None
        self._subscribers.move_to_end(client)
        if len(self._subscribers) > MAX_SUBSCRIBERS:
            self._subscribers.popitem(last=False)

    def _name(self, client: bytes, message: Name) -> None:
        """Tell the subscribers of a request and of what is known about it."""
        record = self._records.get((client, message.request))
        if record is None or record.number:
            return
        self._named += 1
        record.number = self._named
        record.key = message.key
        self._numbered[record.number] = client, message.request
        self._tell(record.number, self._subscribers)

    def _tell(self, number: int, subscribers: Iterable[bytes]) -> None:
        """Tell subscribers of a named request and of what is known about it."""
        record = self._records.get(self._numbered.get(number, (b"", 0)))
        if record is None:
            return
        for subscriber in subscribers:
            self._send(subscriber, Announce(number, record.key, record.asked.tools))
            for answer in record.answers:
                self._send(subscriber, msgspec.structs.replace(answer, request=number))

    def _ask(self, message: Ask) -> None:
        """Queue what a subscriber wants to know more; the answers go where the request's others went."""
        key = self._numbered.get(message.request)
        if key is not None:
            more = {"fresh": False, "only": message.only, "slot": message.slot, "written": message.written}
            self._queue.append((key[0], msgspec.structs.replace(self._records[key].asked, **more)))

    def _pass_on(self, message: FromSidecar) -> None:
        for subscriber in self._subscribers:
            self._send(subscriber, message)

    def _answer(self, client: bytes, answer: Answer) -> None:
        """Send an answer to who asked, and to the subscribers where the request has a name."""
        self._send(client, answer)
        record = self._records.get((client, answer.request))
        if record is not None:
            record.answers.append(answer)
            if record.number:
                self._pass_on(msgspec.structs.replace(answer, request=record.number))

    def _cancel(self, client: bytes, message: Cancel) -> None:
        waiting = [entry for entry in self._queue if (entry[0], entry[1].request) != (client, message.request)]
        if len(waiting) < len(self._queue):
            self._queue = deque(waiting)
            self._answer(client, Done(message.request, error="cancelled"))
        if self._job is not None and (self._job.client, self._job.request.request) == (client, message.request):
            self._finish(self._job, "cancelled")

    def _advance(self, job: _Job) -> None:
        try:
            for answer in job.answers:
                if answer is None:
                    return
                self._answer(job.client, answer)
        except Exception as error:  # a fault in one wave must not end the service
            self._finish(job, f"{type(error).__name__}: {error}"[:200])
            return
        self._finish(job, "")

    def _finish(self, job: _Job, error: str) -> None:
        job.answers.close()  # type: ignore[attr-defined]  # a generator
        prefill, wave, steps = self.predictor.timings()
        self._answer(job.client, Done(job.request.request, prefill, wave, steps, error))
        self._job = None

    def _send(self, client: bytes, message: FromSidecar) -> None:
        self.socket.send_multipart([client, protocol.encoder.encode(message)])


def bind(address: str) -> tuple[zmq.Socket[bytes], str]:
    """Bind a ROUTER socket; port `*` takes a free one. Returns the socket and the address it got.

    Raises UsageError for an address that cannot be listened on.
    """
    advice = "give one like tcp://127.0.0.1:7777 with a free port from 1 to 65535 (tcp://0.0.0.0:7777 = all networks)"
    port = address.rpartition(":")[2]
    if address.startswith("tcp://") and port != "*" and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"Cannot listen on {address!r}: no such port; {advice}.")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise UsageError(f"Cannot listen on {address!r}: {error}; {advice}.") from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _end_with_parent() -> None:
    """Leave when the parent's end of standard input closes, however the parent ended."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would break an ordinary end of the process
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str] | None = None) -> None:
    """Run a sidecar."""
    parser = argparse.ArgumentParser(prog="python -m ooospec.sidecar.server")
    parser.add_argument("--path", type=Path, required=True, help="model folder")
    parser.add_argument("--name", required=True)
    parser.add_argument("--adapter", default=None)
    parser.add_argument("--address", default="tcp://127.0.0.1:*")
    parser.add_argument("--dtype", default="auto", help="auto = int8 on CPUs where it pays")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cores", default="", help="comma-separated CPU numbers to stay on")
    parser.add_argument("--supervised", action="store_true", help="end when standard input closes")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except OooSpecError as error:
        if not options.supervised:
            raise
        sys.exit(str(error))  # the parent shows these last words


def _run(options: argparse.Namespace) -> None:
    if options.supervised:
        _end_with_parent()
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    socket, address = bind(options.address)
    if options.supervised:  # the parent connects now; its messages wait until the model is loaded
        _announce(address)
    import torch

    from ooospec.sidecar.adapter import read_habits
    from ooospec.sidecar.predictor import WavePredictor
    from ooospec.sidecar.quantize import load_sidecar

    torch.set_num_threads(options.threads)
    loaded = load_sidecar(options.path, options.name, options.dtype, options.device, options.adapter)
    if not options.supervised:
        _announce(address)
    SidecarServer(WavePredictor(loaded, read_habits(options.adapter)), options.name, socket).serve()


def _announce(address: str) -> None:
    sys.stdout.write(f"{READY}{address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
