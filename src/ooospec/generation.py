"""The result of one finished request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ooospec.core import Commit, ToolCall


@dataclass(frozen=True, slots=True)
class HintReport:
    """What became of a request's hint."""

    ready_round: int | None
    """First round that could use the function choice; None = it never came in time."""
    ready_ms: float | None
    complete_ms: float | None
    payload_bytes: int
    function: str | None
    slots: Mapping[str, Any]
    """Predicted arguments of the predicted function."""
    prefill_ms: int = 0
    wave_ms: int = 0
    steps: int = 0
    busy_round_ms: float | None = None
    """Median time of a verify pass that began while the sidecar worked (the one that ends the prefill apart)."""
    idle_round_ms: float | None = None
    """The same for passes that began after the wave."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished request."""

    calls: tuple[ToolCall, ...]
    text: str
    """Everything the target wrote, without the end-of-sequence token."""
    content: str
    """The words outside calls and reasoning."""
    reasoning: str
    output_ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Commit, ...]
    prompt_tokens: int
    cached_tokens: int
    total_ms: float
    hint: HintReport | None = None
    warnings: Mapping[str, int] = field(default_factory=dict)
    reasoning_tokens: int = 0
    predicted_tokens: int = 0
    """Tokens drafted from a client's prediction, from its beginning."""
    right_predicted_tokens: int = 0
    """Those of them that the target wrote, whichever draft they were taken from."""

    @property
    def num_rounds(self) -> int:
        """Verify passes, the one that ends the prefill included."""
        return len(self.rounds)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round, the bonus token included."""
        return len(self.output_ids) / max(1, len(self.rounds))

    @property
    def prefill_ms(self) -> float:
        """From arrival to the end of the first round, whose pass also caches the prompt's last chunk."""
        first = self.rounds[0]
        return first.start_ms + first.propose_ms + first.verify_ms

    @property
    def decode_ms(self) -> float:
        """From the end of the first round to the last committed token."""
        return self.total_ms - self.prefill_ms

    def decode_ms_beside(self, plain: Generation) -> float:
        """Return what is left of the time when plain decoding's prefill is taken off."""
        return max(1e-3, self.total_ms - plain.prefill_ms)

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Committed tokens by the proposer whose draft held them; `target` = bonus tokens."""
        return dict(Counter(source for commit in self.rounds for source in commit.sources))

    @property
    def tree_nodes(self) -> list[int]:
        """Drafted nodes of every round."""
        return [commit.drafted for commit in self.rounds]

    def to_dict(self) -> dict[str, Any]:
        """Give the plain form that `--json` prints."""
        hint = self.hint
        return {
            "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in self.calls],
            "text": self.text,
            "output_ids": list(self.output_ids),
            "finish_reason": self.finish_reason,
            "num_rounds": self.num_rounds,
            "acceptance_length": round(self.acceptance_length, 3),
            "accepted_by_source": self.accepted_by_source,
            "prefill_ms": round(self.prefill_ms, 1),
            "decode_ms": round(self.decode_ms, 1),
            "total_ms": round(self.total_ms, 1),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hint": None if hint is None else {name: getattr(hint, name) for name in HintReport.__slots__},
            "tree_nodes": self.tree_nodes,
            "warnings": dict(self.warnings),
        }
