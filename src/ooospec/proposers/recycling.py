"""Token Recycling (arXiv 2408.08696): a table of last-seen top successors of every token, drafted as a static tree.

Table vocab x 8; tree of 80 nodes + root with level sizes 8/21/25/15/8/3; every verified node overwrites its row.
"""

from __future__ import annotations

import heapq

import numpy as np

from ooospec.core import Commit, DecodeContext, Draft

WIDTH = 8
LEVELS = (8, 21, 25, 15, 8, 3)
RANK_CHANCE = (0.45, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)
"""Chance that the target's next token is the recycled successor of this rank."""


def static_tree() -> list[tuple[int, ...]]:
    """List the tree's nodes as rank paths from the root, level by level, likeliest paths first."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for size in LEVELS:
        grown = [(*path, rank) for path in level for rank in range(WIDTH)]
        level = heapq.nlargest(size, grown, key=lambda p: float(np.prod([RANK_CHANCE[rank] for rank in p])))
        paths += level
    return paths


_PATHS = static_tree()
_LEAVES = [p for p in _PATHS if not any(q[: len(p)] == p and len(q) > len(p) for q in _PATHS)]


class TokenRecycling:
    """Propose the static tree filled from the successor table, which lives on over requests."""

    name = "recycling"
    wants_top = True

    def __init__(self) -> None:
        self._table: np.ndarray[tuple[int, int], np.dtype[np.int32]] | None = None
        self._last: int = -1

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        rows = max(context.codec.vocab_size, max(context.prompt_ids) + 1)
        if self._table is None or len(self._table) < rows:
            self._table = np.full((rows, WIDTH), -1, dtype=np.int32)
        self._last = context.prompt_ids[-1]

    def propose(self) -> list[Draft]:
        """Offer the tree's root-to-leaf paths as far as the table knows successors."""
        assert self._table is not None
        if self._last >= len(self._table) or self._table[self._last, 0] < 0:
            return []
        drafts = []
        for leaf in _LEAVES:
            tokens: list[int] = []
            token = self._last
            for rank in leaf:
                token = int(self._table[token, rank]) if token < len(self._table) else -1
                if token < 0:
                    break
                tokens.append(token)
            if tokens:
                drafts.append(Draft(tuple(tokens), self.name, tuple(RANK_CHANCE[r] for r in leaf[: len(tokens)])))
        return drafts

    def observe(self, commit: Commit) -> None:
        """Overwrite the rows of all verified nodes."""
        if commit.tokens:
            self._last = commit.tokens[-1]
        if commit.top is None or self._table is None:
            return
        for token, successors in zip(commit.top.tokens, commit.top.successors, strict=True):
            if token < len(self._table):
                self._table[token] = successors

    def end(self) -> None:
        """Keep the table for the next request."""
