"""How the next token is chosen from the target's logits, and the choosers that do it at every node alike.

Order as in vLLM's sampler: bias, penalties, then either the largest, or temperature, min_p, top_k, top_p and a draw.
Log-probabilities are those of the unchanged logits. A constraint (a grammar) masks what it forbids before all else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from ooospec.core import TokenChances
from ooospec.errors import UsageError
from ooospec.verify import Chooser, Greedy

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5


class Constraint(Protocol):
    """What may follow; advanced by committed tokens only."""

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits with everything forbidden at -inf. [V]"""

    def advance(self, token: int) -> None:
        """Take note of the next committed token."""

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request, checked. Defaults: greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 = all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output (Keskar et al., 2019); the other two count the output only."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    """None = none; n = the chosen token's log-probability and those of the n likeliest."""

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf, "0 = greedy decoding")
        _number("top_p", self.top_p, 0.0, 1.0, "above 0", low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("top_k", self.top_k, -1, 2**31)
        _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias's token", token, 0, 2**31)
            _number("logit_bias", bias, -100.0, 100.0)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sampling:
        """Build from keyword options. Raises UsageError for unknown names and wrong values."""
        names = [f.name for f in fields(cls)]
        unknown = [name for name in options if name not in names]
        if unknown:
            raise UsageError(f"Unknown option {unknown[0]!r}; sampling options are {', '.join(names)}.")
        return cls(**options)

    @property
    def is_plain(self) -> bool:
        """Tell whether this is greedy decoding on the unchanged logits."""
        return self.is_greedy and self.keeps_logits and self.logprobs is None

    @property
    def is_greedy(self) -> bool:
        """Tell whether the largest logit is taken: at temperature 0, or so close that dividing by it overflows."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def keeps_logits(self) -> bool:
        """Tell whether no penalty or bias changes the logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return not penalties and not self.logit_bias


def _number(name: str, value: Any, low: float, high: float, note: str = "", low_open: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (low_open and value == low):
        top = f" to {high:g}" if high < math.inf else " up"
        raise UsageError(f"{name} must be a number from {low:g}{top}{f' ({note})' if note else ''}; got {value!r}.")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}; got {value!r}.")


def make_chooser(sampling: Sampling, prompt_ids: Sequence[int], constraint: Constraint | None = None) -> Chooser:
    """Return what chooses the target's tokens for one request."""
    if sampling.is_plain and constraint is None:
        return Greedy()
    return Sampler(sampling, prompt_ids, constraint)


class Sampler:
    """Choose as `sampling` says, one choice per committed token, with a generator of its own."""

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int] = (), constraint: Constraint | None = None
    ) -> None:
        self.sampling, self.constraint = sampling, constraint
        self._random = torch.Generator().manual_seed(sampling.seed)
        self._counts: Counter[int] = Counter()
        self._seen = set(prompt_ids) if sampling.repetition_penalty != 1.0 else set()
        self.chances: list[TokenChances] = []

    def prepare(self, logits: Tensor) -> None:
        """Take the logits of all nodes. [T, V]"""
        self._logits = logits
        self.chances = []

    def choose(self, node: int) -> int:
        """Choose the token after `node`."""
        sampling, row = self.sampling, self._logits[node].double().cpu()
        if self.constraint is not None:
            row = self.constraint.mask(row)
        changed = row if sampling.keeps_logits else self._penalized(row)
        token = int(changed.argmax()) if sampling.is_greedy else self._draw(changed)
        if sampling.logprobs is not None:
            self.chances.append(_chances(self._logits[node], token, sampling.logprobs))
        if not sampling.keeps_logits:
            self._counts[token] += 1
            self._seen.add(token)
        if self.constraint is not None:
            self.constraint.advance(token)
        return token

    def _penalized(self, row: Tensor) -> Tensor:
        sampling, row = self.sampling, row.clone()
        for token, bias in sampling.logit_bias.items():
            if token < len(row):
                row[token] += bias
        if sampling.repetition_penalty != 1.0 and self._seen:
            seen = torch.tensor(sorted(token for token in self._seen if token < len(row)))
            values = row[seen]
            penalty = sampling.repetition_penalty
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        for token, count in self._counts.items():
            row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        return row

    def _draw(self, row: Tensor) -> int:
        sampling = self.sampling
        row = row / sampling.temperature
        if sampling.min_p > 0:
            row = row.masked_fill(row < row.max() + math.log(sampling.min_p), -math.inf)
        if 0 < sampling.top_k < len(row):
            row = row.masked_fill(row < row.topk(sampling.top_k).values[-1], -math.inf)
        chances = torch.softmax(row, -1)
        if sampling.top_p < 1.0:
            ordered, index = chances.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            chances = torch.zeros_like(chances).scatter(0, index, ordered.masked_fill(before >= sampling.top_p, 0.0))
        return int(torch.multinomial(chances, 1, generator=self._random))

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a draft may follow in a row."""
        return len(tokens) if self.constraint is None else self.constraint.allowed_length(tokens)


def _chances(logits: Tensor, token: int, count: int) -> TokenChances:
    logs = torch.log_softmax(logits.float(), -1)
    top = logs.topk(count) if count else None
    likeliest = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else ()
    return TokenChances(token, float(logs[token]), likeliest)
