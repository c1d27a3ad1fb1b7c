"""The engine's side of the sidecar: submit at arrival, poll a mailbox at candidate boundaries, never wait.

ZeroMQ's own thread does the input and output, so sending and polling cost microseconds and no Python thread runs
beside the target. A sidecar that is dead, hangs or talks nonsense costs speed only: its requests are marked failed,
the fault is counted, and one that this process started is started again.
"""

from __future__ import annotations

import logging
import socket as tcp
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec
import zmq

from ooospec.core import Slot, Tool
from ooospec.errors import SidecarError
from ooospec.sidecar import protocol
from ooospec.sidecar.mailbox import USELESS_HINTS, Mailbox, Turns
from ooospec.sidecar.process import SidecarProcess
from ooospec.sidecar.protocol import (
    Announce,
    Ask,
    Cancel,
    Done,
    Hello,
    Name,
    Submit,
    Subscribe,
    ToolSignature,
    ToolSlot,
    Turn,
    Welcome,
)

logger = logging.getLogger("ooospec.sidecar")
KNOCK_SECONDS = 5.0
HANG_SECONDS = 60.0
"""Silence after a request that makes a supervised sidecar count as hung."""
RESUBSCRIBE_SECONDS = 5.0
MAX_UNREAD = 10_000
"""Messages that wait to be read; newer ones are lost."""
MAX_FOLLOWED = 512
"""Requests of other clients that a subscriber remembers."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 300.0
"""Waiting time before a dead sidecar is started again; doubles with every failure."""


class SidecarClient:
    """A connection to one sidecar, shared by the requests of one engine."""

    def __init__(self, address: str | None = None, process: SidecarProcess | None = None, patient: bool = True) -> None:
        """Connect. `patient` = make sure that something listens there, and keep messages for it; otherwise return at
        once, and what cannot be sent is dropped. Raises SidecarError.
        """
        self._process, self._patient = process, patient
        self._number = 0
        self._mailboxes: dict[int, Mailbox] = {}
        self._subscribed, self._subscribed_at = False, 0.0
        self._announced: OrderedDict[bytes, Mailbox] = OrderedDict()
        self._followed: OrderedDict[int, Mailbox] = OrderedDict()
        self.warnings: Counter[str] = Counter()
        self.model = ""
        self.turns, self.worth = Turns(), Turns(USELESS_HINTS)
        """Whether waves are waited for: by whether answers come, and by whether hints are of use."""
        self._unanswered_since: float | None = None
        self._retry_at, self._retry_delay = 0.0, FIRST_RETRY_SECONDS
        self._socket: zmq.Socket[bytes] | None = None
        self._address = process.address if process is not None else address or ""
        self._connect()

    def _connect(self) -> None:
        if self._process is None and self._patient:
            _knock(self._address)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        socket.setsockopt(zmq.IMMEDIATE, 0 if self._patient else 1)
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            socket.close()
            raise SidecarError(
                f"Cannot use sidecar address {self._address!r}: {error}. Give one like tcp://192.0.2.7:7777."
            ) from error
        self._socket = socket
        self._send(Hello())

    def greet(self, timeout_s: float) -> bool:
        """Wait until a message can be sent, at most so long; tell whether it can."""
        end = time.monotonic() + timeout_s
        while not self._send(Hello()):
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

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
            time.sleep(0.02)
            self.receive()

    def submit(self, tools: tuple[Tool, ...], messages: Sequence[tuple[str, str]], fresh: bool = False) -> Mailbox:
        """Start a wave; returns at once. `fresh` = without KV entries of earlier requests."""
        turns = tuple(Turn(role, text.encode("utf-8", "replace").decode()) for role, text in messages)
        asked = Submit(0, tuple(signature(tool) for tool in tools), turns, fresh)
        mailbox = Mailbox(self, 0, tools, asked)
        self.start(mailbox, asked)
        return mailbox

    def start(self, mailbox: Mailbox, asked: Submit) -> None:
        """Send a wave's questions, under a number of its own; its answers come into the mailbox."""
        self.receive()
        self._revive()
        self._number += 1
        mailbox.request = self._number
        mailbox.numbers.append(self._number)
        if self._send(msgspec.structs.replace(asked, request=self._number)):
            self._mailboxes[self._number] = mailbox
            self._unanswered_since = self._unanswered_since or time.monotonic()
        else:
            self._fail(mailbox, "unreachable")

    def ask(self, mailbox: Mailbox, tool: int, slot: int, written: str) -> None:
        """Ask for more about a request that another client submitted."""
        self._send(Ask(mailbox.request, tool, slot, written))

    def name(self, mailbox: Mailbox, key: bytes) -> None:
        """Pass a request and its answers on to the sidecar's subscribers, who know it by `key`."""
        self._send(Name(mailbox.request, key))

    def subscribe(self) -> None:
        """Ask to be told of the requests that other clients name; `announced` then finds them.

        A client that subscribes submits nothing itself.
        """
        self._send(Subscribe())
        self._subscribed, self._subscribed_at = True, time.monotonic()

    def announced(self, key: bytes) -> Mailbox | None:
        """Return the mailbox of a request that another client named, if it is known here."""
        if time.monotonic() - self._subscribed_at > RESUBSCRIBE_SECONDS:
            self.subscribe()  # the sidecar may have been started again
        self.receive()
        return self._announced.get(key)

    def _send(self, message: protocol.ToSidecar) -> bool:
        """Hand a message to ZeroMQ; False where it cannot be encoded (schemas may hold anything) or taken."""
        if self._socket is None:
            return False
        try:
            self._socket.send(protocol.encoder.encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, TypeError, ValueError, OverflowError, RecursionError):
            return False
        return True

    def receive(self) -> None:
        """File everything that has arrived."""
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            self._unanswered_since, self._retry_delay = None, FIRST_RETRY_SECONDS
            self._file(data)
        if self._process is not None and self._mailboxes and not self._process.alive():
            for mailbox in self._mailboxes.values():
                if not mailbox.hint.complete and not mailbox.hint.failed:
                    self._fail(mailbox, "died")

    def _file(self, data: bytes) -> None:
        try:
            message = protocol.from_sidecar.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError):
            self._warn("garbage", "sent a message that is not of the protocol")
            return
        if isinstance(message, Welcome):
            self.model = message.model
            if message.version != protocol.VERSION:
                self._warn("version", f"speaks protocol {message.version}, this is {protocol.VERSION}")
            return
        if isinstance(message, Announce):
            self._follow(message)
            return
        boxes = self._followed if self._subscribed else self._mailboxes
        mailbox = boxes.get(message.request)
        if mailbox is None:
            if self._subscribed:
                return  # dropped as too old
            if not 0 < message.request <= self._number:  # late answers to finished requests are normal
                self._warn("stray", "answered for a request that was never made")
        elif not mailbox.put(message, len(data)):
            self._warn("garbage", "named a tool or slot that the request does not have")
        elif isinstance(message, Done) and message.error not in ("", "cancelled"):
            self._warn("error", f"failed in a wave: {message.error}")

    def _follow(self, message: Announce) -> None:
        if message.request in self._followed:  # told again, as to a subscriber that has just come
            return
        mailbox = Mailbox(self, message.request, tuple(tool_of(signature) for signature in message.tools))
        self._announced[message.key], self._followed[message.request] = mailbox, mailbox
        self._announced.move_to_end(message.key)
        self._followed.move_to_end(message.request)
        if len(self._followed) > MAX_FOLLOWED:
            self._followed.popitem(last=False)
        if len(self._announced) > MAX_FOLLOWED:
            self._announced.popitem(last=False)

    def _fail(self, mailbox: Mailbox, kind: str) -> None:
        mailbox.hint.failed = True
        self._warn(kind, f"gave no answer ({kind})")

    def _warn(self, kind: str, text: str) -> None:
        self.warnings[kind] += 1
        if self.warnings[kind] == 1:
            logger.warning("The sidecar %s; decoding goes on without its hints (further cases are only counted).", text)

    def _revive(self) -> None:
        """Start a supervised sidecar again when it died or has hung, without waiting for it."""
        if self._process is None:
            return
        now = time.monotonic()
        hung = self._unanswered_since is not None and now - self._unanswered_since > HANG_SECONDS
        if (not self._process.alive() or hung) and now >= self._retry_at:
            self._retry_at, self._retry_delay = now + self._retry_delay, min(2 * self._retry_delay, LAST_RETRY_SECONDS)
            self._unanswered_since = None
            self._warn("restarted", "was started again")
            self._disconnect()
            try:
                self._process.start()
            except OSError as error:
                self._warn("unstartable", f"could not be started: {error}")
        if self._socket is None and self._process.listening():
            self._address = self._process.address
            self._connect()

    def answered_all_but(self, mailbox: Mailbox) -> bool:
        """Tell whether nothing older than this request waits for an answer."""
        since = self._unanswered_since
        return since is None or since >= mailbox.submitted_at

    def cancel(self, mailbox: Mailbox) -> None:
        """Stop a wave; what has come of it stays."""
        self._send(Cancel(mailbox.request))

    def release(self, mailbox: Mailbox) -> None:
        """Forget a request; a wave that still runs, for whoever asked, is cancelled."""
        if not mailbox.hint.failed:
            self.cancel(mailbox)
        for number in mailbox.numbers:
            self._mailboxes.pop(number, None)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close the connection and end a sidecar that this process started."""
        self._disconnect()
        if self._process is not None:
            self._process.stop()


def _knock(address: str) -> None:
    """Open and close a connection to a tcp address, so that a wrong one is told at once. Raises SidecarError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://"):
        return
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SidecarError(f"Cannot use sidecar address {address!r}; give one like tcp://192.0.2.7:7777.")
    try:
        tcp.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except OSError as error:
        raise SidecarError(
            f"No sidecar at {address} ({error}). Start one there (`ooospec sidecar`), check the address, or use "
            "--sidecar none."
        ) from error


def tool_of(signature: ToolSignature) -> Tool:
    """Read a tool off the form the protocol carries."""
    slots = tuple(Slot(s.name, s.types, s.required, s.description, s.choices) for s in signature.slots)
    return Tool(signature.name, signature.description, slots)


def signature(tool: Tool) -> ToolSignature:
    """Give a tool the form the protocol carries."""
    slots = tuple(ToolSlot(s.name, s.types, s.required, s.description, s.choices) for s in tool.slots)
    return ToolSignature(tool.name, tool.description, slots)
