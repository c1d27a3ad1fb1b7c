"""Merging, pruning and the order of the candidate tree; cost curves; stopping."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ooospec.core import Draft
from ooospec.stopping import Limits
from ooospec.target import cost
from ooospec.target.cost import CostCurve
from ooospec.tree import build_tree

DRAFTS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0.05, 0.99)), min_size=1, max_size=6).map(
        lambda d: Draft(tuple(t for t, _ in d), "s", tuple(p for _, p in d))
    ),
    max_size=5,
)


def paths(tree):
    found = set()
    for node in range(len(tree)):
        path = []
        while node > 0:
            path.insert(0, tree.tokens[node])
            node = tree.parents[node]
        found.add(tuple(path))
    return found


@given(DRAFTS)
def test_unbounded_tree_holds_exactly_the_prefixes_of_all_drafts(drafts):
    tree = build_tree(9, drafts, 1000)
    assert paths(tree) == {d.tokens[:n] for d in drafts for n in range(len(d.tokens) + 1)} | {()}
    assert len(paths(tree)) == len(tree)  # merged: no path twice


@given(DRAFTS, st.integers(1, 12), st.integers(0, 4))
def test_bounds_hold_and_parents_come_first(drafts, max_nodes, max_depth):
    tree = build_tree(9, drafts, max_nodes, max_depth=max_depth)
    assert len(tree) <= max_nodes
    assert max(tree.depths()) <= max_depth
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert paths(tree) <= paths(build_tree(9, drafts, 1000))


@given(DRAFTS, st.integers(2, 12))
def test_pruning_keeps_the_most_expected_tokens(drafts, max_nodes):
    """Against the slow obvious way: sort all nodes of the merged trie by chance."""
    chances: dict[tuple[int, ...], float] = {}
    for draft in drafts:
        chance = 1.0
        for n, step in enumerate(draft.probabilities):
            chance *= step
            key = draft.tokens[: n + 1]
            chances[key] = max(chance, chances.get(key, 0.0))
    for key in sorted(chances, key=len):  # a child is never likelier than its parent
        chances[key] = min(chances[key], chances.get(key[:-1], 1.0))
    best = sum(sorted(chances.values(), reverse=True)[: max_nodes - 1])
    kept = sum(chances[path] for path in paths(build_tree(9, drafts, max_nodes)) if path)
    assert kept == pytest.approx(best)


def test_cost_decides_the_size():
    draft = Draft.uniform((1, 2, 3, 4, 5, 6), "s", 0.9, 0.9)
    assert len(build_tree(0, [draft], 64, cost=lambda n: 1.0)) == 7
    assert len(build_tree(0, [draft], 64, cost=lambda n: float(n))) == 1
    sizes = [len(build_tree(0, [draft], 64, cost=lambda n, slope=slope: 1 + slope * n)) for slope in (0.01, 0.2, 0.9)]
    assert sizes == sorted(sizes, reverse=True)


def test_best_branch_comes_first_in_depth_first_order():
    good, poor = Draft.uniform((1, 2), "good", 0.9, 0.9), Draft.uniform((3, 4), "poor", 0.2, 0.9)
    tree = build_tree(0, [poor, good], 16)
    assert tree.tokens == (0, 1, 2, 3, 4)
    assert tree.sources[1:] == ("good", "good", "poor", "poor")


def test_masks_and_chains():
    tree = build_tree(0, [Draft.uniform((1, 2), "a", 0.9, 0.9), Draft.uniform((1, 3), "a", 0.5, 0.5)], 16)
    assert tree.ancestor_mask().astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert not tree.is_chain()
    assert build_tree(0, [Draft.uniform((1, 2), "a", 0.9, 0.9)], 16).is_chain()


def test_cost_curve_interpolates_and_extrapolates():
    curve = CostCurve((1, 4, 8), (10.0, 16.0, 20.0))
    assert [curve(n) for n in (1, 2, 4, 6, 8, 12)] == [10.0, 12.0, 16.0, 18.0, 20.0, 24.0]
    assert all(b >= a for a, b in pairwise(curve(n) for n in range(1, 40)))


def test_stop_string_over_a_token_boundary(codec):
    limits = Limits(50, ("}}\n",))
    output, new = codec.encode('{"a": {"b": 1}'), codec.encode("}\nmore")
    kept, reason = limits.cut(codec, output, new)
    assert (codec.decode(new[:kept]), reason) == ("}\n", "stop")
    assert limits.cut(codec, output, codec.encode("} x"))[1] is None


@pytest.mark.parametrize(
    ("seconds", "timed", "wide"),
    [
        (lambda n: 0.3 * n, 16, 12.0),  # steep and slow
        (lambda n: 0.03 * n, 64, 1.2),  # steep and fast
        (lambda n: max(3.0, 0.1 * n), 64, 4.0),  # slow, and flat up to 30
        (lambda n: 0.2 + 0.6 * min(n, 4) + 0.01 * n, 16, 3.0),  # steep only at first
    ],
)
def test_wide_passes_are_timed_unless_they_are_slow_and_steep(monkeypatch, seconds, timed, wide):
    clock, asked, done = [0.0], [], []

    class Target:
        vocabulary = 10
        begin = prefill = end = commit = lambda self, *given: None

        def verify(self, tree):
            asked.append(len(tree.tokens))
            clock[0] += seconds(len(tree.tokens))
            return torch.zeros(1, 2)

    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])
    curve = cost.measure_cost(Target(), lambda *at: done.append(at))
    assert max(asked) == timed and done[-1] == (len(cost.WIDTHS),) * 2
    assert curve(1) == pytest.approx(seconds(1) * 1e3) and curve(40) == pytest.approx(wide * 1e3, rel=0.05)
    assert all(asked.count(width) == 1 for width in set(asked) if width > 4 and seconds(width - 4) > 2.1)
