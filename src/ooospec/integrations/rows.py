"""Drafting for engines that show a batch as rows of tokens, without request ids, tools or text.

A row is recognised by its content: it continues a known request where its tokens are that request's tokens and the new
ones behind them. Requests with equal tokens are interchangeable, so rows that join, leave, move or are preempted cannot
mix anything up. Knows nothing of the engine; `integrations.vllm` brings it there.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ooospec.calibration import Calibrator
from ooospec.chat.codec import TextCodec
from ooospec.chat.formats.registry import detect_format
from ooospec.chat.prompt_tools import tools_in_prompt
from ooospec.chat.schema import prose_tools
from ooospec.chat.style import StyleBook, ValueBook
from ooospec.core import BONUS, Commit, DecodeContext, Draft, Hint, Proposer, Tool
from ooospec.memory import Memory
from ooospec.proposers.calls import CallProposer
from ooospec.proposers.lookup import PromptLookup
from ooospec.proposers.retrieval import Retrieval, RetrievalMemory
from ooospec.tree import best_chain

logger = logging.getLogger("ooospec.integrations")
Tokens = NDArray[np.int32]
MAX_PARKED = 64
"""Requests kept after they left the batch, as they may have been preempted."""
STATE_SIZE = 1024
STATE_TOKENS = 512
"""Prompt tokens, counted from the end, whose counts stand for the prompt where no hidden state is at hand."""


def prompt_key(tokens: Sequence[int] | Tokens) -> bytes:
    """Return the key of a prompt: what a front end names a request by, and a worker finds it by. 16 bytes."""
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


class HintSource(Protocol):
    """Where hints of named requests come from."""

    def find(self, key: bytes) -> tuple[tuple[Tool, ...], Callable[[], Hint | None]] | None:
        """Return the tools of the request and a way to poll its hint; None for one that was not named."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a target before any request."""

    codec: TextCodec
    call_format: str
    """Format its chat template asks for; tools in prose may ask for another one."""
    reasons: bool
    """Its answers may begin with a reasoning block."""
    name: str = "target"


class StepCost:
    """Learns what a step of the engine costs: a + b * tokens, by least squares over the last steps."""

    FADE = 0.98
    PRIOR = (1.0, 0.05)
    """Relative costs of a step and of a token in it, before anything is known."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        self.base, self.token = self.PRIOR

    def observe(self, tokens: int, seconds: float) -> None:
        """Take note of a step that verified so many tokens in all."""
        self._sums = self._sums * self.FADE + np.array([1.0, tokens, tokens * tokens, seconds, tokens * seconds])
        count, x, xx, y, xy = self._sums
        spread = count * xx - x * x
        if count >= 8 and spread > 1e-6 * xx:
            token = max(0.0, (count * xy - x * y) / spread)
            base = max(1e-6, (y - token * x) / count)
            self.base, self.token = base, max(token, 1e-4 * base)

    def of(self, rows: int) -> Callable[[int], float]:
        """Return the cost of one row's share with n tokens in it, in a batch of so many rows."""
        base, token = self.base / max(1, rows), self.token
        return lambda tokens: base + token * tokens


@dataclass(eq=False)
class _Row:
    """One request."""

    tokens: Tokens
    """Its prompt and everything committed."""
    prompt_length: int
    context: DecodeContext
    output: list[int]
    proposers: list[Proposer]
    drafted: list[tuple[int, str]] = field(default_factory=list)
    offered: list[Draft] = field(default_factory=list)
    rounds: int = 0
    ended: bool = False
    learned: bool = False
    """Its call style is in the memory already."""


