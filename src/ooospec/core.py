"""Frozen data that travels between the stages. Imports nothing of the package and no torch.

Words are those of docs/glossary.md. Token ids are always the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BONUS = "target"
"""Source name of the token that the target itself adds in every round."""


class Codec(Protocol):
    """Turn text into the target's token ids and back."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end an output."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""

    def encode(self, text: str) -> list[int]:
        """Encode text without adding special tokens at its ends; special tokens in the text become their ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens are kept as text."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One schema-defined argument of one tool."""

    name: str
    types: tuple[str, ...]
    """JSON Schema type names; empty = anything."""
    required: bool
    description: str = ""
    choices: tuple[Any, ...] = ()
    """Allowed values of an enum, const or boolean; empty = free."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One callable function, as the schema resolver read it."""

    name: str
    description: str
    slots: tuple[Slot, ...]

    def slot(self, name: str) -> Slot | None:
        """Find a slot by name."""
        return next((slot for slot in self.slots if slot.name == name), None)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the target wrote it. `raw_arguments` is its own text, byte for byte."""

    name: str
    arguments: Mapping[str, Any]
    raw_arguments: str


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class Draft:
    """One proposed continuation of the committed tokens."""

    tokens: tuple[int, ...]
    source: str
    probabilities: tuple[float, ...]
    """For each token: the chance that it is right if all before it were. Same length as `tokens`."""
    kinds: tuple[str, ...] = ()
    """For each token: what kind of guess it is, for calibration; () = told by source and chance."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.probabilities) == (len(self.kinds) or len(self.tokens)):
            raise ValueError(f"A draft of {len(self.tokens)} tokens needs as many probabilities, and kinds or none.")

    @classmethod
    def uniform(cls, tokens: Sequence[int], source: str, first: float, following: float) -> Draft:
        """Build a draft whose first token has chance `first` and every later one `following`."""
        chances = (first,) + (following,) * (len(tokens) - 1) if tokens else ()
        return cls(tuple(tokens), source, chances)


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """What proposers may know at a candidate boundary. The lists grow; treat them as read-only."""

    codec: Codec
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    tools: tuple[Tool, ...]
    style_key: str = ""
    """Names the situation whose call style is learned together (target and kind of tool prompt)."""
    call_format: str = "json"
    """Name of the format calls are written in (`chat.formats`)."""
    thinking: bool = False
    """The prompt ends inside a reasoning block; calls are drafted after its end."""
    reasons: bool = False
    """The answer may begin with a reasoning block."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The target's best successors after some tokens of this round: `tokens` [T], `successors` [T, k]."""

    tokens: Sequence[int]
    successors: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenChances:
    """Log-probability of a committed token, and of the likeliest ones in its place, best first."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """What one round added to the output, and what it cost."""

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    """Per token: the proposer whose draft held it, or `BONUS`."""
    round: int
    drafted: int
    """Nodes of the candidate tree without its root."""
    propose_ms: float = 0.0
    verify_ms: float = 0.0
    lead_tokens: int = 0
    """Prompt tokens that this round's forward pass prefilled on the way."""
    start_ms: float = 0.0
    """Start of the round, from request arrival."""
    top: TopTokens | None = None
    """Successors of this round's tree nodes, where a proposer `wants_top`."""
    prompt_top: TopTokens | None = None
    """First round only: successors of the prompt's tokens, where a proposer `wants_prompt_top`."""
    prompt_state: NDArray[np.float32] | None = None
    """First round only: the target's last hidden state at the prompt's end. [H]"""
    finish_reason: str | None = None
    chances: tuple[TokenChances, ...] = ()
    """One per token, where log-probabilities are asked for."""


@dataclass(frozen=True, slots=True)
class SlotHint:
    """A predicted value of `tool.slot`; `present` False = leave the argument out."""

    tool: str
    slot: str
    value: Any
    present: bool
    confidence: float


@dataclass(frozen=True, slots=True)
class FunctionHint:
    """Predicted tools with their chances, best first."""

    names: tuple[str, ...]
    confidences: tuple[float, ...]


@dataclass(slots=True)
class Hint:
    """Everything the sidecar has said about one request so far. Grows as messages arrive."""

    function: FunctionHint | None = None
    slots: dict[tuple[str, str], SlotHint] = field(default_factory=dict)
    complete: bool = False
    failed: bool = False
    payload_bytes: int = 0


class Proposer(Protocol):
    """A source of drafts. State advances only in `observe`."""

    name: str

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""

    def propose(self) -> list[Draft]:
        """Offer drafts for the next round, best first."""

    def observe(self, commit: Commit) -> None:
        """Take note of what the target committed (already part of the context's output)."""

    def end(self) -> None:
        """Finish the request; keep what later requests may use."""
