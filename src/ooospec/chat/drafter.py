"""Write on from any point of a call: the text that follows the committed text if the style and the values hold.

Drafting follows the committed text through the scanner, so it re-anchors by itself: after a wrong value it goes on at
the next key, after another tool name with that tool's slots, after one call with the closing or the next call.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ooospec.chat.scanner import CallSpans, Item, Scanner
from ooospec.chat.style import CallStyle
from ooospec.chat.values import copied, ending, realigned
from ooospec.core import Slot, SlotHint, Tool

STRUCTURE = 0.97
"""Chance that literal text goes on as the style says, once it has begun."""
NEXT_KEY, CLOSE, SKIPPED = 0.85, 0.85, 0.15
MAX_VALUE_CHARACTERS = 4000
FREE_KEY = 0.6
"""Chance that an argument whose value nobody has predicted comes next."""
RECALLED, RECENT, ENDING, EMPTY, REALIGNED, COPIED, RETYPED = 0.4, 0.3, 0.35, 0.08, 0.4, 0.4, 0.5
"""Chances of guesses about a value that was not predicted, or predicted wrongly."""
NULL = 0.5
"""Chance of null in a slot that may hold it and of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of draft text; `chance` that its first token is right, given that all before it is."""

    text: str
    chance: float = STRUCTURE
    kind: str = "structure"
    """What kind of guess the chance is about; kinds are calibrated apart."""


Values = Callable[[str, str], SlotHint | None]
"""The predicted value of (tool, slot), if any."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What is predicted about the call: tools with chances (best first) and slot values."""

    tools: Sequence[tuple[Tool, float]]
    values: Values
    recall: Callable[[str, str], Sequence[str]] = lambda tool, slot: ()
    """Values, as JSON text, that this target gave (tool, slot) before."""
    recent: Callable[[str], Sequence[str]] = lambda partial: ()
    """Values, as JSON text, that any slot had before and that begin with some text."""
    source: str | None = None
    """Text that unpredicted values may be copied from; None = do not guess inside them."""

    def named(self, name: str) -> Tool | None:
        """Find a tool by name."""
        return next((tool for tool, _ in self.tools if tool.name == name), None)

    def closest(self, name: str, keys: Sequence[str] = ()) -> Tool | None:
        """Find the tool that a name nobody has was probably meant to be: one that has the keys, then by likeness."""
        wanted = _plain(name.removeprefix("Name:"))

        def likeness(tool: Tool) -> tuple[int, float]:
            known = sum(tool.slot(key) is not None for key in keys)
            return known, _alike(wanted, tool.name)

        return max((tool for tool, _ in self.tools), key=likeness, default=None)


@lru_cache(4096)
def _alike(wanted: str, name: str) -> float:
    return difflib.SequenceMatcher(None, wanted, _plain(name)).ratio()


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def continuations(scanner: Scanner, style: CallStyle, guess: Guess) -> Iterator[list[Piece]]:
    """Yield texts that may follow the committed text in this style, each as pieces; END closes a whole answer."""
    text, call = scanner.text, scanner.open
    if call is None:
        yield from _outside(scanner, style, guess)
    elif call.name is None:
        for tool, chance in guess.tools:
            call_pieces = [Piece(style.head), *_named(style, guess, tool, tool.name, chance)]
            yield from _after(text[call.start :], call_pieces)
    elif call.name.end is None:
        partial = text[call.name.start :]
        fitting = [(tool, chance) for tool, chance in guess.tools if tool.name.startswith(partial)]
        for tool, chance in fitting:
            yield _named(style, guess, tool, tool.name[len(partial) :], chance)
        if not fitting and guess.source is not None and (meant := guess.closest(partial)) is not None:
            first, *rest = _arguments(style, guess, meant)
            yield [Piece(first.text, ENDING, "unknown name"), *rest]
    else:
        name = call.name.of(text)
        keys = [item.key.of(text) for item in call.items]
        chosen = guess.named(name) or (guess.closest(name, keys) if guess.source is not None else None)
        if chosen is not None:
            yield from _inside(text, call, style, guess, chosen)


