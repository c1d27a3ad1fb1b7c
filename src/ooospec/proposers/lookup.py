"""Prompt Lookup: copy what followed the last match of the newest tokens in prompt and output.

Source: Prompt Lookup Decoding (Saxena, 2023), with these parameters: suffixes of 3, 2, 1 tokens, 10 tokens, first
match.
"""

from __future__ import annotations

from collections.abc import Sequence

from ooospec.core import Commit, DecodeContext, Draft


class PromptLookup:
    """Propose one chain copied from the prompt or the output so far."""

    name = "lookup"
    wants_top = False

    def __init__(self, suffixes: Sequence[int] = (3, 2, 1), length: int = 10) -> None:
        self.suffixes, self.length = tuple(suffixes), length
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """Where each run of as many tokens as a suffix has ends for the first time."""

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        self._tokens, self._ends = [], {}
        self._extend(context.prompt_ids)

    def propose(self) -> list[Draft]:
        """Offer the tokens after the first match of the longest suffix that has one."""
        for suffix in self.suffixes:
            end = self._ends.get(tuple(self._tokens[-suffix:]), len(self._tokens))
            if end < len(self._tokens):
                return [Draft.uniform(self._tokens[end : end + self.length], self.name, 0.15 * suffix, 0.8)]
        return []

    def observe(self, commit: Commit) -> None:
        """Extend the text that is searched."""
        self._extend(commit.tokens)

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            for suffix in self.suffixes:
                if len(self._tokens) >= suffix:
                    self._ends.setdefault(tuple(self._tokens[-suffix:]), len(self._tokens))

    def end(self) -> None:
        """Forget the request."""
        self._tokens, self._ends = [], {}
