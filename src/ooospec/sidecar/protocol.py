"""Messages between the engine's process and the sidecar's: MessagePack over ZeroMQ, the same on one machine and across.

A client (DEALER) sends Submit and Cancel; the sidecar (ROUTER) answers with Welcome, then for each request with
Function and Slot messages as they become known, and Done. No token ids cross: both sides have tokenizers of their own.

Where the process that receives requests is not the one that drafts (a server's front end and its workers), the first
names its request by a key that both can compute (Name), and the second, once subscribed (Subscribe), is told of every
named request (Announce), gets the same answers under a number of the sidecar's own, and may ask for more (Ask).
"""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 3


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
    """The value of one slot with its chance in percent; `present` False = leave it out."""

    request: int
    tool: int
    slot: int
    percent: int
    value: Any = None
    present: bool = True


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done", omit_defaults=True):
    """The wave is over. `error` is empty when it went well."""

    request: int
    prefill_ms: int = 0
    wave_ms: int = 0
    steps: int = 0
    error: str = ""


ToSidecar = Hello | Submit | Cancel | Name | Subscribe | Ask
FromSidecar = Welcome | Function | SlotValue | Done | Announce

encoder = msgspec.msgpack.Encoder()
to_sidecar = msgspec.msgpack.Decoder(ToSidecar)
from_sidecar = msgspec.msgpack.Decoder(FromSidecar)