END = Piece("", 0.9, "end")
"""Stands for the end of the output."""


def _after(done: str, pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield what is left of `pieces` after `done`, if their text begins with it."""
    for index, piece in enumerate(pieces):
        if len(done) < len(piece.text):
            if piece.text.startswith(done):
                rest = replace(piece, text=piece.text[len(done) :]) if done else piece
                yield [rest, *pieces[index + 1 :]]
            return
        if not done.startswith(piece.text):
            return
        done = done[len(piece.text) :]


def _outside(scanner: Scanner, style: CallStyle, guess: Guess) -> Iterator[list[Piece]]:
    text = scanner.text

    def call(tool: Tool, chance: float) -> list[Piece]:
        return [Piece(style.head), *_named(style, guess, tool, tool.name, chance)]

    if scanner.calls:
        done = text[scanner.calls[-1].end :]
        yield from _after(done, [Piece(style.closing, CLOSE, "close"), END])
        if style.between.startswith(done) or done.startswith(style.between):
            for tool, chance in guess.tools:
                yield from _after(done, [Piece(style.between, SKIPPED, "another call"), *call(tool, chance)])
        return
    fixed = style.opening + style.head
    tails = list(_tails(text, len(fixed) + max((len(tool.name) for tool, _ in guess.tools), default=0)))
    late = not text or text.endswith("\n\n")
    tails = [tail for tail in tails if fixed.startswith(tail) or tail.startswith(fixed)]
    for tool, chance in guess.tools if tails or late else ():
        tail = next((tail for tail in tails if (fixed + tool.name).startswith(tail)), "" if late else None)
        if tail is not None:
            begun = tail or not text
            opening = [Piece(style.opening, *((STRUCTURE, "opening") if begun else (SKIPPED, "late opening")))]
            yield from _after(tail, [*opening, *call(tool, chance)])


def _tails(text: str, longest: int) -> Iterator[str]:
    """Yield the ends of the text, at most so long, at whose beginning a call may open: of the text or of a line."""
    if 0 < len(text) <= longest:
        yield text
    at = text.find("\n", max(0, len(text) - longest - 1))
    while 0 <= at < len(text) - 1:
        yield text[at + 1 :]
        at = text.find("\n", at + 1)


def _overlap_of(text: str, literal: str) -> int:
    """Return how many characters at the end of the text begin the literal."""
    return max((size for size in range(1, len(literal) + 1) if text.endswith(literal[:size])), default=0)


def _named(style: CallStyle, guess: Guess, tool: Tool, rest_of_name: str, chance: float) -> list[Piece]:
    """Write the rest of the name and all that follows."""
    pieces = [Piece(rest_of_name, chance, f"name {int(5 * chance)}")] if rest_of_name else []
    return [*pieces, *_arguments(style, guess, tool)]


def _arguments(style: CallStyle, guess: Guess, tool: Tool) -> list[Piece]:
    items = _items(style, guess, tool, tool.slots)
    if items is None:
        return [Piece(style.empty), *_closing(style)]
    return [Piece(style.middle), *items]


def _closing(style: CallStyle) -> list[Piece]:
    return [Piece(style.closing, CLOSE, "close"), END]


def _items(style: CallStyle, guess: Guess, tool: Tool, slots: Sequence[Slot]) -> list[Piece] | None:
    """Write keys and values up to the first value that is not known; None if no argument is left to write."""
    pieces: list[Piece] = []
    for slot in slots:
        hint = guess.values(tool.name, slot.name)
        if hint is not None and not hint.present and not _must_be_null(slot):
            continue
        if pieces:
            pieces.append(Piece(style.comma, NEXT_KEY, "next key"))
        if hint is None:
            pieces.append(Piece(slot.name) if slot.required else Piece(slot.name, FREE_KEY, "free key"))
            recalled = guess.recall(tool.name, slot.name)
            if not recalled:
                return [*pieces, Piece(style.colon + _value_opening(style, slot))]
            pieces += [Piece(style.colon), Piece(recalled[0], RECALLED, "recalled")]
        else:
            pieces += [Piece(slot.name, STRUCTURE, "key"), Piece(style.colon), _value(style, hint)]
    if not pieces:
        return None
    return [*pieces, Piece(style.tail, CLOSE, "tail"), *_closing(style)]


def _must_be_null(slot: Slot) -> bool:
    """Tell whether a slot that gets no value has to be written all the same, as null (strict schemas)."""
    return slot.required and "null" in slot.types


def _value(style: CallStyle, hint: SlotHint) -> Piece:
    return Piece(style.write(hint.value), hint.confidence, f"value {int(5 * hint.confidence)}")


def _value_opening(style: CallStyle, slot: Slot) -> str:
    """Return the characters that every value of the slot's type begins with."""
    if slot.choices:
        texts = [style.write(choice) for choice in slot.choices]
        shared = min(texts)
        while not all(text.startswith(shared) for text in texts):
            shared = shared[:-1]
        return shared
    openings = {"string": "" if style.values == "raw" else '"', "array": "[", "object": "{"}
    return openings.get("|".join(slot.types), "")


def _inside(text: str, call: CallSpans, style: CallStyle, guess: Guess, tool: Tool) -> Iterator[list[Piece]]:
    """Go on after the name of a call."""
    assert call.name is not None and call.name.end is not None
    if call.arguments is not None and call.items:
        yield from _in_arguments(text, call, style, guess, tool)
        return
    done = text[call.name.end :]
    items = _items(style, guess, tool, tool.slots)
    if items is not None:
        yield from _after(done, [Piece(style.middle), *items])
    if items is None or not any(slot.required for slot in tool.slots):
        chance, kind = (STRUCTURE, "structure") if items is None else (SKIPPED, "empty call")
        yield from _after(done, [Piece(style.empty, chance, kind), *_closing(style)])


def _in_arguments(text: str, call: CallSpans, style: CallStyle, guess: Guess, tool: Tool) -> Iterator[list[Piece]]:
    item = call.items[-1]
    seen = {i.key.of(text) for i in call.items[:-1]}
    if item.key.end is None:
        partial = text[item.key.start :]
        for other in tool.slots:
            if other.name not in seen:
                yield from _after(partial, [Piece(other.name), *_from_slot(style, guess, tool, other)])
        if guess.source is not None and partial and tool.slot(partial) is None:
            unknown = _from_slot(style, guess, tool, Slot(partial, (), False))
            yield [Piece(unknown[0].text, ENDING, "unknown key"), *unknown[1:]]
        return
    slot = tool.slot(item.key.of(text))
    if slot is None and guess.source is not None:
        slot = Slot(item.key.of(text), (), False)
    if item.value is None:
        if slot is not None:
            yield from _after(text[item.key.end :], _from_slot(style, guess, tool, slot))
    elif item.value.end is None:
        if slot is not None:
            yield from _in_value(text[item.value.start :], style, guess, tool, slot)
    else:
        yield from _after_value(text, call, item, style, guess, tool)


def _from_slot(style: CallStyle, guess: Guess, tool: Tool, slot: Slot) -> list[Piece]:
    """Write from the colon after a key the target has chosen, whatever was predicted about leaving it out."""
    hint = guess.values(tool.name, slot.name)
    colon, rest = Piece(style.colon), _rest(style, guess, tool, slot.name)
    if hint is not None and (hint.present or _must_be_null(slot)):
        return [colon, _value(style, hint), *rest]
    recalled = guess.recall(tool.name, slot.name)
    if recalled:
        return [colon, Piece(recalled[0], RECALLED, "recalled"), *rest]
    if "null" in slot.types:
        return [colon, Piece(style.write(None), NULL, "null"), *rest]
    opening = _value_opening(style, slot)
    return [colon, Piece(opening)] if opening else [colon]


def _rest(style: CallStyle, guess: Guess, tool: Tool, after: str) -> list[Piece]:
    """Write what follows the value of slot `after`."""
    names = [slot.name for slot in tool.slots]
    following = tool.slots[names.index(after) + 1 :] if after in names else tool.slots
    items = _items(style, guess, tool, following)
    if items is None:
        return [Piece(style.tail, CLOSE, "tail"), *_closing(style)]
    return [Piece(style.comma, NEXT_KEY, "next key"), *items]


def _in_value(partial: str, style: CallStyle, guess: Guess, tool: Tool, slot: Slot) -> Iterator[list[Piece]]:
    """Go on inside a value: with the predicted one or a choice of the schema that begins like it."""
    hint = guess.values(tool.name, slot.name)
    rest = _rest(style, guess, tool, slot.name)
    for value, chance, kind in _candidates(partial, style, guess, tool, slot, hint):
        yield from _after(partial, [Piece(value, chance, kind), *rest])
    if style.values == "raw" and (begun := _overlap_of(partial, rest[0].text)):
        yield from _after(partial[-begun:], rest)
    if guess.source is None:
        return
    if hint is not None and hint.present and (tail := realigned(partial, style.write(hint.value))):
        yield [Piece(tail, REALIGNED, "realigned"), *rest]
    end = ending(partial) if style.values != "raw" else ("" if partial else None)
    if end is not None:
        empty = partial in ('"', "{", "[")
        kind = "empty value" if empty else f"ending {slot.types[:1]}"
        chance = EMPTY if empty else ENDING
        if end:
            yield [Piece(end, chance, kind), *rest]
        else:
            yield [Piece(rest[0].text, chance * rest[0].chance, kind), *rest[1:]]
    if copy := copied(partial, guess.source):
        yield [Piece(copy, COPIED, "copied")]


def _candidates(
    partial: str, style: CallStyle, guess: Guess, tool: Tool, slot: Slot, hint: SlotHint | None
) -> Iterator[tuple[str, float, str]]:
    """Yield whole values as the style writes them, with chance and kind."""
    if hint is not None and hint.present:
        yield style.write(hint.value), 0.9, "value begun"
        if guess.source is not None and style.values == "json":
            for text in _retyped(hint.value):
                yield text, RETYPED, "retyped"
    if "null" in slot.types:
        yield style.write(None), NULL, "null begun"
    for choice in slot.choices:
        yield style.write(choice), 1 / len(slot.choices), "choice"
    for text in guess.recall(tool.name, slot.name):
        yield text, RECALLED, "recalled begun"
    for text in guess.recent(partial):
        yield text, RECENT, "recent begun"


def _retyped(value: Any) -> list[str]:
    """Write a value as the type the schema does not say: a number in quotes, or a quoted number bare."""
    if isinstance(value, bool) or value is None:
        return [json.dumps(str(value))]
    if isinstance(value, int | float | list | dict):
        return [json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)]
    text = value.strip()
    return [text] if text and text.removeprefix("-").replace(".", "", 1).isdigit() else []


def _after_value(
    text: str, call: CallSpans, item: Item, style: CallStyle, guess: Guess, tool: Tool
) -> Iterator[list[Piece]]:
    assert item.value is not None and item.value.end is not None
    done = text[item.value.end :]
    key, seen = item.key.of(text), {i.key.of(text) for i in call.items}
    slots = [slot for slot in tool.slots if slot.name not in seen or slot.name == key]
    known = replace(tool, slots=tuple(slots))
    rest = _rest(style, guess, known, key)
    yield from _after(done, rest)
    if rest[0].text != style.tail:
        yield from _after(done, [Piece(style.tail, SKIPPED, "early tail"), *_closing(style)])
    else:  # the prediction ends the call here: the target may still fill an argument that was to be left out
        for slot in slots:
            if slot.name != key:
                extra = [Piece(style.comma, SKIPPED, "extra key"), Piece(slot.name), Piece(style.colon)]
                yield from _after(done, extra)


def is_writable(value: Any) -> bool:
    """Tell whether a value can be written as JSON and is short enough to be worth a draft."""
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False)) <= MAX_VALUE_CHARACTERS
    except (TypeError, ValueError, RecursionError):
        return False
