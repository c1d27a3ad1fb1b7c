"""Messages between the engine's process and the sidecar's: MessagePack over ZeroMQ, the same on one machine and across.

A client (DEALER) sends Submit and Cancel; the sidecar (ROUTER) answers with Welcome, then for each request with
Function, SlotValue and LeftOut messages as they become known, and Done. No token ids cross: both sides have tokenizers
of their own.

Where the process that receives requests is not the one that drafts (a server's front end and its workers), the first
names its request by a key that both can compute (Name), and the second, once subscribed (Subscribe), is told of every
named request (Announce), gets the same answers under a number of the sidecar's own, and may ask for more (Ask).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

VERSION = 4


class ToolSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot as the sidecar needs it."""

    name: str
    types: tuple[str, ...]
    required: bool
    description: str
    choices: tuple[Any, ...]


class ToolSignature(msgspec.Struct, frozen=True, array_like=True):
    """A tool as the sidecar needs it."""

    name: str
    description: str
    slots: tuple[ToolSlot, ...]


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One message of the dialogue, as plain text."""

    role: str
    text: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Ask for a Welcome."""

    version: int = VERSION


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start a wave."""

    request: int
    tools: tuple[ToolSignature, ...]
    dialogue: tuple[Turn, ...]
    fresh: bool = False
    """True = use no KV entries of earlier requests (for measurements)."""
    only: int = -1
    """The tool whose slots alone are asked for, as the target has chosen it; -1 = the function too."""
    slot: int = -1
    """With `only`: the one slot that is asked for; -1 = all."""
    written: str = ""
    """With `slot`: how the target has begun its value, as JSON text; the answer goes on from there."""
    version: int = VERSION


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop a wave whose answers are no longer wanted."""

    request: int


class Name(msgspec.Struct, frozen=True, array_like=True, tag="name"):
    """Give a request a key; it and its answers are passed on to all subscribers, those that have been sent too."""

    request: int
    key: bytes


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag="subscribe"):
    """Ask to be told of every request that is named from now on."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask", omit_defaults=True):
    """From a subscriber: ask for more about a request that was announced; as `only`, `slot`, `written` of Submit."""

    request: int
    only: int
    slot: int = -1
    written: str = ""


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="announce"):
    """Tell a subscriber of a named request; its answers follow under `request`."""

    request: int
    key: bytes
    tools: tuple[ToolSignature, ...]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Say who answers."""

    model: str
    version: int = VERSION


class Function(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The function choice: indices of tools and their chances in percent, best first."""

    request: int
    tools: tuple[int, ...]
    percents: tuple[int, ...]


class SlotValue(msgspec.Struct, frozen=True, array_like=True, tag="s", omit_defaults=True):
    """The value of one slot with its chance in percent; `present` False = leave it out (on the wire: LeftOut)."""

    request: int
    tool: int
    slot: int
    percent: int
    value: Any = None
    present: bool = True


class LeftOut(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Slots of one tool that stay out of the call, with their chances in percent: two bytes a slot."""

    request: int
    tool: int
    slots: tuple[int, ...]
    percents: tuple[int, ...]

    @classmethod
    def of(cls, answers: Sequence[SlotValue]) -> list[LeftOut]:
        """Put answers of one request together, a message a tool."""
        tools = dict.fromkeys((answer.request, answer.tool) for answer in answers)
        parts = [[a for a in answers if (a.request, a.tool) == key] for key in tools]
        return [
            cls(*key, tuple(a.slot for a in part), tuple(a.percent for a in part))
            for key, part in zip(tools, parts, strict=True)
        ]

    def answers(self) -> list[SlotValue]:
        """Return the answers one by one; ValueError where slots and chances are not as many."""
        pairs = zip(self.slots, self.percents, strict=True)
        return [SlotValue(self.request, self.tool, slot, percent, None, False) for slot, percent in pairs]


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done", omit_defaults=True):
    """The wave is over. `error` is empty when it went well."""

    request: int
    prefill_ms: int = 0
    wave_ms: int = 0
    steps: int = 0
    error: str = ""


def packed(answers: Iterable[Function | SlotValue | None]) -> Iterator[Function | SlotValue | LeftOut | None]:
    """Give a wave's answers the form they are sent in: what one step leaves out together, everything else at once."""
    left_out = list[SlotValue]()
    for answer in answers:
        if isinstance(answer, SlotValue) and not answer.present:
            left_out.append(answer)
            continue
        if answer is None:
            yield from LeftOut.of(left_out)
            left_out = []
        yield answer
    yield from LeftOut.of(left_out)


ToSidecar = Hello | Submit | Cancel | Name | Subscribe | Ask
FromSidecar = Welcome | Function | SlotValue | LeftOut | Done | Announce

encoder = msgspec.msgpack.Encoder()
to_sidecar = msgspec.msgpack.Decoder(ToSidecar)
from_sidecar = msgspec.msgpack.Decoder(FromSidecar)
