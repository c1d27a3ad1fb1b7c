"""Decide what a round verifies: calibrated drafts, merged into the tree that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ooospec.calibration import Calibrator
from ooospec.core import Draft
from ooospec.errors import UsageError
from ooospec.tree import CandidateTree, Cost, build_tree


@dataclass(frozen=True, slots=True)
class Budget:
    """How large a candidate tree may be: `max_nodes` with the root; with `cost`, only what pays by measured time."""

    max_nodes: int = 64
    cost: Cost | None = None


def check_policy(name: str) -> str:
    """Return the budget policy's name: measured or fixed. Raises UsageError."""
    if name not in ("measured", "fixed"):
        raise UsageError(f"budget must be measured or fixed; got {name!r}.")
    return name


class Planner:
    """Plans the trees of one request; what it learns stays in the calibrator."""

    def __init__(self, budget: Budget, calibrator: Calibrator | None, vocabulary: int) -> None:
        self.budget, self.calibrator, self.vocabulary = budget, calibrator, vocabulary
        self._drafts: list[Draft] = []
        self._cost = 0.0

    def plan(self, root: int, drafts: Sequence[Draft], room: int, lead: int) -> CandidateTree:
        """Build the tree under `root`, at most `room` deep; its pass also prefills `lead` prompt tokens."""
        calibrator, cost = self.calibrator, self.budget.cost
        self._drafts = [calibrator.calibrate(draft) for draft in drafts] if calibrator is not None else list(drafts)
        rate = calibrator.rate if calibrator is not None else None
        beside = (lambda nodes: cost(lead + nodes)) if cost is not None and lead else cost
        tree = build_tree(root, self._drafts, self.budget.max_nodes, beside, room, self.vocabulary, rate)
        self._cost = cost(len(tree)) if cost is not None else 0.0
        return tree

    def observe(self, committed: Sequence[int]) -> None:
        """Learn from what the target wrote."""
        if self.calibrator is not None:
            self.calibrator.observe(self._drafts, committed)
            if self._cost:
                self.calibrator.observe_cost(len(committed), self._cost)
