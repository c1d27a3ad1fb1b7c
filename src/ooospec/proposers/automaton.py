"""A suffix automaton that grows token by token and knows the longest suffix that occurred before.

Blumer et al. (1985); used for drafting by SAM Decoding (arXiv 2411.10666). Amortised constant time a token.
"""

from __future__ import annotations

from collections.abc import Sequence


class SuffixAutomaton:
    """Automaton of all substrings of `tokens`. `matched` is the length of the longest suffix seen earlier."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first_end = [0]
        self._last = 0
        self._cursor = 0
        self.matched = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._advance(token)
            self._add(token)

    def continuation(self, length: int) -> list[int]:
        """Return up to `length` tokens that followed the first earlier occurrence of the matched suffix."""
        end = self._first_end[self._cursor]
        return self.tokens[end : end + length] if self.matched else []

    def _advance(self, token: int) -> None:
        """Move the match over the text so far, before `token` becomes part of it."""
        while self._cursor and token not in self._next[self._cursor]:
            self._cursor = self._link[self._cursor]
            self.matched = self._length[self._cursor]
        if token in self._next[self._cursor]:
            self._cursor = self._next[self._cursor][token]
            self.matched += 1

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        new = self._state(self._length[self._last] + 1, {}, 0, len(self.tokens))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            target = self._next[state][token]
            if self._length[target] != self._length[state] + 1:
                target = self._split(state, token, target)
            self._link[new] = target
        self._last = new

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the shorter strings of `target`, which now also end elsewhere, a state of their own."""
        short = self._state(
            self._length[state] + 1, dict(self._next[target]), self._link[target], self._first_end[target]
        )
        self._link[target] = short
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = short
            state = self._link[state]
        if self._cursor == target and self.matched <= self._length[short]:
            self._cursor = short
        return short

    def _state(self, length: int, following: dict[int, int], link: int, first_end: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._link.append(link)
        self._first_end.append(first_end)
        return len(self._length) - 1
