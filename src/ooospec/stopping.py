"""Where an output ends: end-of-sequence ids, stop strings, token limit, context end. The same cut for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ooospec.core import Codec
from ooospec.errors import UsageError


class Watch(Protocol):
    """Decides by what was written whether the output ends."""

    def ends(self, token: int) -> bool:
        """Take the next token of the output; True = it is the last."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop. `max_new_tokens` counts the end-of-sequence token."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    watch: Watch | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}.")
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise UsageError(f"Stop strings must be non-empty text; got {list(self.stop)!r}.")

    def cut(self, codec: Codec, output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        """Return how many of `new` (to follow `output`) are kept, and the finish reason if the output ends there."""
        room = self.max_new_tokens - len(output)
        for count in range(1, min(len(new), room) + 1):
            if new[count - 1] in codec.eos_ids:
                return count, "eos"
            if self.watch is not None and self.watch.ends(new[count - 1]):
                return count, "stop"
            if self.stop and self._has_stop(codec, output, new[:count]):
                return count, "stop"
        return (room, "length") if len(new) >= room else (len(new), None)

    def _has_stop(self, codec: Codec, output: Sequence[int], new: Sequence[int]) -> bool:
        """Look at as many tokens as the longest stop string has bytes, so that the same cut is found for any drafts."""
        window = 8 + max(len(stop.encode()) for stop in self.stop)
        text = codec.decode([*output[-window:], *new][-window:])
        return any(stop in text for stop in self.stop)
