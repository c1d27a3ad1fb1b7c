"""Learn how often drafted tokens are right, so that the tree's size rests on what was seen and not on guesses.

Every drafted token has a kind ("structure", "value in the fourth fifth of confidence", "second rank of recycling", ..).
For each kind the chance that the token is right, given that all before it were, is estimated as the mean of a Beta
distribution around the proposer's own chance. Right or wrong is known for every drafted token whose predecessors were
committed, in the tree or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ooospec.core import Draft

PRIOR_WEIGHT = 8.0
"""Observations that the proposer's own chance counts for."""
MEMORY = 400.0
"""Observations after which old ones fade."""
DEPTHS = 6
ENOUGH_TOKENS = 64
_RATE = "rate"


class Calibrator:
    """Counts of right and of all tokens by kind."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}

    def calibrate(self, draft: Draft) -> Draft:
        """Replace the draft's chances by calibrated ones."""
        kinds = draft.kinds or _kinds(draft)
        chances = []
        for kind, prior in zip(kinds, draft.probabilities, strict=True):
            right, seen = self._counts.get(kind, (0.0, 0.0))
            chances.append((prior * PRIOR_WEIGHT + right) / (PRIOR_WEIGHT + seen))
        return replace(draft, probabilities=tuple(chances), kinds=kinds)

    @property
    def rate(self) -> float | None:
        """Tokens per unit of cost over the last rounds; None before enough are known."""
        tokens, cost = self._counts.get(_RATE, (0.0, 0.0))
        return tokens / cost if tokens >= ENOUGH_TOKENS else None

    def observe_cost(self, tokens: int, cost: float) -> None:
        """Take note of what a round committed and cost."""
        before, spent = self._counts.get(_RATE, (0.0, 0.0))
        fade = min(1.0, MEMORY / (before + tokens))
        self._counts[_RATE] = (before + tokens) * fade, (spent + cost) * fade

    def observe(self, drafts: Sequence[Draft], committed: Sequence[int]) -> None:
        """Take note of which drafted tokens the target wrote; drafts with the same beginning count once."""
        known: set[tuple[int, int, str]] = set()
        for draft in drafts:
            for depth, (token, actual) in enumerate(zip(draft.tokens, committed, strict=False)):
                key = depth, token, draft.kinds[depth]
                if key not in known:
                    known.add(key)
                    self._count(key[2], token == actual)
                if token != actual:
                    break

    def _count(self, kind: str, right: bool) -> None:
        hits, seen = self._counts.get(kind, (0.0, 0.0))
        fade = MEMORY / (seen + 1) if seen >= MEMORY else 1.0
        self._counts[kind] = (hits + right) * fade, (seen + 1) * fade

    def chance(self, kind: str) -> float | None:
        """Return the share of tokens of a kind that were right; None for one never seen."""
        right, seen = self._counts.get(kind, (0.0, 0.0))
        return right / seen if seen else None

    @property
    def nbytes(self) -> int:
        """About how many bytes the counts take."""
        return 200 * len(self._counts)

    def dump(self) -> bytes:
        """Write all counts."""
        return msgspec.msgpack.encode(self._counts)

    def load(self, data: bytes) -> None:
        """Read what `dump` wrote."""
        self._counts = msgspec.msgpack.decode(data, type=dict[str, tuple[float, float]])


def _kinds(draft: Draft) -> tuple[str, ...]:
    """Tell tokens apart by source, depth and the proposer's own chance, where it names no kinds."""
    return tuple(
        f"{draft.source} {min(depth, DEPTHS)} {round(10 * chance)}" for depth, chance in enumerate(draft.probabilities)
    )
