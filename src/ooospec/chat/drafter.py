"""Write on from any point of a call: the text that follows the committed text if the style and the values hold.

Drafting follows the committed text through the scanner, so it re-anchors by itself: after a wrong value it goes on at
the next key, after another tool name with that tool's slots, after one call with the closing or the next call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ooospec.chat.scanner import CallScanner, CallSpans, Item
from ooospec.chat.style import CallStyle
from ooospec.core import Slot, SlotHint, Tool

STRUCTURE = 0.97
"""Chance that literal text goes on as the style says, once it has begun."""
NEXT_KEY, CLOSE, SKIPPED = 0.85, 0.85, 0.15
MAX_VALUE_CHARACTERS = 4000
FREE_KEY = 0.6
"""Chance that an argument whose value nobody has predicted comes next."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of draft text; `chance` that its first token is right, given that all before it is."""

    text: str
    chance: float = STRUCTURE


Values = Callable[[str, str], SlotHint | None]
"""The predicted value of (tool, slot), if any."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What is predicted about the call: tools with chances (best first) and slot values."""

    tools: Sequence[tuple[Tool, float]]
    values: Values

    def named(self, name: str) -> Tool | None:
        """Find a tool by name."""
        return next((tool for tool, _ in self.tools if tool.name == name), None)


def continuations(scanner: CallScanner, style: CallStyle, guess: Guess) -> Iterator[list[Piece]]:
    """Yield texts that may follow the committed text in this style, each as pieces; END closes a whole answer."""
    text, call = scanner.text, scanner.open
    if call is None:
        yield from _outside(scanner, style, guess)
    elif call.name is None:
        for tool, chance in guess.tools:
            yield from _after(text[call.start :], style.head, _named(style, guess, tool, tool.name, chance))
    elif call.name.end is None:
        partial = text[call.name.start :]
        for tool, chance in guess.tools:
            if tool.name.startswith(partial):
                yield _named(style, guess, tool, tool.name[len(partial) :], chance)
    elif (chosen := guess.named(call.name.of(text))) is not None:
        yield from _inside(text, call, style, guess, chosen)


END = Piece("", 0.9)
"""Stands for the end of the output."""


def _after(done: str, literal: str, then: list[Piece], chance: float = STRUCTURE) -> Iterator[list[Piece]]:
    """Yield the rest of `literal` and `then`, if `done` is a beginning of the literal."""
    if literal.startswith(done):
        rest = literal[len(done) :]
        yield [Piece(rest, chance), *then] if rest else then


def _outside(scanner: CallScanner, style: CallStyle, guess: Guess) -> Iterator[list[Piece]]:
    text = scanner.text
    heads = [[Piece(style.head), *_named(style, guess, tool, tool.name, chance)] for tool, chance in guess.tools]
    if scanner.calls:
        done = text[scanner.calls[-1].end :]
        yield from _after(done, style.closing, [END], CLOSE)
        for head in heads:
            yield from _after(done, style.between, head, SKIPPED)
        return
    overlap = _overlap(text, style.opening)
    if overlap is None:
        return
    for head in heads:
        yield from _after(style.opening[:overlap], style.opening, head, STRUCTURE if overlap or not text else SKIPPED)


def _overlap(text: str, opening: str) -> int | None:
    """Find how much of the opening stands at the end of the text; None where an opening makes no sense."""
    for size in range(min(len(text), len(opening)), 0, -1):
        if opening.startswith(text[-size:]) and (size == len(text) or text[-size - 1] == "\n"):
            return size
    return 0 if not text or text.endswith("\n\n") else None


def _named(style: CallStyle, guess: Guess, tool: Tool, rest_of_name: str, chance: float) -> list[Piece]:
    """Write the rest of the name and all that follows."""
    pieces = [Piece(rest_of_name, chance)] if rest_of_name else []
    return [*pieces, *_arguments(style, guess, tool)]


def _arguments(style: CallStyle, guess: Guess, tool: Tool) -> list[Piece]:
    items = _items(style, guess, tool, tool.slots)
    if items is None:
        return [Piece(style.empty), Piece(style.closing, CLOSE), END]
    return [Piece(style.middle), *items]


def _items(style: CallStyle, guess: Guess, tool: Tool, slots: Sequence[Slot]) -> list[Piece] | None:
    """Write keys and values up to the first value that is not known; None if no argument is left to write."""
    pieces: list[Piece] = []
    for slot in slots:
        hint = guess.values(tool.name, slot.name)
        if hint is not None and not hint.present:
            continue
        if pieces:
            pieces.append(Piece(style.comma, NEXT_KEY))
        if hint is None:
            known = 1.0 if slot.required else FREE_KEY
            return [*pieces, Piece(slot.name, known), Piece(style.colon + _value_opening(slot))]
        pieces += [Piece(slot.name), Piece(style.colon), Piece(to_json(hint.value), hint.confidence)]
    if not pieces:
        return None
    return [*pieces, Piece(style.tail, CLOSE), Piece(style.closing, CLOSE), END]


