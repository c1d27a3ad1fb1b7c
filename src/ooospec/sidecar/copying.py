"""Drafts for the wave itself: most slot values are spans of the dialogue, so a branch copies on from where it matches.

Prompt Lookup inside the wave: verified by the sidecar's own next pass, so answers stay what they would be.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_LETTERS = 3
"""A single token must have so many letters or digits to start a copy; two tokens in a row always may."""


class CopyIndex:
    """Where tokens and pairs of tokens stand in a prefix, last place first. Leading spaces do not matter."""

    def __init__(self, prefix: Sequence[int], texts: Sequence[str]) -> None:
        self._prefix, self._texts = list(prefix), texts
        self._ends: dict[tuple[str, ...], int] = {}
        plain = [self._plain(token) for token in self._prefix]
        for end in range(1, len(plain)):
            self._ends[(plain[end - 1],)] = end
            if end > 1:
                self._ends[plain[end - 2], plain[end - 1]] = end

    def continuation(self, answer: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the answer's last two tokens, or its single long one."""
        if count < 1 or not answer:
            return []
        last = tuple(self._plain(token) for token in answer[-2:])
        end = self._ends.get(last) if len(last) == 2 else None
        if end is None and sum(char.isalnum() for char in last[-1]) >= MIN_LETTERS:
            end = self._ends.get(last[-1:])
        return [] if end is None else self._prefix[end : end + count]

    def _plain(self, token: int) -> str:
        return self._texts[token].lstrip() if token < len(self._texts) else ""
