"""What a step of an engine with a batch costs, learned from the steps that it ran."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class StepCost:
    """Learns what a step of the engine costs: base + row * rows + token * further tokens, by least squares.

    What the last steps do not tell apart is shared out by size: where the batch stayed the same, between base and
    rows; where nothing was drafted for long, a drafted token seems free until it has been tried again.
    """

    FADE = 0.98
    PRIOR = (1.0, 0.0, 0.05)
    """Relative costs before anything is known."""
    ENOUGH = 8
    """Steps before anything is."""

    def __init__(self) -> None:
        self._moments, self._sums, self.steps = np.zeros((3, 3)), np.zeros(3), 0
        self.base, self.row, self.token = self.PRIOR

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Take note of a step that ran so many rows with so many tokens in all."""
        step = np.array([1.0, rows, max(0, tokens - rows)])
        self._moments = self._moments * self.FADE + np.outer(step, step)
        self._sums = self._sums * self.FADE + step * seconds
        self.steps += 1
        if self.known:
            self.base, self.row, self.token = map(float, np.linalg.lstsq(self._moments, self._sums, rcond=1e-6)[0])

    @property
    def known(self) -> bool:
        """Tell whether costs are seconds by now."""
        return self.steps >= self.ENOUGH

    def share(self, rows: int) -> float:
        """Return what one row of so many adds to a step without drafts, if all carry the same."""
        return max(1e-6, self.base + self.row * rows) / max(1, rows)

    def of(self, rows: int) -> Callable[[int], float]:
        """Return the cost of one row's share with n tokens in it, in a batch of so many rows; 1 = a plain step."""
        token = max(self.token / self.share(rows), 1e-4)
        return lambda tokens: 1.0 + token * (tokens - 1)