def _value_opening(slot: Slot) -> str:
    """Return the characters that every value of the slot's type begins with."""
    if slot.choices:
        texts = [to_json(choice) for choice in slot.choices]
        shared = min(texts)
        while not all(text.startswith(shared) for text in texts):
            shared = shared[:-1]
        return shared
    return {"string": '"', "array": "[", "object": "{"}.get("|".join(slot.types), "")


def _inside(text: str, call: CallSpans, style: CallStyle, guess: Guess, tool: Tool) -> Iterator[list[Piece]]:
    """Go on after the name of a call."""
    assert call.name is not None and call.name.end is not None
    if call.arguments is not None and call.items:
        yield from _in_arguments(text, call, style, guess, tool)
        return
    done = text[call.name.end :]
    items = _items(style, guess, tool, tool.slots)
    if items is not None:
        yield from _after(done, style.middle, items)
    if items is None or not any(slot.required for slot in tool.slots):
        chance = STRUCTURE if items is None else SKIPPED
        yield from _after(done, style.empty, [Piece(style.closing, CLOSE), END], chance)


def _in_arguments(text: str, call: CallSpans, style: CallStyle, guess: Guess, tool: Tool) -> Iterator[list[Piece]]:
    item = call.items[-1]
    seen = {i.key.of(text) for i in call.items[:-1]}
    if item.key.end is None:
        partial = text[item.key.start :]
        for other in tool.slots:
            if other.name not in seen and other.name.startswith(partial):
                rest = _from_slot(style, guess, tool, other)
                yield [Piece(other.name[len(partial) :]), *rest] if other.name != partial else rest
        return
    slot = tool.slot(item.key.of(text))
    if item.value is None:
        if slot is not None:
            done = text[item.key.end :]
            pieces = _from_slot(replace(style, colon=""), guess, tool, slot)
            yield from _after(done, style.colon, pieces)
    elif item.value.end is None:
        if slot is not None:
            yield from _in_value(text[item.value.start :], style, guess, tool, slot)
    else:
        yield from _after_value(text, call, item, style, guess, tool)


def _from_slot(style: CallStyle, guess: Guess, tool: Tool, slot: Slot) -> list[Piece]:
    """Write from the colon after a key the target has chosen, whatever was predicted about leaving it out."""
    hint = guess.values(tool.name, slot.name)
    colon = [Piece(style.colon)] if style.colon else []
    if hint is None or not hint.present:
        opening = _value_opening(slot)
        return [*colon, Piece(opening)] if opening else colon
    value = Piece(to_json(hint.value), hint.confidence)
    return [*colon, value, *_rest(style, guess, tool, slot.name)]


def _rest(style: CallStyle, guess: Guess, tool: Tool, after: str) -> list[Piece]:
    """Write what follows the value of slot `after`."""
    names = [slot.name for slot in tool.slots]
    following = tool.slots[names.index(after) + 1 :] if after in names else ()
    items = _items(style, guess, tool, following)
    if items is None:
        return [Piece(style.tail, CLOSE), Piece(style.closing, CLOSE), END]
    return [Piece(style.comma, NEXT_KEY), *items]


def _in_value(partial: str, style: CallStyle, guess: Guess, tool: Tool, slot: Slot) -> Iterator[list[Piece]]:
    """Go on inside a value: with the predicted one or a choice of the schema that begins like it."""
    hint = guess.values(tool.name, slot.name)
    candidates = [(to_json(hint.value), 0.9)] if hint is not None and hint.present else []
    candidates += [(to_json(choice), 1 / len(slot.choices)) for choice in slot.choices]
    rest = _rest(style, guess, tool, slot.name)
    for value, chance in candidates:
        if value.startswith(partial):
            yield [Piece(value[len(partial) :], chance), *rest] if value != partial else rest


def _after_value(
    text: str, call: CallSpans, item: Item, style: CallStyle, guess: Guess, tool: Tool
) -> Iterator[list[Piece]]:
    assert item.value is not None and item.value.end is not None
    done = text[item.value.end :]
    key, seen = item.key.of(text), {i.key.of(text) for i in call.items}
    slots = [slot for slot in tool.slots if slot.name not in seen or slot.name == key]
    known = replace(tool, slots=tuple(slots))
    rest = _rest(style, guess, known, key)
    yield from _after(done, rest[0].text, rest[1:], rest[0].chance)
    close = [Piece(style.closing, CLOSE), END]
    if rest[0].text != style.tail:
        yield from _after(done, style.tail, close, SKIPPED)
    else:  # the prediction ends the call here: the target may still fill an argument that was to be left out
        for slot in slots:
            if slot.name != key:
                yield from _after(done, style.comma, [Piece(slot.name), Piece(style.colon)], SKIPPED)


def to_json(value: Any) -> str:
    """Write a value the way models do: one line, literal UTF-8."""
    return json.dumps(value, ensure_ascii=False)


def is_writable(value: Any) -> bool:
    """Tell whether a value can be written as JSON and is short enough to be worth a draft."""
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False)) <= MAX_VALUE_CHARACTERS
    except (TypeError, ValueError, RecursionError):
        return False
