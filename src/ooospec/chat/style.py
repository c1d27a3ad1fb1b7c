"""How a target writes its calls: the literal text between the parts, as templates promise it or as it was last seen.

Models deviate from their own template (Qwen2.5-Coder answers a template that asks for `<tool_call>` with a fenced,
indented object), so what a target wrote before outweighs what it was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ooospec.chat.scanner import CallSpans, Scanner

RECENT_KEPT, SLOTS_KEPT, SITUATIONS_KEPT = 200, 4096, 256
MAX_VALUE = 2000
"""Longer values are not remembered."""
MAX_OPENING = 120
"""Longer text before a call is words or reasoning, not a habit."""
LEARNED_KEPT = 4
"""Learned styles kept per situation, most recent first."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Literal text around the parts of a call.

    opening HEAD name MIDDLE key COLON value COMMA key COLON value TAIL closing; a call without arguments is
    opening HEAD name EMPTY closing; a second call follows after `between` instead of `closing`.
    """

    opening: str
    head: str
    middle: str
    colon: str
    comma: str
    tail: str
    empty: str
    between: str
    closing: str
    values: str = "json"
    """How values are written: json, python (literals) or raw (the bare text)."""

    def write(self, value: Any) -> str:
        """Write a value the way models do: one line, literal UTF-8."""
        if self.values == "raw" and isinstance(value, str):
            return value
        return python_of(value) if self.values == "python" else json.dumps(value, ensure_ascii=False)


def python_of(value: Any) -> str:
    """Write a JSON value as the Python literal a target would write: double quotes, True, None."""
    if isinstance(value, list):
        return f"[{', '.join(map(python_of, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python_of(key)}: {python_of(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, bool | None) else json.dumps(value, ensure_ascii=False)


def object_style(opening: str, closing: str, between: str, key: str, indent: int = 0) -> CallStyle:
    """Style of calls that are one JSON object, arguments under `key`."""
    if indent:
        one, two = "\n" + " " * indent, "\n" + " " * 2 * indent
        middle = f'",{one}"{key}": {{'
        return CallStyle(
            opening,
            f'{{{one}"name": "',
            f'{middle}{two}"',
            '": ',
            f',{two}"',
            f"{one}}}\n}}",
            f"{middle}}}\n}}",
            between,
            closing,
        )
    middle = f'", "{key}": {{'
    return CallStyle(opening, '{"name": "', f'{middle}"', '": ', ', "', "}}", f"{middle}}}}}", between, closing)


def default_styles(prompt: str) -> list[CallStyle]:
    """List the styles that a prompt may be answered in, likeliest first."""
    asks_parameters = '"parameters": {"Parameter name"' in prompt or (
        '"parameters"' in prompt and '"arguments"' not in prompt
    )
    key = "parameters" if asks_parameters else "arguments"
    tagged = object_style("<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n", key)
    fenced = object_style("```json\n", "\n```", "\n", key)
    indented = object_style("```json\n", "\n```", "\n", key, indent=2)
    bare = object_style("", "", "\n", key)
    prompted = object_style("```<tool_call>\n", "\n</tool_call>\n```", "\n", key)
    listed = replace(fenced, opening="```<tool_call>\n", closing="\n```")
    if "```<tool_call>" in prompt:
        return [prompted, fenced, tagged, bare, indented, listed]
    if "<tool_call>" in prompt:
        return [tagged, indented, fenced, bare]
    return [bare, fenced, tagged, indented]


def learn_style(scanner: Scanner, fallback: CallStyle) -> CallStyle | None:
    """Read the style off a finished output; parts it does not show come from `fallback`. None without a call."""
    text, calls = scanner.text, [call for call in scanner.calls if not call.broken]
    if not calls:
        return None
    shape = fallback
    for call in calls[::-1]:  # the first call has the last word
        shape = _learn_shape(text, call, shape)
    between = text[calls[0].end : calls[1].start] if len(calls) > 1 else shape.between
    opening = text[: calls[0].start] if calls[0].start <= MAX_OPENING else fallback.opening
    return replace(shape, opening=opening, between=between, closing=text[calls[-1].end :])


def _learn_shape(text: str, call: CallSpans, shape: CallStyle) -> CallStyle:
    name, arguments = call.name, call.arguments
    if name is None or name.end is None or arguments is None or arguments.start < name.end:
        return shape
    shape = replace(shape, head=text[call.start : name.start])
    if not call.items:
        return replace(shape, empty=text[name.end : call.end])
    first, last = call.items[0], call.items[-1]
    if first.key.end is None or first.value is None or last.value is None or last.value.end is None:
        return shape
    shape = replace(
        shape,
        middle=text[name.end : first.key.start],
        colon=text[first.key.end : first.value.start],
        tail=text[last.value.end : call.end],
    )
    if len(call.items) > 1 and first.value.end is not None:
        return replace(shape, comma=text[first.value.end : call.items[1].key.start])
    if "\n" in shape.middle:  # one argument only: the separator repeats the break before the first key
        return replace(shape, comma="," + shape.middle[shape.middle.rindex("\n") :])
    return replace(shape, comma=', "')


class ValueBook:
    """Remember the values that a target gave each slot last, and each slot name under any tool; old slots go."""

    def __init__(self, kept: int = 3) -> None:
        self.kept = kept
        self._values: dict[str, list[str]] = {}
        self._recent: dict[str, None] = {}
        self._nbytes = 0

    def recall(self, tool: str, slot: str) -> list[str]:
        """Return JSON texts, the last one first."""
        return self._values.get(f"{tool}\n{slot}") or self._values.get(f"\n{slot}", [])

    def recent(self, partial: str) -> list[str]:
        """Return the newest values of any slot that begin with `partial`, if it says enough."""
        if len(partial) < 2:
            return []
        return [value for value in reversed(self._recent) if value.startswith(partial) and value != partial][:2]

    def learn(self, scanner: Scanner) -> None:
        """Take note of the values in a finished output."""
        text = scanner.text
        for call in scanner.calls:
            for item in call.items:
                if call.name is None or item.value is None or item.value.end is None:
                    continue
                value = item.value.of(text)
                if len(value) > MAX_VALUE:
                    continue
                self._recent.pop(value, None)
                self._recent[value] = None
                if len(self._recent) > RECENT_KEPT:
                    del self._recent[next(iter(self._recent))]
                for key in (f"{call.name.of(text)}\n{item.key.of(text)}", f"\n{item.key.of(text)}"):
                    seen = self._values.pop(key, [])
                    self._values[key] = [value, *(other for other in seen if other != value)][: self.kept]
                    self._nbytes += _size(key, self._values[key]) - _size(key, seen)
                    if len(self._values) > SLOTS_KEPT:
                        oldest = next(iter(self._values))
                        self._nbytes -= _size(oldest, self._values.pop(oldest))

    @property
    def nbytes(self) -> int:
        """About how many bytes the values take."""
        return self._nbytes

    def dump(self) -> bytes:
        """Write all values."""
        return msgspec.msgpack.encode((self._values, list(self._recent)))

    def load(self, data: bytes) -> None:
        """Read what `dump` wrote."""
        self._values, recent = msgspec.msgpack.decode(data, type=tuple[dict[str, list[str]], list[str]])
        self._recent = dict.fromkeys(recent)
        self._nbytes = sum(_size(key, seen) for key, seen in self._values.items())


def _size(key: str, values: Sequence[str]) -> int:
    """About how many bytes a slot's values take; 0 for none."""
    return sum(map(len, values)) + len(key) + 150 if values else 0


