"""SAM Decoding (arXiv 2411.10666): a long copy where the newest tokens occurred before, else token recycling.

A match of 5 or more tokens in prompt + output gives a chain of 40; otherwise a recycling tree of 60 nodes, whose table
is also filled from the prefill's logits.
"""

from __future__ import annotations

from ooospec.core import Commit, DecodeContext, Draft
from ooospec.proposers.automaton import SuffixAutomaton
from ooospec.proposers.recycling import SuccessorTable, TokenRecycling

MIN_MATCH = 5
CHAIN = 40
TREE_NODES = 60


class SuffixAutomatonDrafts:
    """Propose a chain from the automaton or the recycling tree, never both."""

    name = "samd"
    wants_top = True
    wants_prompt_top = True

    def __init__(self, table: SuccessorTable) -> None:
        self._recycling = TokenRecycling(table, TREE_NODES, name=self.name)
        self._automaton = SuffixAutomaton()

    def begin(self, context: DecodeContext) -> None:
        """Start a request: index the prompt."""
        self._recycling.begin(context)
        self._automaton = SuffixAutomaton()
        self._automaton.extend(context.prompt_ids)

    def propose(self) -> list[Draft]:
        """Offer the copy if the match is long enough, else the tree."""
        if self._automaton.matched >= MIN_MATCH:
            tokens = self._automaton.continuation(CHAIN)
            if tokens:
                first = min(0.9, 0.4 + 0.05 * self._automaton.matched)
                return [Draft.uniform(tokens, self.name, first, 0.93)]
        return self._recycling.propose()

    def observe(self, commit: Commit) -> None:
        """Extend the searched text and the table."""
        self._automaton.extend(commit.tokens)
        self._recycling.observe(commit)

    def end(self) -> None:
        """Forget the text; the table stays."""
        self._automaton = SuffixAutomaton()
