"""Draft tool calls from the schema, and from the sidecar's hint as far as it has come.

Without a hint this is ToolSpec's schema drafting, driven by the committed text instead of a round counter. With one,
the same drafter knows the values: the hint bank of OoO-Spec (one view per call style, re-anchored every round).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ooospec.chat.answer import ThinkSplitter
from ooospec.chat.codec import TextCodec, TextStream
from ooospec.chat.drafter import END, Guess, Piece, continuations, is_writable
from ooospec.chat.formats.registry import format_named
from ooospec.chat.style import StyleBook, ValueBook
from ooospec.core import Commit, DecodeContext, Draft, Hint, SlotHint, Tool, common_prefix

MAX_DRAFTS = 16
MAX_HINT_DRAFTS = 9
MAX_DRAFT_TOKENS = 160
RANKS = 3
"""Styles from here on are calibrated together."""
INSIDE = 0.96
"""Chance that a piece goes on after its first token was right."""


class CallProposer:
    """Propose continuations of the call being written. `poll` returns the hint as it stands, without waiting."""

    name = "calls"
    wants_top = False

    def __init__(
        self,
        book: StyleBook,
        poll: Callable[[], Hint | None] | None = None,
        values: ValueBook | None = None,
        ask: Callable[[Tool, str, str], None] | None = None,
    ) -> None:
        """`values` = also guess inside values that nobody predicted: recall, copy, end. `ask(tool, slot, written)` asks
        for all slots ("") of a tool that the target has chosen against the hint, or for the rest of a value.
        """
        self.book, self._poll, self.values, self._ask = book, poll, values, ask

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        if not isinstance(context.codec, TextCodec):
            raise TypeError(f"CallProposer needs a TextCodec; got {type(context.codec).__name__}")
        self._context, self._codec = context, context.codec
        self._prompt = context.codec.decode(context.prompt_ids)
        call_format = format_named(context.call_format)
        self._defaults = call_format.styles(self._prompt)
        self._styles = self.book.ranked(context.style_key, self._defaults)
        self._scanner = call_format.scanner(context.tools)
        self._splitter = ThinkSplitter.of(call_format, context.thinking, context.reasons)
        self._stream: TextStream = context.codec.stream()
        self._committed = list(context.prompt_ids[-8:])

    def propose(self) -> list[Draft]:
        """Offer the hinted call in each style the committed text allows, then what the schema alone says."""
        if not self._context.tools or not self._splitter.answering:
            return []
        hint = self._hint()
        drafts: list[Draft] = []
        if hint is not None and (hint.function is not None or hint.slots):
            drafts += self._drafts("hint", self._eager(_hinted(hint, self._context.tools)), MAX_HINT_DRAFTS)
        uninformed = self._eager(_uninformed(self._context.tools))
        return drafts + self._drafts("schema", uninformed, MAX_DRAFTS - len(drafts))

    def _hint(self) -> Hint | None:
        """Return the hint as it stands; where the target writes what it does not say, more is asked for."""
        hint = self._poll() if self._poll is not None else None
        chosen = self._chosen() if self._ask is not None else None
        if hint is None or self._poll is None or self._ask is None or chosen is None or not chosen.slots:
            return hint
        if any((chosen.name, slot.name) in hint.slots for slot in chosen.slots):
            slot, written = self._astray(hint, chosen)
            if not slot:
                return hint
            self._ask(chosen, slot, written)
        else:
            self._ask(chosen, "", "")
        return self._poll()

    def _astray(self, hint: Hint, tool: Tool) -> tuple[str, str]:
        """Return the slot whose value the target has begun otherwise than the hint says, and how; else ("", "")."""
        call, text = self._scanner.open, self._scanner.text
        item = call.items[-1] if call is not None and call.items else None
        if item is None or item.value is None or item.value.end is not None:
            return "", ""
        name, written, style = item.key.of(text), item.value.of(text), self._styles[0][0]
        known = hint.slots.get((tool.name, name))
        if style.values != "json" or len(written) < 2 or written[0] not in '"[{' or tool.slot(name) is None:
            return "", ""
        right = known is not None and known.present and style.write(known.value).startswith(written)
        return ("", "") if right else (name, written)

    def _chosen(self) -> Tool | None:
        """Return the tool whose call is being written, once its name is."""
        call = self._scanner.open
        if call is None or call.name is None or call.name.end is None:
            return None
        name = self._scanner.name_of(call)
        return next((tool for tool in self._context.tools if tool.name == name), None)

    def _eager(self, guess: Guess) -> Guess:
        return (
            guess
            if self.values is None
            else replace(guess, recall=self.values.recall, recent=self.values.recent, source=self._prompt)
        )

    def _drafts(self, source: str, guess: Guess, count: int) -> list[Draft]:
        drafts: dict[tuple[int, ...], Draft] = {}
        fitting = list(self._fitting(guess))
        whole = sum(weight for _, weight in fitting)
        for rank, (views, weight) in enumerate(fitting):
            better = list(drafts)
            for pieces in views:
                if not rank and not self._scanner.text:
                    pieces = [_weighted(pieces[0], weight), *pieces[1:]]
                draft = self._tokenize(pieces, source)
                if rank:
                    draft = _apart(draft, better, weight / whole, rank)
                if draft.tokens:
                    drafts.setdefault(draft.tokens, draft)
                if len(drafts) >= count:
                    return list(drafts.values())
        return list(drafts.values())

    def _fitting(self, guess: Guess) -> Iterator[tuple[Iterable[list[Piece]], float]]:
        """Yield the continuations in every style that the committed text allows, with the style's chance."""
        for style, weight in self._styles:
            views = (pieces for pieces in continuations(self._scanner, style, guess) if pieces)
            if (first := next(views, None)) is not None:
                yield chain([first], views), weight

    def _tokenize(self, pieces: Sequence[Piece], source: str) -> Draft:
        """Turn pieces into tokens with the chance of each."""
        ids, starts = self._codec.continue_with(self._committed, "".join(piece.text for piece in pieces))
        bounds, position = [], 0
        for piece in pieces:
            bounds.append(position)
            position += len(piece.text)
        chances, kinds, at, kind = [], [], 0, ""
        for end in [*starts[1:], position]:
            first = at
            while at < len(bounds) and bounds[at] < end:
                at += 1
            opened = pieces[first:at]
            kind = "+".join(piece.kind for piece in opened) or f"in {kind.removeprefix('in ')}"
            chances.append(math.prod(piece.chance for piece in opened) if opened else INSIDE)
            kinds.append(f"{source} {kind}")
        if pieces and pieces[-1] is END:
            ids, chances, kinds = [*ids, self._codec.eos_id], [*chances, END.chance], [*kinds, f"{source} end"]
        size = min(len(ids), MAX_DRAFT_TOKENS)
        return Draft(tuple(ids[:size]), source, tuple(chances[:size]), tuple(kinds[:size]))

    def observe(self, commit: Commit) -> None:
        """Read on in the committed text."""
        self._committed = [*self._committed, *commit.tokens][-8:]
        text = self._stream.push(t for t in commit.tokens if t not in self._codec.eos_ids)
        self._scanner.feed(self._splitter.push(text)[1])

    def end(self) -> None:
        """Learn the style of the output for later requests."""
        self.book.learn(self._context.style_key, self._defaults, self._scanner)
        if self.values is not None:
            self.values.learn(self._scanner)