class StyleBook:
    """Remember, per situation, the styles seen last. Shared by all requests of a target; old situations go."""

    def __init__(self) -> None:
        self._learned: dict[str, list[CallStyle]] = {}

    def dump(self) -> bytes:
        """Write the learned styles."""
        return msgspec.msgpack.encode(self._learned)

    def load(self, data: bytes) -> None:
        """Read what `dump` wrote."""
        self._learned = msgspec.msgpack.decode(data, type=dict[str, list[CallStyle]])

    def ranked(self, key: str, defaults: Sequence[CallStyle]) -> list[tuple[CallStyle, float]]:
        """List styles with their chances: learned ones first (most recent best), then the defaults."""
        learned = self._learned.get(key, [])
        styles = [*learned, *(style for style in defaults if style not in learned)]
        first = 0.75 if learned else 0.4
        rest = (1 - first) / max(1, len(styles) - 1)
        return [(style, first if index == 0 else rest) for index, style in enumerate(styles)]

    def learn(self, key: str, defaults: Sequence[CallStyle], scanner: Scanner) -> None:
        """Take note of a finished output."""
        learned = self._learned.get(key, [])
        style = learn_style(scanner, learned[0] if learned else defaults[0])
        if style is not None:
            self._learned.pop(key, None)
            self._learned[key] = [style, *(s for s in learned if s != style)][:LEARNED_KEPT]
            if len(self._learned) > SITUATIONS_KEPT:
                del self._learned[next(iter(self._learned))]

    @property
    def nbytes(self) -> int:
        """About how many bytes the styles take."""
        return 1500 * sum(map(len, self._learned.values()))
