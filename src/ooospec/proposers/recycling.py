"""Token Recycling (arXiv 2408.08696): a table of last-seen top successors of every token, drafted as a static tree.

Table vocab x 8; tree of 80 nodes + root with level sizes 8/21/25/15/8/3; every verified node overwrites its row.
"""

from __future__ import annotations

import functools
import heapq

import msgspec
import numpy as np

from ooospec.core import Commit, DecodeContext, Draft, TopTokens

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
        level = heapq.nlargest(size, grown, key=_path_chance)
        paths += level
    return paths


def _path_chance(path: tuple[int, ...]) -> float:
    return float(np.prod([RANK_CHANCE[rank] for rank in path]))


@functools.cache
def _leaves(nodes: int) -> list[tuple[int, ...]]:
    """List the leaves of the likeliest `nodes` nodes of the static tree."""
    paths = heapq.nlargest(nodes, static_tree(), key=_path_chance)
    inner = {path[:depth] for path in paths for depth in range(len(path))}
    return [path for path in paths if path not in inner]


class SuccessorTable:
    """The target's best 8 successors of every token, as last seen; lives on over requests."""

    def __init__(self) -> None:
        self._rows = np.full((0, WIDTH), -1, dtype=np.int32)

    def reserve(self, rows: int) -> None:
        """Make room for token ids below `rows`."""
        if len(self._rows) < rows:
            grown = np.full((rows, WIDTH), -1, dtype=np.int32)
            grown[: len(self._rows)] = self._rows
            self._rows = grown

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._rows.nbytes

    def successors(self, token: int) -> list[int]:
        """Return the successors of a token, best first; [] if it was never seen."""
        if not 0 <= token < len(self._rows) or self._rows[token, 0] < 0:
            return []
        found: list[int] = self._rows[token].tolist()
        return found

    def update(self, top: TopTokens) -> None:
        """Overwrite the rows of `top.tokens`; of a token that occurs twice the later one stays."""
        tokens = np.asarray(top.tokens)
        known = tokens < len(self._rows)
        self._rows[tokens[known]] = top.successors[known]

    def dump(self) -> bytes:
        """Write the known rows."""
        known = np.flatnonzero(self._rows[:, 0] >= 0).astype(np.int32)
        return msgspec.msgpack.encode((len(self._rows), known.tobytes(), self._rows[known].tobytes()))

    def load(self, data: bytes) -> None:
        """Read what `dump` wrote."""
        rows, known, successors = msgspec.msgpack.decode(data, type=tuple[int, bytes, bytes])
        self.reserve(rows)
        self._rows[np.frombuffer(known, np.int32)] = np.frombuffer(successors, np.int32).reshape(-1, WIDTH)


class TokenRecycling:
    """Propose the static tree (its likeliest `nodes` nodes) filled from the successor table."""

    wants_top = True

    def __init__(self, table: SuccessorTable, nodes: int = sum(LEVELS), name: str = "recycling") -> None:
        self.table, self.nodes, self.name = table, nodes, name
        self._last = -1

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        self.table.reserve(max(context.codec.vocab_size, max(context.prompt_ids) + 1))
        self._last = context.prompt_ids[-1]

    def propose(self) -> list[Draft]:
        """Offer the tree's root-to-leaf paths as far as the table knows successors."""
        if not self.table.successors(self._last):
            return []
        rows: dict[int, list[int]] = {}
        drafts = []
        for leaf in _leaves(self.nodes):
            tokens: list[int] = []
            token = self._last
            for rank in leaf:
                if token not in rows:
                    rows[token] = self.table.successors(token)
                if not rows[token]:
                    break
                token = rows[token][rank]
                tokens.append(token)
            drafts.append(Draft(tuple(tokens), self.name, tuple(RANK_CHANCE[r] for r in leaf[: len(tokens)])))
        return drafts

    def observe(self, commit: Commit) -> None:
        """Overwrite the rows of all verified nodes, and of the prompt's tokens where they were asked for."""
        self._last = commit.tokens[-1] if commit.tokens else self._last
        for top in (commit.prompt_top, commit.top):
            if top is not None:
                self.table.update(top)

    def end(self) -> None:
        """Keep the table for the next request."""
