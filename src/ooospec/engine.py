"""The decode loop: propose -> candidate tree -> verify -> commit. One loop for all methods."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ooospec.calibration import Calibrator
from ooospec.core import BONUS, Commit, DecodeContext, Draft, Proposer, TopTokens
from ooospec.errors import ContextLengthError, RequestStopped
from ooospec.planner import Budget, Planner
from ooospec.stopping import Limits
from ooospec.target.model import TargetModel
from ooospec.verify import Chooser, accept, top_indices

logger = logging.getLogger("ooospec.engine")
TOP_SUCCESSORS = 8


def decode(
    target: TargetModel,
    context: DecodeContext,
    output: list[int],
    proposers: Sequence[Proposer],
    chooser: Chooser,
    limits: Limits,
    budget: Budget,
    *,
    calibrator: Calibrator | None = None,
    next_chunk: Callable[[int], int] = lambda left: 512 if left > 512 else 0,
    salt: str = "",
    clock: float | None = None,
    faults: Counter[str] | None = None,
) -> Iterator[Commit]:
    """Decode one request, a commit a round. `output` is `context.output_ids`, which this loop alone appends to.

    The first round's tree hangs on the last prompt token and shares its forward pass with the last chunk of the
    prompt, so a hint that is there by then saves even that token. `next_chunk` is asked how many of the tokens left to
    prefill at once; 0 = the rest goes with the tree. `clock` is `time.perf_counter()` at arrival.
    A proposer that raises is left out for the rest of the request, and counted in `faults`.
    Raises ContextLengthError when the prompt leaves no room for an answer.
    """
    clock = time.perf_counter() if clock is None else clock
    limits = _fit(limits, len(context.prompt_ids), target.context_length)
    lead = list(context.prompt_ids[target.begin(context.prompt_ids, salt) : -1])
    root, number, finish = context.prompt_ids[-1], 0, None
    wants_top, wants_prompt_top = (
        any(getattr(proposer, wish, False) for proposer in proposers) for wish in ("wants_top", "wants_prompt_top")
    )
    planner = Planner(budget, calibrator, target.vocabulary)
    sources = _Sources(proposers, faults if faults is not None else Counter())
    sources.tell(lambda proposer: proposer.begin(context))
    try:
        read = []
        while chunk := next_chunk(len(lead)):
            rows = target.prefill(lead[:chunk], all_rows=wants_prompt_top)
            read += [_top(lead[:chunk], rows)] if wants_prompt_top else []
            lead = lead[chunk:]
        while finish is None:
            start = time.perf_counter()
            room = limits.max_new_tokens - len(output) - 1
            offered = (_clipped(draft, chooser) for draft in sources.propose())
            drafts = [draft for draft in offered if draft.tokens]
            tree = planner.plan(root, drafts, room, len(lead))
            proposed = time.perf_counter()
            rows = target.verify(tree, lead, all_rows=wants_prompt_top and number == 0)
            logits = rows[-len(tree) :]
            accepted = accept(tree, logits, chooser)
            target.commit(tree, accepted.path)
            verified = time.perf_counter()

            new = [tree.tokens[node] for node in accepted.path[1:]] + [accepted.bonus]
            kept, finish = limits.cut(context.codec, output, new)
            output += new[:kept]
            if wants_prompt_top and number == 0:
                read.append(_top(lead, rows[: len(lead)]))
            commit = Commit(
                tokens=tuple(new[:kept]),
                sources=(*(tree.sources[node] for node in accepted.path[1:]), BONUS)[:kept],
                round=number,
                drafted=len(tree) - 1,
                propose_ms=(proposed - start) * 1e3,
                verify_ms=(verified - proposed) * 1e3,
                lead_tokens=len(lead),
                start_ms=(start - clock) * 1e3,
                top=_top(tree.tokens, logits) if wants_top else None,
                prompt_top=_joined(read) if wants_prompt_top and number == 0 else None,
                prompt_state=target.last_hidden[0].astype(np.float32) if number == 0 else None,
                finish_reason=finish,
                chances=tuple(chooser.chances[:kept]),
            )
            sources.observe(commit)
            planner.observe(commit.tokens)
            yield commit
            root, lead, number = accepted.bonus, [], number + 1
    finally:
        sources.tell(lambda proposer: proposer.end())
        target.end([*context.prompt_ids, *output])


class _Sources:
    """The proposers of a request. What fails in one of them costs speed, never the answer."""

    def __init__(self, proposers: Sequence[Proposer], faults: Counter[str]) -> None:
        self._proposers, self._faults = list(proposers), faults

    def tell(self, what: Callable[[Proposer], None]) -> None:
        """Call every proposer."""
        for proposer in tuple(self._proposers):
            try:
                what(proposer)
            except Exception:
                self._leave_out(proposer)

    def propose(self) -> list[Draft]:
        """Collect the drafts of all proposers."""
        drafts = list[Draft]()
        for proposer in tuple(self._proposers):
            try:
                drafts += proposer.propose()
            except RequestStopped:  # while it waited for the sidecar
                raise
            except Exception:
                self._leave_out(proposer)
        return drafts

    def observe(self, commit: Commit) -> None:
        """Tell every proposer what was committed."""
        self.tell(lambda proposer: proposer.observe(commit))

    def _leave_out(self, proposer: Proposer) -> None:
        self._proposers.remove(proposer)
        name = f"proposer {proposer.name}"
        self._faults[name] += 1
        if self._faults[name] == 1:
            logger.exception("%s failed and is left out for the rest of its request; the answer goes on.", name)


def _top(tokens: Sequence[int], logits: Tensor) -> TopTokens:
    return TopTokens(tokens, top_indices(logits, TOP_SUCCESSORS).cpu().numpy())


def _clipped(draft: Draft, chooser: Chooser) -> Draft:
    """Cut a draft where the chooser would not follow it anyway."""
    size = chooser.allowed_length(draft.tokens)
    if size == len(draft.tokens):
        return draft
    return Draft(draft.tokens[:size], draft.source, draft.probabilities[:size], draft.kinds[:size])


def _joined(parts: Sequence[TopTokens]) -> TopTokens:
    tokens = [token for part in parts for token in part.tokens]
    return TopTokens(tokens, np.concatenate([part.successors for part in parts]))


def _fit(limits: Limits, prompt: int, context: int) -> Limits:
    """Clip the token limit to what the context leaves."""
    if prompt < 1 or prompt >= context:
        raise ContextLengthError(
            f"The prompt has {prompt} tokens; this target takes 1 to {context - 1}. "
            "Shorten the messages or tools, or choose a target with a longer context."
        )
    return replace(limits, max_new_tokens=max(1, min(limits.max_new_tokens, context - prompt)))