class RowDrafter:
    """Drafts for the rows of a batch, one chain each."""

    def __init__(
        self, situation: Situation, max_tokens: int, max_length: int, hints: HintSource | None = None,
        remember: bool = True,
    ) -> None:  # fmt: skip
        """`max_tokens` drafted per row; `max_length` of a row, in tokens. `remember` = across requests."""
        self.situation, self.max_tokens, self.max_length, self._hints = situation, max_tokens, max_length, hints
        self._memory = Memory() if remember else None
        self._calibrator = Calibrator()
        self._active: list[_Row | None] = []
        self._parked: OrderedDict[int, _Row] = OrderedDict()
        self.cost = StepCost()
        self._last: tuple[float, int] | None = None
        """When the last drafts were given, and how many tokens the step behind verifies."""
        self.counts: Counter[str] = Counter()
        """requests, named (hints found by key), drafted, accepted_SOURCE, faults, .."""

    def propose(self, sampled: Sequence[Sequence[int]], lengths: NDArray[Any], tokens: NDArray[Any]) -> list[list[int]]:
        """Return the drafted tokens of every row; never raises.

        sampled: new tokens of each row, [] while its prompt is not finished. lengths: [R] tokens of each row, the new
        ones included. tokens: [R, L] the rows.
        """
        try:
            return self._propose(sampled, lengths, tokens)
        except Exception:
            self._fault("a step")
            return [[] for _ in sampled]

    def _propose(self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any) -> list[list[int]]:
        start, before, self._active = time.perf_counter(), self._active, [None] * len(sampled)
        free = [row for row in before if row is not None]
        steady = len(free) == len(before)
        drafts, verified = list[list[int]](), 0
        for index, new in enumerate(sampled):
            draft: list[int] = []
            if not new:
                steady = False
            else:
                length = int(lengths[index])
                known = tokens[index, : length - len(new)]
                try:
                    row = self._find(before[index] if index < len(before) else None, free, known)
                    steady = steady and row in before
                    row = row or self._begin(known)
                    self._commit(row, new)
                    draft = self._draft(row, len(sampled))
                    self._active[index] = row
                except Exception:
                    self._fault("a row")
            drafts.append(draft)
            verified += 1 + len(draft)
        self._park([row for row in free if not any(row is active for active in self._active)])
        if steady and self._last is not None:  # the step before verified only: it tells what verifying costs
            self.cost.observe(self._last[1], start - self._last[0])
        self._last = time.perf_counter(), verified
        return drafts

    # ------------------------------------------------------------------ rows

    def _find(self, likely: _Row | None, free: list[_Row], known: Tokens) -> _Row | None:
        """Return the request that these tokens are; it is taken out of those that are free."""
        parked = [row for row in self._parked.values() if len(row.tokens) == len(known)]
        order = [row for row in free if row is likely] + free + parked
        found = next((r for r in order if len(r.tokens) == len(known) and np.array_equal(r.tokens, known)), None)
        if found is not None:
            free[:] = [row for row in free if row is not found]
            self._parked.pop(id(found), None)
        return found

    def _begin(self, prompt: Tokens) -> _Row:
        """Start a request whose prompt is these tokens."""
        self._learn_from_parked()
        self.counts["requests"] += 1
        situation, ids, output = self.situation, prompt.tolist(), list[int]()
        text = situation.codec.decode(ids)
        named = self._hints.find(prompt_key(prompt)) if self._hints is not None else None
        self.counts["named"] += named is not None
        tools, poll = named if named is not None else (tools_in_prompt(text), None)
        call_format = detect_format(text)[0].name if prose_tools(text) else situation.call_format
        thinking = text.rstrip().endswith("<think>")
        reasons = situation.reasons and not thinking and not text.rstrip().endswith("</think>")
        context = DecodeContext(
            situation.codec, ids, output, tools, f"{situation.name}/{call_format}", call_format, thinking, reasons
        )
        memory = self._memory or Memory()
        proposers: list[Proposer] = [
            CallProposer(memory.part(StyleBook), poll, memory.part(ValueBook)),
            Retrieval(memory.part(RetrievalMemory)),
            PromptLookup(),
        ]
        for proposer in proposers:
            proposer.begin(context)
        return _Row(np.array(prompt, dtype=np.int32), len(ids), context, output, proposers)

    def _commit(self, row: _Row, new: Sequence[int]) -> None:
        """Take note of what the target wrote."""
        sources = list[str]()
        for depth, token in enumerate(new):
            drafted = row.drafted[depth] if depth < len(row.drafted) else None
            right = drafted is not None and drafted[0] == token and len(sources) == depth
            sources.append(drafted[1] if right and drafted is not None else BONUS)
        for source in sources:
            if source != BONUS:
                self.counts[f"accepted_{source}"] += 1
        self._calibrator.observe(row.offered, new)
        row.tokens = np.concatenate([row.tokens, np.asarray(new, dtype=np.int32)])
        row.output.extend(int(token) for token in new)
        state = _state_of(row.tokens[: row.prompt_length]) if row.rounds == 0 else None
        commit = Commit(
            tuple(row.output[-len(new) :]), tuple(sources), row.rounds, len(row.drafted), prompt_state=state
        )
        row.rounds += 1
        for proposer in row.proposers:
            proposer.observe(commit)
        if any(int(token) in self.situation.codec.eos_ids for token in new):
            self._end(row)

    def _draft(self, row: _Row, rows: int) -> list[int]:
        """Choose the chain to verify next."""
        row.drafted, row.offered = [], []
        room = min(self.max_tokens, self.max_length - len(row.tokens) - 1)
        if row.ended or room < 1:
            return []
        offered = [draft for proposer in row.proposers for draft in proposer.propose()]
        row.offered = [self._calibrator.calibrate(draft) for draft in offered]
        row.drafted = best_chain(row.offered, room, self.cost.of(rows), self.situation.codec.vocab_size)
        self.counts["drafted"] += len(row.drafted)
        self.counts["rounds"] += 1
        self.counts["rounds_without_draft"] += not row.drafted
        return [token for token, _ in row.drafted]

    def _end(self, row: _Row) -> None:
        """Finish a request; what it taught stays."""
        row.ended = True
        for proposer in row.proposers:
            if not (row.learned and isinstance(proposer, CallProposer)):
                proposer.end()

    def _park(self, rows: list[_Row]) -> None:
        """Keep requests that left the batch without an end token: a limit, a stop text, or they may come back."""
        for row in rows:
            if not row.ended:
                self._parked[id(row)] = row
        while len(self._parked) > MAX_PARKED:
            self._end(self._parked.popitem(last=False)[1])

    def _learn_from_parked(self) -> None:
        """Learn how calls are written from requests that left, before another one begins."""
        for row in self._parked.values():
            if not row.learned:
                row.learned = True
                next(proposer for proposer in row.proposers if isinstance(proposer, CallProposer)).end()

    def _fault(self, where: str) -> None:
        self.counts["faults"] += 1
        if self.counts["faults"] == 1:
            logger.exception("a fault while drafting for %s; the engine goes on (others are only counted)", where)


def _state_of(prompt: Tokens) -> NDArray[np.float32]:
    """Return a vector that is alike for alike prompts: hashed counts of the last tokens. [STATE_SIZE]"""
    last = prompt[-STATE_TOKENS:].astype(np.int64) * 2654435761 % 2**32 % STATE_SIZE
    return np.sqrt(np.bincount(last, minlength=STATE_SIZE)).astype(np.float32)
