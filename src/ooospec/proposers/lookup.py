"""Prompt Lookup: copy what followed the last match of the newest tokens in prompt and output.

Source: Prompt Lookup Decoding (Saxena, 2023), with DESIGN's parameters: suffixes of 3, 2, 1 tokens, 10 tokens, first
match.
"""

from __future__ import annotations

from collections.abc import Sequence

from ooospec.core import Commit, DecodeContext, Draft


def find_continuation(tokens: Sequence[int], suffix: int, length: int) -> list[int]:
    """Return up to `length` tokens after the first earlier occurrence of the last `suffix` tokens; [] if none."""
    if len(tokens) <= suffix:
        return []
    wanted = list(tokens[-suffix:])
    for start in range(len(tokens) - suffix):
        if tokens[start] == wanted[0] and list(tokens[start : start + suffix]) == wanted:
            return list(tokens[start + suffix : start + suffix + length])
    return []


class PromptLookup:
    """Propose one chain copied from the prompt or the output so far."""

    name = "lookup"
    wants_top = False

    def __init__(self, suffixes: Sequence[int] = (3, 2, 1), length: int = 10) -> None:
        self.suffixes, self.length = tuple(suffixes), length
        self._tokens: list[int] = []

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        self._tokens = list(context.prompt_ids)

    def propose(self) -> list[Draft]:
        """Offer the tokens after the first match of the longest suffix that has one."""
        for suffix in self.suffixes:
            found = find_continuation(self._tokens, suffix, self.length)
            if found:
                return [Draft.uniform(found, self.name, 0.15 * suffix, 0.8)]
        return []

    def observe(self, commit: Commit) -> None:
        """Extend the text that is searched."""
        self._tokens += commit.tokens

    def end(self) -> None:
        """Forget the request."""
        self._tokens = []
