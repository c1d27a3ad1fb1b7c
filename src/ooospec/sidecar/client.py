"""The engine's side of the sidecar: submit at arrival, poll a mailbox at candidate boundaries, never wait.

ZeroMQ's own thread does the input and output, so sending and polling cost microseconds and no Python thread runs
beside the target. A sidecar that is dead, hangs or talks nonsense costs speed only: its requests are marked failed,
the fault is counted, and one that this process started is started again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import zmq

from ooospec.core import FunctionHint, Hint, SlotHint, Tool
from ooospec.errors import SidecarError
from ooospec.sidecar import protocol
from ooospec.sidecar.process import SidecarProcess
from ooospec.sidecar.protocol import (
    Cancel,
    Done,
    Function,
    Hello,
    SlotValue,
    Submit,
    ToolSignature,
    ToolSlot,
    Turn,
    Welcome,
)

logger = logging.getLogger("ooospec.sidecar")
HANG_SECONDS = 60.0


class Mailbox:
    """The hint of one request, filled by `SidecarClient` as messages arrive."""

    def __init__(self, client: SidecarClient, request: int, tools: tuple[Tool, ...]) -> None:
        self._client, self.request, self.tools = client, request, tools
        self.hint = Hint()
        self.submitted = time.perf_counter()
        self.ready_ms: float | None = None
        """When the function choice arrived, from submission."""
        self.complete_ms: float | None = None
        self.wave: Done | None = None

    def poll(self) -> Hint:
        """Take what has arrived, without waiting, and return the hint as it stands."""
        self._client.receive()
        return self.hint

    def wait(self, timeout_s: float) -> None:
        """Wait until the wave is over, outside any clock, and close."""
        end = time.monotonic() + timeout_s
        while self.working and time.monotonic() < end:
            self.poll()
            time.sleep(0.005)
        self.close()

    @property
    def working(self) -> bool:
        """Tell whether answers are still expected."""
        return not (self.hint.complete or self.hint.failed)

    def put(self, message: Function | SlotValue | Done, size: int) -> bool:
        """File a message; False if it does not fit the request."""
        now = (time.perf_counter() - self.submitted) * 1e3
        if isinstance(message, Done):
            self.wave, self.complete_ms = message, now
            self.hint.complete, self.hint.failed = not message.error, bool(message.error)
            return True
        if isinstance(message, Function):
            if not all(0 <= index < len(self.tools) for index in message.tools):
                return False
            names = tuple(self.tools[index].name for index in message.tools)
            self.hint.function = FunctionHint(names, tuple(p / 100 for p in message.percents[: len(names)]))
            self.ready_ms = now
        else:
            if not (0 <= message.tool < len(self.tools) and 0 <= message.slot < len(self.tools[message.tool].slots)):
                return False
            tool = self.tools[message.tool]
            slot = tool.slots[message.slot].name
            confidence = min(99, max(1, message.percent)) / 100
            self.hint.slots[tool.name, slot] = SlotHint(tool.name, slot, message.value, message.present, confidence)
        self.hint.payload_bytes += size
        return True

    def close(self) -> None:
        """Stop the wave if it still runs and forget the request."""
        self._client.release(self)


class SidecarClient:
    """A connection to one sidecar, shared by the requests of one engine."""

    def __init__(self, address: str | None = None, process: SidecarProcess | None = None) -> None:
        self._process = process
        self._address = process.address if process is not None else address
        self._number = 0
        self._mailboxes: dict[int, Mailbox] = {}
        self.warnings: Counter[str] = Counter()
        self.model = ""
        self._heard = time.monotonic()
        self._connect()

    def _connect(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._address or "")
        self._send(Hello())

    def wait_ready(self, timeout_s: float) -> None:
        """Wait, before any request, until the sidecar answers. Raises SidecarError when it does not."""
        end = time.monotonic() + timeout_s
        while not self.model:
            if self._process is not None and not self._process.alive():
                raise SidecarError(f"The sidecar ended while starting. Its last words: {self._process.last_words()}")
            if time.monotonic() > end:
                raise SidecarError(
                    f"No sidecar answered at {self._address} within {timeout_s:.0f} s. Start one there "
                    "(`ooospec sidecar`), check the address, or use --sidecar none."
                )
            self._socket.poll(50)
            self.receive()

    def submit(self, tools: tuple[Tool, ...], messages: Sequence[tuple[str, str]], fresh: bool = False) -> Mailbox:
        """Start a wave; returns at once. `fresh` = without KV entries of earlier requests."""
        self._revive()
        self._number += 1
        mailbox = self._mailboxes[self._number] = Mailbox(self, self._number, tools)
        turns = tuple(Turn(role, text) for role, text in messages)
        if not self._send(Submit(self._number, tuple(_signature(tool) for tool in tools), turns, fresh)):
            self._fail(mailbox, "unreachable")
        return mailbox

    def _send(self, message: protocol.ToSidecar) -> bool:
        try:
            self._socket.send(protocol.encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> None:
        """File everything that has arrived."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            self._heard = time.monotonic()
            self._file(data)
        if self._process is not None and self._mailboxes and not self._process.alive():
            for mailbox in list(self._mailboxes.values()):
                if mailbox.working:
                    self._fail(mailbox, "died")

    def _file(self, data: bytes) -> None:
        try:
            message = protocol.from_sidecar.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            self._warn("garbage", "sent a message that is not of the protocol")
            return
        if isinstance(message, Welcome):
            self.model = message.model
            if message.version != protocol.VERSION:
                self._warn("version", f"speaks protocol {message.version}, this is {protocol.VERSION}")
            return
        mailbox = self._mailboxes.get(message.request)
        if mailbox is None:
            if not 0 < message.request <= self._number:  # late answers to finished requests are normal
                self._warn("stray", "answered for a request that was never made")
        elif not mailbox.put(message, len(data)):
            self._warn("garbage", "named a tool or slot that the request does not have")
        elif isinstance(message, Done) and message.error not in ("", "cancelled"):
            self._warn("error", f"failed in a wave: {message.error}")

    def _fail(self, mailbox: Mailbox, kind: str) -> None:
        mailbox.hint.failed = True
        self._warn(kind, f"gave no answer ({kind})")

    def _warn(self, kind: str, text: str) -> None:
        self.warnings[kind] += 1
        if self.warnings[kind] == 1:
            logger.warning("The sidecar %s; decoding goes on without its hints (further cases are only counted).", text)

    def _revive(self) -> None:
        """Start a supervised sidecar again when it died or has hung."""
        if self._process is None:
            return
        stuck = self.warnings["unheard"] and time.monotonic() - self._heard > HANG_SECONDS
        if self._process.alive() and not stuck:
            return
        self._warn("restarted", "was started again")
        self._socket.close()
        self._process.restart()
        self._address, self._heard = self._process.address, time.monotonic()
        self._connect()

    def release(self, mailbox: Mailbox) -> None:
        """Forget a request; a wave that still runs is cancelled."""
        if mailbox.working:
            if not mailbox.hint.slots and mailbox.hint.function is None:
                self.warnings["unheard"] += 1
            self._send(Cancel(mailbox.request))
        self._mailboxes.pop(mailbox.request, None)

    def close(self) -> None:
        """Close the connection and end a sidecar that this process started."""
        self._socket.close()
        if self._process is not None:
            self._process.stop()


def _signature(tool: Tool) -> ToolSignature:
    slots = tuple(ToolSlot(s.name, s.types, s.required, s.description, s.choices) for s in tool.slots)
    return ToolSignature(tool.name, tool.description, slots)
