"""Where an output ends: end-of-sequence ids, stop strings, token limit, context end. The same cut for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ooospec.core import Codec

MAX_BYTES_PER_TOKEN_WINDOW = 8
"""Tokens decoded before the new ones so that a stop string that began earlier is seen."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop. `max_new_tokens` counts the end-of-sequence token."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()

    def cut(self, codec: Codec, output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        """Return how many of `new` (to follow `output`) are kept, and the finish reason if the output ends there."""
        room = self.max_new_tokens - len(output)
        for count in range(1, min(len(new), room) + 1):
            if new[count - 1] in codec.eos_ids:
                return count, "eos"
            if self.stop and self._has_stop(codec, output, new[:count]):
                return count, "stop"
        return (room, "length") if len(new) >= room else (len(new), None)

    def _has_stop(self, codec: Codec, output: Sequence[int], new: Sequence[int]) -> bool:
        longest = max(len(codec.encode(stop)) for stop in self.stop)
        window = MAX_BYTES_PER_TOKEN_WINDOW + len(new) + 4 * longest
        text = codec.decode([*output, *new][-window:])
        return any(stop in text for stop in self.stop)
