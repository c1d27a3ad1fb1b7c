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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ooospec.calibration import Calibrator
from ooospec.chat.codec import TextCodec
from ooospec.chat.formats.registry import detect_format
from ooospec.chat.prompt_tools import tools_in_prompt
from ooospec.chat.schema import prose_tools
from ooospec.chat.style import StyleBook, ValueBook
from ooospec.core import BONUS, Commit, DecodeContext, Draft, Hint, Proposer, Tool
from ooospec.integrations.step_cost import StepCost
from ooospec.memory import Memory
from ooospec.proposers.calls import CallProposer
from ooospec.proposers.retrieval import Retrieval, RetrievalMemory
from ooospec.tree import best_chain

logger = logging.getLogger("ooospec.integrations")
Tokens = NDArray[np.int32]
MAX_PARKED_TOKENS = 500_000
"""Tokens of requests kept after they left the batch, as they may have been preempted."""
MAX_UNSEEN = 256
"""Tokens that a row may have gone on by while no drafts were asked for."""
VAIN_ROUNDS, VAIN_STRIDE = 8, 4
"""After so many rounds in a row without an accepted token, a row is drafted for only every few rounds; so is every row
while making drafts takes longer than they save."""
EMPTY_ROUNDS = 32
"""After so many rounds in a row in which nothing was found to draft, likewise: where they found nothing, rounds cost
little and say little."""
SLOWLY = 0.95
"""Weight of what was known, in means over the last rounds."""
STATE_SIZE = 2**10
STATE_TOKENS = 512
"""Prompt tokens, counted from the end, whose counts stand for the prompt where no hidden state is at hand."""


def prompt_key(tokens: Sequence[int] | Tokens) -> bytes:
    """Return the key of a prompt: what a front end names a request by, and a worker finds it by. 16 bytes."""
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


class Known(NamedTuple):
    """What is to be had about a named request."""

    tools: tuple[Tool, ...]
    poll: Callable[[], Hint | None]
    """Returns its hint as it stands."""
    ask: Callable[[str, str, str], bool]
    """Asks for more: a tool, a slot or "" for all, how its value begins; see `Mailbox.ask`."""


class HintSource(Protocol):
    """Where hints of named requests come from."""

    def find(self, key: bytes) -> Known | None:
        """Look a request up; None for one that was not named."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a target before any request."""

    codec: TextCodec
    call_format: str
    """Format its chat template asks for; tools in prose may ask for another one."""
    reasons: bool
    """Its answers may begin with a reasoning block."""
    name: str = "target"
    vocabulary: int = 1 << 30
    """Ids from here on are never drafted."""


class _LateHint:
    """The hint of a request that may be named only after its first token was drafted for."""

    def __init__(self, source: HintSource | None, key: bytes) -> None:
        self._source, self._key = source, key
        self.tools: tuple[Tool, ...] = ()
        self._known: Known | None = None

    def found(self) -> bool:
        """Look for the request until it is known, and again if its wave has failed; tell whether it is."""
        if self._source is not None and (self._known is None or self._failed()):
            self._known = self._source.find(self._key) or self._known
            self.tools = self._known.tools if self._known is not None else ()
        return self._known is not None

    def _failed(self) -> bool:
        """Tell whether the wave ended early: perhaps that of an equal prompt before this one."""
        hint = self._known.poll() if self._known is not None else None
        return hint is not None and hint.failed

    def poll(self) -> Hint | None:
        """Return the hint as it stands."""
        return self._known.poll() if self.found() and self._known is not None else None

    def ask(self, tool: Tool, slot: str, written: str) -> None:
        """Ask for more where the target writes otherwise than the hint says."""
        if self._known is not None:
            self._known.ask(tool.name, slot, written)


