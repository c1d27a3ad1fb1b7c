"""Acceptance: follow the target's own choices down the candidate tree.

Greedy: the longest path the target would have taken. Sampling: draw at each node from the target's processed
distribution and follow the branch that was drawn, one draw per committed token, so that the output has exactly the
distribution of plain sampling (and with one seed, the same tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ooospec.core import TokenChances
from ooospec.tree import CandidateTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted root-to-node path and the bonus token after it."""

    path: tuple[int, ...]
    bonus: int


class Chooser(Protocol):
    """Decide the target's next token from its logits."""

    def prepare(self, logits: Tensor) -> None:
        """Take the logits of all nodes. [T, V]"""

    def choose(self, node: int) -> int:
        """Return the token after `node`; called once per committed token, in output order."""

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a draft may follow in a row; the rest is not worth verifying."""

    @property
    def chances(self) -> Sequence[TokenChances]:
        """Log-probabilities of the tokens chosen since `prepare`, where they are asked for."""


class Greedy:
    """Choose the token with the largest logit."""

    def prepare(self, logits: Tensor) -> None:
        """Take the logits of all nodes. [T, V]"""
        self._best: Sequence[int] = first_largest(logits).tolist()

    def choose(self, node: int) -> int:
        """Return the most likely token after `node`."""
        return self._best[node]

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Allow every draft."""
        return len(tokens)

    @property
    def chances(self) -> Sequence[TokenChances]:
        """Keep none."""
        return ()


BLOCK = 128


def top_indices(logits: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest logits of every row, largest first. [T, V] -> [T, count]

    The largest values lie in the blocks with the largest maxima, so only those are sorted: on a CPU several times
    faster than `topk` over a vocabulary.
    """
    rows, size = logits.shape
    if size % BLOCK or size <= 2 * BLOCK * count:
        return logits.topk(count).indices
    blocks = logits.view(rows, -1, BLOCK)
    best = blocks.amax(-1).topk(count).indices
    within = blocks.gather(1, best[..., None].expand(-1, -1, BLOCK)).view(rows, -1).topk(count).indices
    return best.gather(1, within // BLOCK) * BLOCK + within % BLOCK


def first_largest(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of every row, of equal ones the first, as `argmax` does. [T, V] -> [T]"""
    rows, size = logits.shape
    if size % BLOCK or logits.device.type != "cpu":
        return logits.argmax(-1)
    blocks = logits.view(rows, -1, BLOCK)
    best = blocks.amax(-1).argmax(-1)
    return best * BLOCK + blocks[torch.arange(rows), best].argmax(-1)


def accept(tree: CandidateTree, logits: Tensor, chooser: Chooser) -> Acceptance:
    """Walk down the tree while the target's choice is among the children. `logits` [T, V]."""
    chooser.prepare(logits)
    children = tree.children()
    path = [0]
    while True:
        token = chooser.choose(path[-1])
        child = children.get((path[-1], token))
        if child is None:
            return Acceptance(tuple(path), token)
        path.append(child)
