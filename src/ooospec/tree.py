"""The candidate tree: drafts merged by common prefix, pruned to what pays. Imports no torch.

Tree verification after SpecInfer (arXiv 2305.09781); the pruning rule is this project's own: keep the nodes
that maximise expected committed tokens per unit of measured verify time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooospec.core import Draft

Cost = Callable[[int], float]
"""Time of one verify pass over a number of tokens, in any unit."""


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """Candidate continuations in depth-first order, best branch first.

    Node 0 is the root: the last committed token, whose KV entry is not cached yet. `parents[i] < i`,
    `parents[0] == -1`. `sources[i]` names the proposer that offered node i first.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Distance of every node from the root. [T]"""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """Row i is true at i and at every ancestor of i. [T, T]"""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def is_chain(self) -> bool:
        """Tell whether the tree has a single branch (then a causal mask is enough)."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def children(self) -> dict[tuple[int, int], int]:
        """Map (parent node, token) to the child node."""
        return {(p, t): node for node, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True)) if p >= 0}


@dataclass(slots=True)
class _Node:
    token: int
    source: str
    chance: float
    children: dict[int, _Node]
    kept: bool = False


def _merge(root: int, drafts: Iterable[Draft], max_depth: int | None, vocabulary: int | None) -> _Node:
    """Merge drafts into a trie; a node's chance is the best that any draft gives its whole path."""
    top = _Node(root, "", 1.0, {})
    for draft in drafts:
        node, chance = top, 1.0
        for token, step in list(zip(draft.tokens, draft.probabilities, strict=True))[:max_depth]:
            if vocabulary is not None and not 0 <= token < vocabulary:
                break
            chance *= step
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node(token, draft.source, chance, {})
            elif chance > child.chance:
                child.chance = chance
            node = child
    return top


def _select(top: _Node, max_nodes: int, cost: Cost | None, rate: float | None) -> None:
    """Mark the nodes to keep: by falling chance, up to the size that pays best.

    Chances never rise along a path, so every prefix of the order is closed under taking parents, and it holds
    the largest expected acceptance length of its size. With `rate` (tokens per unit of cost that decoding makes on
    average) the size with the largest expected tokens - rate * cost is kept, which is best over a whole output
    (renewal-reward argument); without, the size with the most expected tokens per cost of this round alone.
    """
    order: list[_Node] = []
    gains = [1.0]
    tick = 0
    heap: list[tuple[float, int, _Node]] = []
    node = top
    while len(order) < max_nodes - 1:
        for child in node.children.values():
            tick += 1
            heapq.heappush(heap, (-min(child.chance, node.chance), tick, child))
        if not heap:
            break
        _, _, node = heapq.heappop(heap)
        order.append(node)
        gains.append(gains[-1] + node.chance)
    size = len(order) if cost is None else _best_size(gains, cost, rate)
    for node in order[:size]:
        node.kept = True


def best_chain(
    drafts: Sequence[Draft],
    max_length: int,
    cost: Cost | None = None,
    vocabulary: int | None = None,
    rate: float | None = None,
) -> list[tuple[int, str]]:
    """Return the one continuation worth verifying where an engine takes chains only: (token, source) in order.

    Of all paths of the tree that the drafts form, the one with the most expected accepted tokens within `max_length`;
    with `cost` (of a pass over 1 + n tokens), cut to what pays, by the rule of `build_tree`.
    """
    top = _merge(0, drafts, max_length, vocabulary)
    best: dict[int, float] = {}
    order, stack = list[_Node](), [top]
    while stack:  # parents before children
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    for node in reversed(order):
        best[id(node)] = node.chance + max((best[id(child)] for child in node.children.values()), default=0.0)
    chain, gains, node = list[tuple[int, str]](), [1.0], top
    while node.children:
        node = max(node.children.values(), key=lambda child: best[id(child)])
        chain.append((node.token, node.source))
        gains.append(gains[-1] + node.chance)
    if cost is None:
        return chain
    return chain[: _best_size(gains, cost, rate)]


def _best_size(gains: Sequence[float], cost: Cost, rate: float | None) -> int:
    """Return the number of nodes that pays best; `gains[n]` = expected tokens with n nodes."""
    worth = (lambda n: gains[n] / cost(n + 1)) if rate is None else (lambda n: gains[n] - rate * cost(n + 1))
    return max(range(len(gains)), key=worth)


def build_tree(
    root: int,
    drafts: Sequence[Draft],
    max_nodes: int,
    cost: Cost | None = None,
    max_depth: int | None = None,
    vocabulary: int | None = None,
    rate: float | None = None,
) -> CandidateTree:
    """Merge `drafts` under the last committed token `root`.

    At most `max_nodes` nodes (root included), none deeper than `max_depth`, are kept; with `cost`, only as many as
    pay, compared with the `rate` of tokens per unit of cost made so far. A draft ends before an id of `vocabulary` or
    more.
    """
    top = _merge(root, drafts, max_depth, vocabulary)
    _select(top, max_nodes, cost, rate)
    tokens, parents, sources = [], [], []
    stack: list[tuple[_Node, int]] = [(top, -1)]
    while stack:
        node, parent = stack.pop()
        tokens.append(node.token)
        parents.append(parent)
        sources.append(node.source)
        kept = sorted((c for c in node.children.values() if c.kept), key=lambda c: c.chance)
        stack.extend((child, len(tokens) - 1) for child in kept)
    return CandidateTree(tuple(tokens), tuple(parents), tuple(sources))
