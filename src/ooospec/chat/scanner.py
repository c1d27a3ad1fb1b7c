"""Find tool calls in a growing text, character by character.

One scanner serves drafting, streaming and the final parse, so they cannot disagree; any division of the text into
chunks gives the same calls. Here are the parts all formats share and the commonest format; the others are in
`chat.formats`. A JSON object counts as a call when it has a string `name` and an object `arguments` or
`parameters`. Text that turns out not to be JSON is left as text; scanning goes on at the character that broke it, so
the time is linear in the text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_CONTROL = re.compile(r"[\x00-\x1f]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_PLAIN_STRING = re.compile(r'[^"\\]+')
_PLAIN_KEY = re.compile(r'[^"\\\n]+')


@dataclass(slots=True)
class Span:
    """Characters `start` to `end` of the text; `end` is None while they are still coming."""

    start: int
    end: int | None = None

    def of(self, text: str) -> str:
        """Cut the span out of the text."""
        return text[self.start : self.end]


@dataclass(slots=True)
class Item:
    """One argument: its key (without quotes) and its raw JSON value, as far as they have come."""

    key: Span
    value: Span | None = None


@dataclass(slots=True)
class CallSpans:
    """Where the parts of one call stand in the text."""

    start: int
    name: Span | None = None
    arguments: Span | None = None
    arguments_key: str | None = None
    quoted: bool = False
    """The arguments are a JSON string that holds the object."""
    items: list[Item] = field(default_factory=list)
    end: int | None = None
    controls: bool = False
    """A string holds raw control characters, which JSON does not allow."""
    broken: bool = False
    """It was certainly a call, but broke off at `end`."""

    def is_call(self) -> bool:
        """Tell whether a finished object is a tool call."""
        return self.name is not None and self.arguments is not None


WAIT = -1
"""What a step returns when it needs more text to decide."""


class Scanner(ABC):
    """Feed text in any chunks; `calls` holds the finished calls, `open` the one being written."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[CallSpans] = []
        self.open: CallSpans | None = None
        self._next = 0

    def feed(self, chunk: str) -> None:
        """Append text."""
        self.text += chunk
        while self._next < len(self.text):
            following = self._step(self._next)
            if following == WAIT:
                return
            self._next = following

    @abstractmethod
    def _step(self, i: int) -> int:
        """Take the character at `i` or more; return the next index, or WAIT for more text."""

    @property
    def settled(self) -> int:
        """Index before which no call begins that is not found yet."""
        return self.open.start if self.open is not None else self._next

    @property
    def certain(self) -> bool:
        """Tell whether the open call can only be a call: its name is known and its arguments have begun."""
        call = self.open
        if call is None or call.quoted or not call.is_call():
            return False
        return call.name is not None and call.name.end is not None

    def _break(self, i: int) -> bool:
        """Settle the open call, which breaks off at `i`: one that was certain stays a call; tell whether it was."""
        call, kept = self.open, self.certain
        if call is not None and kept and call.arguments is not None:
            call.arguments.end = call.arguments.end or i
            call.end, call.broken = i, True
            self.calls.append(call)
        self.open = None
        return kept

    def finished(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield (name, arguments, arguments as JSON text) of every finished call; what json refuses is left out."""
        for call in self.calls:
            try:
                yield self._read(call)
            except (ValueError, RecursionError):
                continue

    def _read(self, call: CallSpans) -> tuple[str, dict[str, Any], str]:
        raw = self.arguments_text(call)
        return self.name_of(call), json.loads(raw, strict=False, parse_constant=refuse_constant), raw

    def name_of(self, call: CallSpans) -> str:
        """Return the name of a call."""
        return call.name.of(self.text) if call.name is not None else ""

    def arguments_text(self, call: CallSpans) -> str:
        """Write the arguments of a call, as far as they have come, as JSON: only appended to as the text grows."""
        return call.arguments.of(self.text) if call.arguments is not None else ""


def _escaped(text: str) -> str:
    """Escape control characters inside strings; all else stays byte for byte, and only grows as the text does."""
    return _STRING.sub(lambda found: _CONTROL.sub(lambda c: json.dumps(c.group())[1:-1], found.group()), text)


def held_back(text: str, start: int, markers: Iterable[str]) -> int:
    """Return the index from which the end of `text[start:]` may be the beginning of a marker; len(text) if nowhere."""
    longest = max(
        (size for m in markers for size in range(min(len(m) - 1, len(text) - start), 0, -1) if text.endswith(m[:size])),
        default=0,
    )
    return len(text) - longest


class CallScanner(Scanner):
    """Calls that are one JSON object: `name`, and `arguments` or `parameters`, an object or a string that holds one."""

    def __init__(self) -> None:
        super().__init__()
        self._stack: list[str] = []
        self._mode = "text"
        self._escaped = False
        self._key: Span | None = None  # the depth-1 or argument key being read or last read
        self._top_key = ""

    @property
    def in_arguments(self) -> bool:
        """Tell whether the scanner is directly inside the arguments object."""
        arguments = self.open.arguments if self.open is not None else None
        return len(self._stack) == 2 and arguments is not None and arguments.end is None

    # ------------------------------------------------------------------ one character

    def _step(self, i: int) -> int:
        """Take the character at `i` (or a run of plain ones); return the next index."""
        mode = self._mode
        if mode == "text":
            brace = self.text.find("{", i)
            if brace < 0:
                return len(self.text)
            self.open = CallSpans(brace)
            self._stack, self._mode, self._top_key = ["{"], "key_or_end", ""
            return brace + 1
        if mode in ("in_key", "in_string"):
            return self._string(i)
        char = self.text[i]
        if mode == "in_scalar":
            if char not in _SPACE + ",}]":
                if char in '"{[:':
                    return self._abort(i)
                return i + 1
            self._close_value(i)
            return i  # the same character again, after the value
        if char in _SPACE:
            return i + 1
        return self._structure(i, char)

    def _string(self, i: int) -> int:
        char = self.text[i]
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == "\n" and self._mode == "in_key":
            return self._abort(i)
        elif char == '"':
            if self._mode == "in_key":
                if self._key is not None:
                    self._key.end = i
                self._mode = "colon"
            else:
                self._close_value(i + 1)
        elif (plain := (_PLAIN_KEY if self._mode == "in_key" else _PLAIN_STRING).match(self.text, i)) is not None:
            if self.open is not None and not self.open.controls:
                self.open.controls = _CONTROL.search(plain.group()) is not None
            return plain.end()
        return i + 1

    def _structure(self, i: int, char: str) -> int:
        mode, inside = self._mode, self._stack[-1]
        if mode in ("key", "key_or_end") and char == '"':
            self._mode = "in_key"
            self._start_key(i + 1)
        elif mode == "key_or_end" and char == "}":
            self._pop(i)
        elif mode == "colon" and char == ":":
            self._mode = "value"
        elif mode in ("value", "value_or_end") and char not in ",:}]":
            self._start_value(i, char)
        elif mode == "value_or_end" and char == "]":
            self._pop(i)
        elif mode == "after_value" and char == ",":
            self._mode = "key" if inside == "{" else "value"
        elif mode == "after_value" and char == ("}" if inside == "{" else "]"):
            self._pop(i)
        else:
            return self._abort(i)
        return i + 1

    def _start_key(self, start: int) -> None:
        assert self.open is not None
        self._key = Span(start) if len(self._stack) <= 2 else None
        if self.in_arguments and self._key is not None:
            self.open.items.append(Item(self._key))

    def _start_value(self, i: int, char: str) -> None:
        assert self.open is not None
        if len(self._stack) == 1 and self._key is not None:
            self._top_key = self._key.of(self.text)
            if self._top_key == "name" and char == '"' and self.open.name is None:
                self.open.name = Span(i + 1)
            elif self._top_key in ARGUMENT_KEYS and char in '{"' and self.open.arguments is None:
                self.open.arguments, self.open.arguments_key, self.open.quoted = Span(i), self._top_key, char == '"'
        elif self.in_arguments and self._top_key in ARGUMENT_KEYS and self.open.items:
            self.open.items[-1].value = Span(i)
        self._push(char)

    def _push(self, char: str) -> None:
        """Go into the value that begins with `char`."""
        if char in "{[":
            self._stack.append(char)
            self._mode = "key_or_end" if char == "{" else "value_or_end"
        else:
            self._mode = "in_string" if char == '"' else "in_scalar"

    def _close_value(self, end: int) -> None:
        """Note that a value ended before `end`."""
        assert self.open is not None
        self._mode = "after_value"
        if len(self._stack) == 1:
            if self._top_key == "name" and self.open.name is not None and self.open.name.end is None:
                self.open.name.end = end - 1
            elif self._top_key == self.open.arguments_key and self.open.arguments is not None:
                self.open.arguments.end = self.open.arguments.end or end
        elif self.in_arguments and self.open.items:
            value = self.open.items[-1].value
            if value is not None and value.end is None:
                value.end = end

    def _pop(self, i: int) -> None:
        assert self.open is not None
        self._stack.pop()
        if self._stack:
            self._close_value(i + 1)
            return
        self.open.end = i + 1
        if self.open.is_call() and (not self.open.quoted or self.arguments_text(self.open)):
            self.calls.append(self.open)
        self.open, self._mode = None, "text"

    def _abort(self, i: int) -> int:
        """Give the object up and look at the character again."""
        self._break(i)
        self._stack, self._mode, self._escaped = [], "text", False
        return i

    def arguments_text(self, call: CallSpans) -> str:
        """Return the arguments as they stand; those in a string once it is whole, "" if it holds no object."""
        text = super().arguments_text(call)
        if not call.quoted:
            return _escaped(text) if call.controls else text
        try:
            inner = whole_characters(json.loads(text, strict=False))
            return _escaped(inner) if isinstance(json.loads(inner, strict=False), dict) else ""
        except (ValueError, TypeError, RecursionError):
            return ""

    def name_of(self, call: CallSpans) -> str:
        """Return the name of a call, its escapes resolved."""
        raw = super().name_of(call)
        try:
            return str(json.loads(f'"{raw}"', strict=False))
        except ValueError:
            return raw


def whole_characters(text: str) -> str:
    """Join surrogate pairs and replace halves of them, which are no characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def refuse_constant(constant: str) -> Any:
    """Refuse NaN and Infinity, which json takes but JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