@dataclass(eq=False)
class _Row:
    """One request."""

    tokens: Tokens
    """Its prompt and everything committed."""
    context: DecodeContext | None = None
    """None = it cannot be drafted for."""
    output: list[int] = field(default_factory=list)
    """What it has written, up to an end token."""
    proposers: list[Proposer] = field(default_factory=list)
    hint: _LateHint | None = None
    vain: int = 0
    """Rounds with drafts since a drafted token was accepted."""
    empty: int = 0
    """Rounds in which nothing was found to draft, since something was."""
    drafted: list[tuple[int, str]] = field(default_factory=list)
    offered: list[Draft] = field(default_factory=list)
    tried: bool = False
    """Whether drafts were made for the round."""
    paid: float = 0.0
    """Cost of verifying `drafted`, in plain steps; 0 while nothing was drafted for."""
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
        """When the last drafts were given, and how many tokens the step after them verifies."""
        self._cut = False
        """Whether the step ran fewer tokens than that: a grammar or a budget of the engine cut drafts, or rows left."""
        self._drafting_s, self._gain = 0.0, 1.0
        """Means over rounds with drafts: seconds that drafting took, and tokens that were accepted."""
        self.counts: Counter[str] = Counter()
        """requests, named (hints found by key), drafted, accepted_SOURCE, faults, .."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[Any], tokens: NDArray[Any], ran: int | None = None
    ) -> list[list[int]]:
        """Return the drafted tokens of every row; never raises.

        sampled: new tokens of each row, [] while its prompt is not finished. lengths: [R] tokens of each row, the new
        ones included. tokens: [R, L] the rows. ran: how many tokens the step before ran, where the engine says so.
        """
        before = self._active
        try:
            return self._propose(sampled, lengths, tokens, ran)
        except Exception:
            self._active, self._last = before, None
            self.fault("a step")
            return [[] for _ in sampled]

    def _propose(self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any, ran: int | None) -> list[list[int]]:
        start, before, self._active = time.perf_counter(), self._active, [None] * len(sampled)
        free = {id(row): row for row in before if row is not None}
        ran_before, steady = set(free), len(free) == len(before)
        self._cut = ran is not None and self._last is not None and ran < self._last[1]
        drafts, verified = list[list[int]](), 0
        for index, new in enumerate(sampled):
            row, draft = None, list[int]()
            if not new:
                steady = False
            else:
                whole = tokens[index, : int(lengths[index])]
                row = self._find(before[index] if index < len(before) else None, free, whole, len(new))
                steady = (
                    steady and row is not None and id(row) in ran_before and len(row.tokens) == len(whole) - len(new)
                )
                row, draft = self._advance(row, whole, len(new), len(sampled))
                self._active[index] = row
            drafts.append(draft)
            verified += 1 + len(draft) if row is None or not row.ended else 0
        self._park(free.values())
        if self._last is not None and steady:  # no prefill, first or again, whose tokens cost otherwise, and no pause
            self.cost.observe(len(sampled), self._last[1] if ran is None else ran, start - self._last[0])
        self._last = time.perf_counter(), verified
        return drafts

    def _advance(self, row: _Row | None, whole: Tokens, new: int, rows: int) -> tuple[_Row, list[int]]:
        """Take note of a row's new tokens and draft for it. One that cannot be drafted for stays known as such."""
        try:
            if row is None:
                row = self._begin(whole[: len(whole) - new])
            unseen = len(whole) - new - len(row.tokens)
            if unseen:
                self._commit(row, whole[len(row.tokens) : len(whole) - new].tolist(), drafted=False)
                row.drafted, row.offered, row.tried, row.paid = [], [], False, 0.0
            self._commit(row, whole[len(whole) - new :].tolist())
            return row, self._draft(row, rows)
        except Exception:
            self.fault("a row")
            return _Row(np.array(whole, dtype=np.int32)), []

    # ------------------------------------------------------------------ rows

    def _find(self, likely: _Row | None, free: dict[int, _Row], whole: Tokens, new: int) -> _Row | None:
        """Return the request that these tokens go on with; it is taken out of those that are free.

        Usually it ends where the new tokens begin. Where an engine asks for no drafts for some steps, rows go on
        unseen: then it may end earlier, but not before an end token, which another user's turn would come after.
        """
        known = len(whole) - new
        ends = self.situation.codec.eos_ids

        def fits(row: _Row, unseen: int = 0) -> bool:
            length = len(row.tokens)
            if not 0 <= known - length <= unseen or not np.array_equal(row.tokens, whole[:length]):
                return False
            return ends.isdisjoint(whole[length:known].tolist())

        found = likely if likely is not None and id(likely) in free and fits(likely) else None
        found = found or next((row for row in (*free.values(), *self._parked.values()) if fits(row)), None)
        if found is None:
            behind = [row for row in free.values() if not row.ended and fits(row, MAX_UNSEEN)]
            found = max(behind, key=lambda row: len(row.tokens), default=None)
        if found is not None:
            free.pop(id(found), None)
            if self._parked.pop(id(found), None) is not None:  # what was drafted before it left was never verified
                found.drafted, found.offered, found.tried, found.paid = [], [], False, 0.0
                found.learned = False
        return found

    def _begin(self, prompt: Tokens) -> _Row:
        """Start a request whose prompt is these tokens."""
        self._learn_from_parked()
        self.counts["requests"] += 1
        situation, ids = self.situation, prompt.tolist()
        text = situation.codec.decode(ids)
        hint = _LateHint(self._hints, prompt_key(prompt))
        tools = hint.tools if hint.found() else tools_in_prompt(text)
        call_format = situation.call_format
        if (hint.tools or not tools) and (prose := prose_tools(text)):
            tools, call_format = hint.tools or prose, detect_format(text)[0].name
        self.counts["named"] += hint.found()
        thinking = text.rstrip().endswith("<think>")
        reasons = situation.reasons and not thinking and not text.rstrip().endswith("</think>")
        row = _Row(np.array(prompt, dtype=np.int32), hint=hint)
        row.context = DecodeContext(
            situation.codec, ids, row.output, tools, f"{situation.name}/{call_format}", call_format, thinking, reasons
        )
        memory = self._memory or Memory()
        row.proposers = [
            CallProposer(memory.part(StyleBook), hint.poll, memory.part(ValueBook), hint.ask),
            Retrieval(memory.part(RetrievalMemory)),
        ]
        for proposer in row.proposers:
            proposer.begin(row.context)
        return row

    def _commit(self, row: _Row, new: Sequence[int], drafted: bool = True) -> None:
        """Take note of what the target wrote; tokens behind an end token are not its output."""
        row.tokens = np.concatenate([row.tokens, np.asarray(new, dtype=np.int32)])
        if row.ended or row.context is None:
            return
        ends = self.situation.codec.eos_ids
        size = next((depth + 1 for depth, token in enumerate(new) if token in ends), len(new))
        written, chain = tuple(new[:size]), row.drafted if drafted else []
        pairs = zip(chain, written, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        sources = (*(source for _, source in chain[:right]), *[BONUS] * (size - right))
        for source in sources[:right]:
            self.counts[f"accepted_{source}"] += 1
        row.vain = 0 if right else row.vain + bool(chain)
        if chain and row.tried:
            self._gain = SLOWLY * self._gain + (1 - SLOWLY) * right
        if drafted:
            self._calibrator.observe(row.offered, written)
            if row.paid and not self._cut:
                self._calibrator.observe_cost(len(written), row.paid)
        state = _state_of(row.context.prompt_ids) if row.rounds == 0 else None
        row.output.extend(written)
        commit = Commit(written, sources, row.rounds, len(chain), prompt_state=state)
        row.rounds += 1
        for proposer in row.proposers:
            proposer.observe(commit)
        if size < len(new) or written[-1] in ends:
            self._end(row)

    def _draft(self, row: _Row, rows: int) -> list[int]:
        """Choose the chain to verify next."""
        row.drafted, row.offered, row.tried, row.paid = [], [], False, 0.0
        room = min(self.max_tokens, self.max_length - len(row.tokens) - 1)
        if row.ended or row.context is None or room < 1:
            return []
        self.counts["rounds"] += 1
        cost = self.cost.of(rows)
        self._look_for_hint(row)
        promising = row.vain < VAIN_ROUNDS and row.empty < EMPTY_ROUNDS and self._pays(rows)
        if promising or row.rounds % VAIN_STRIDE == 0:
            start, row.tried = time.perf_counter(), True
            offered = [draft for proposer in row.proposers for draft in proposer.propose()]
            row.offered = [self._calibrator.calibrate(draft) for draft in offered]
            vocabulary = min(self.situation.codec.vocab_size, self.situation.vocabulary)
            row.drafted = best_chain(row.offered, room, cost, vocabulary, self._calibrator.rate)
            row.empty = 0 if row.drafted else row.empty + 1
            if row.drafted:
                self._drafting_s = SLOWLY * self._drafting_s + (1 - SLOWLY) * (time.perf_counter() - start)
        row.paid = cost(1 + len(row.drafted))
        self.counts["drafted"] += len(row.drafted)
        self.counts["rounds_without_draft"] += not row.drafted
        return [token for token, _ in row.drafted]

    def _pays(self, rows: int) -> bool:
        """Tell whether the steps that a row's drafts save take longer than to make them."""
        return not self.cost.known or self._gain * self.cost.share(rows) >= self._drafting_s

    def _look_for_hint(self, row: _Row) -> None:
        """See whether the request has been named by now; its tools are better than what its prompt seemed to show."""
        if row.hint is None or row.hint.tools or not row.hint.found() or row.context is None:
            return
        self.counts["named"] += 1
        if [tool.name for tool in row.context.tools] != [tool.name for tool in row.hint.tools]:
            row.context = replace(row.context, tools=row.hint.tools)
            calls = next(proposer for proposer in row.proposers if isinstance(proposer, CallProposer))
            calls.begin(row.context)
            calls.observe(Commit(tuple(row.output), (BONUS,) * len(row.output), 0, 0))

    def _end(self, row: _Row) -> None:
        """Finish a request; what it taught stays."""
        row.ended = True
        for proposer in row.proposers:
            if not (row.learned and isinstance(proposer, CallProposer)):
                proposer.end()

    def _park(self, rows: Iterable[_Row]) -> None:
        """Keep requests that left the batch without an end token: a limit, a stop text, or they may come back."""
        left = [row for row in rows if not row.ended and row.context is not None]
        self._parked.update((id(row), row) for row in left)
        while left and sum(len(row.tokens) for row in self._parked.values()) > MAX_PARKED_TOKENS:
            self._end(self._parked.popitem(last=False)[1])

    def _learn_from_parked(self) -> None:
        """Learn how calls are written from requests that left, before another one begins."""
        for row in self._parked.values():
            if not row.learned:
                row.learned = True
                next(proposer for proposer in row.proposers if isinstance(proposer, CallProposer)).end()

    def fault(self, where: str) -> None:
        """Count the exception that is being handled; the first one is logged."""
        self.counts["faults"] += 1
        if self.counts["faults"] == 1:
            logger.exception("a fault while drafting for %s; the engine goes on (others are only counted)", where)


def _state_of(prompt: Sequence[int]) -> NDArray[np.float32]:
    """Return a vector that is alike for alike prompts: hashed counts of the last tokens. [STATE_SIZE]"""
    last = (np.array(prompt[-STATE_TOKENS:], dtype=np.int64) * 2654435761 % 2**32) >> 22  # Fibonacci hashing
    return np.sqrt(np.bincount(last, minlength=STATE_SIZE)).astype(np.float32)
