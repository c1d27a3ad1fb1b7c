"""What a method keeps from one request to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import msgspec


class MemoryPart(Protocol):
    """Something a proposer remembers, that can be written to a file and read back."""

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes; must not take time."""

    def dump(self) -> bytes:
        """Write everything."""

    def load(self, data: bytes) -> None:
        """Read what `dump` wrote, into a fresh part."""


P = TypeVar("P", bound=MemoryPart)


class Memory:
    """The parts that a method's proposers asked for, one of each kind. Never shared between methods compared."""

    def __init__(self, saved: bytes | None = None) -> None:
        self._parts: dict[str, MemoryPart] = {}
        self._saved: dict[str, bytes] = msgspec.msgpack.decode(saved, type=dict[str, bytes]) if saved else {}

    def part(self, make: Callable[[], P]) -> P:
        """Return the part of kind `make` (a class), made on first use."""
        name = f"{make.__module__}.{make.__qualname__}"
        if name not in self._parts:
            fresh = make()
            if name in self._saved:
                fresh.load(self._saved.pop(name))
            self._parts[name] = fresh
        return cast(P, self._parts[name])

    @property
    def nbytes(self) -> int:
        """About how many bytes all parts take."""
        return sum(map(len, self._saved.values())) + sum(part.nbytes for part in self._parts.values())

    def dump(self) -> bytes:
        """Write all parts."""
        return msgspec.msgpack.encode({**self._saved, **{name: part.dump() for name, part in self._parts.items()}})