def _weighted(piece: Piece, weight: float) -> Piece:
    """Weigh the first piece of an answer by the chance of its style."""
    return Piece(piece.text, piece.chance * weight, f"{piece.kind} {int(5 * weight)}")


def _apart(draft: Draft, better: Sequence[tuple[int, ...]], share: float, rank: int) -> Draft:
    """Put the chance of a view's style on the first token in which it differs from the views of better styles."""
    at = max((common_prefix(draft.tokens, tokens) for tokens in better), default=0)
    if at >= len(draft.tokens):
        return draft
    chances, kinds = list(draft.probabilities), list(draft.kinds)
    chances[at], kinds[at] = chances[at] * share, f"{draft.source} style {min(rank, RANKS)}"
    return replace(draft, probabilities=tuple(chances), kinds=tuple(kinds))


def _uninformed(tools: Sequence[Tool]) -> Guess:
    share = 1 / len(tools)
    return Guess([(tool, share) for tool in tools], lambda tool, slot: None)


def _hinted(hint: Hint, tools: Sequence[Tool]) -> Guess:
    """Rank the tools as the hint does; tools it does not name keep a small chance, so that their slots can serve."""
    chances = {tool.name: 0.01 for tool in tools}
    if hint.function is not None:
        chances |= dict(zip(hint.function.names, hint.function.confidences, strict=False))
    elif len(tools) == 1:
        chances[tools[0].name] = 0.95
    ranked = sorted(tools, key=lambda tool: -chances[tool.name])

    def values(tool: str, slot: str) -> SlotHint | None:
        found = hint.slots.get((tool, slot))
        return found if found is None or not found.present or is_writable(found.value) else None

    return Guess([(tool, chances[tool.name]) for tool in ranked], values)
