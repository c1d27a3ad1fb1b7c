"""What each part of the method buys: methods with one part taken away, for `ooospec bench --plugin`.

ooospec bench --plugin benchmarks/ablations.py --placement split --limit 8 --data DATA --out results/ablations \
    --methods ar,toolspec,ooo,joined,serial,dropped,one-view,no-asking,no-guesses
ooospec bench --placement split --limit 8 --data DATA --methods ar,ooo --adapter none --out results/zero-shot
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from ooospec.chat.style import StyleBook, ValueBook
from ooospec.core import Commit, DecodeContext, Draft, Hint, Proposer
from ooospec.methods import METHODS, Method, Poll, Setup, register
from ooospec.proposers.calls import CallProposer

STEP_S = 0.04
"""Time of a sidecar's step on one core, int8 (docs/performance.md), for an answer written token by token."""
CHARACTERS = 3.5
"""Characters of a call that a token of the sidecar's holds."""


def _whole(poll: Poll) -> Poll:
    """Show nothing before everything is there."""

    def joined() -> Hint | None:
        hint = poll()
        return hint if hint is not None and (hint.complete or hint.failed) else None

    return joined


def _serial(poll: Poll) -> Poll:
    """Show the call when a sidecar that writes it token by token, from the function's arrival on, would have it."""
    seen: list[float] = []

    def later() -> Hint | None:
        hint = poll()
        if hint is None or hint.function is None:
            return None
        seen.append(time.perf_counter())
        name = hint.function.names[0] if hint.function.names else ""
        arguments = {slot.slot: slot.value for slot in hint.slots.values() if slot.tool == name and slot.present}
        size = len(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)) / CHARACTERS
        return hint if hint.complete and seen[-1] - seen[0] >= STEP_S * size else None

    return later


class Dropping(CallProposer):
    """Forgets the hint at the first token that the target writes otherwise, instead of finding its place again."""

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        super().begin(context)
        self._offered: list[tuple[int, ...]] = []

    def propose(self) -> list[Draft]:
        """Offer drafts as before, and note those of the hint."""
        drafts = super().propose()
        self._offered = [draft.tokens for draft in drafts if draft.source == "hint"]
        return drafts

    def observe(self, commit: Commit) -> None:
        """Compare what was committed with what the hint said."""
        super().observe(commit)
        new = commit.tokens
        if self._offered and not any(tokens[: len(new)] == new[: len(tokens)] for tokens in self._offered):
            self._poll = None


class OneView(CallProposer):
    """Writes calls in the likeliest style alone."""

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        super().begin(context)
        self._styles = self._styles[:1]


def _with(calls: Callable[[Setup], CallProposer]) -> Callable[[Setup], list[Proposer]]:
    return lambda setup: [calls(setup), *METHODS["ooo"].build(setup)[1:]]


def _calls(kind: type[CallProposer]) -> Callable[[Setup], CallProposer]:
    return lambda s: kind(s.memory.part(StyleBook), s.poll, s.memory.part(ValueBook), s.ask)


def _waiting(wait: Callable[[Poll], Poll]) -> Callable[[Setup], list[Proposer]]:
    return lambda s: METHODS["ooo"].build(replace(s, poll=wait(s.poll) if s.poll is not None else None))


for _method in (
    Method("joined", "no answer is used before all are there", _waiting(_whole), hints=True),
    Method("serial", "one answer, token by token", _waiting(_serial), hints=True),
    Method("dropped", "no re-anchoring", _with(_calls(Dropping)), hints=True),
    Method("one-view", "one style of call", _with(_calls(OneView)), hints=True),
    Method("no-asking", "the sidecar is asked once", lambda s: METHODS["ooo"].build(replace(s, ask=None)), hints=True),
    Method(
        "no-guesses", "no guesses inside values",
        _with(lambda s: CallProposer(s.memory.part(StyleBook), s.poll, None, s.ask)), hints=True,
    ),
):  # fmt: skip
    register(_method)
