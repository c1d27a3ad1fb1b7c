"""Lines that an application puts under every request, such as "only make one tool call to solve my need".

A small model takes what was said last for what is asked. So the sidecar reads such lines before what they stand under;
they are not left out, since they may hold values. Measured in docs/performance.md, entry 30.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

KEPT = 16
"""Last turns of requests that are remembered."""
MIN_CHARS, MAX_CHARS = 24, 500
"""Shorter lines say little, longer ones are rather material that is asked about."""
MIN_OTHERS = 2
"""Other requests that must have ended alike."""


class Boilerplate:
    """Knows what the last user turns of earlier requests ended with."""

    def __init__(self) -> None:
        self._ends: list[str] = []

    def move_up(self, turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return (role, text) of a dialogue, with what others ended with first in its last user turn; remember its end.

        Only whole lines below other lines are moved.
        """
        moved = list(turns)
        place = next((i for i in reversed(range(len(moved))) if moved[i][0] == "user"), None)
        if place is None:
            return moved
        role, text = moved[place]
        text = text.rstrip()
        shared = self._shared(text)
        if shared:
            moved[place] = role, f"{text[-shared:]}\n\n{text[:-shared].rstrip()}"
        end = text[-2 * MAX_CHARS :]
        if end not in self._ends:
            self._ends = [*self._ends[1 - KEPT :], end]
        return moved

    def _shared(self, text: str) -> int:
        """Return how many characters of whole lines at the end of `text` enough other requests ended with, too."""
        own = text[-2 * MAX_CHARS :]
        sizes = sorted((_same_at_the_end(own, end) for end in self._ends if end != own), reverse=True)
        size = sizes[MIN_OTHERS - 1] if len(sizes) >= MIN_OTHERS else 0
        lines = text[len(text) - size :].split("\n", 1)
        whole = lines[1].strip() if len(lines) == 2 else ""
        return len(whole) if MIN_CHARS <= len(whole) <= MAX_CHARS and text[: -len(whole)].strip() else 0

    @property
    def nbytes(self) -> int:
        """About how many bytes the ends take."""
        return sum(map(len, self._ends))

    def dump(self) -> bytes:
        """Write the ends."""
        return msgspec.msgpack.encode(self._ends)

    def load(self, data: bytes) -> None:
        """Read what `dump` wrote."""
        self._ends = msgspec.msgpack.decode(data, type=list[str])


def _same_at_the_end(one: str, other: str) -> int:
    size, above = 0, min(len(one), len(other)) + 1
    while above - size > 1:
        middle = (size + above) // 2
        size, above = (middle, above) if one[-middle:] == other[-middle:] else (size, middle)
    return size
