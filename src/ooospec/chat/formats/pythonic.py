"""Calls as Python: `[get_weather(city="Oslo", days=3)]`, as Llama 3.2 and 4 write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial

from ooospec.chat.scanner import WAIT, CallSpans, Item, Scanner, Span, whole_characters
from ooospec.core import Tool

_KEY = re.compile(r"[^\W\d][\w\-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonScanner(Scanner):
    """Calls of known tools with keyword arguments; other text with parentheses is no call."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        names = sorted((tool.name for tool in tools), key=len, reverse=True)
        self._longest = max(map(len, names), default=0) + 1
        self._call = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, names)) or '(?!)'})\(")
        self._mode, self._quote, self._stack = "text", "", list[str]()

    def _step(self, i: int) -> int:
        if self._mode == "text":
            return self._seek(i)
        if self._mode == "key":
            return self._read_key(i)
        return self._read_value(i)

    def _seek(self, i: int) -> int:
        found = self._call.search(self.text, i)
        if found is None:
            return max(i, len(self.text) - self._longest) if len(self.text) - self._longest > i else WAIT
        name = Span(found.start(), found.end() - 1)
        self.open = CallSpans(found.start(), name, Span(found.end()), "")
        self._mode = "key"
        return found.end()

    def _read_key(self, i: int) -> int:
        assert self.open is not None
        char = self.text[i]
        if char in " \n\t,":
            return i + 1
        if char == ")":
            return self._finish(i)
        found = _KEY.match(self.text, i)
        if found is None:
            return self._abort(i)
        items = self.open.items
        if not items or items[-1].key.end is not None:
            items.append(Item(Span(i)))
        after = found.end()
        while after < len(self.text) and self.text[after].isspace():
            after += 1
        if after == len(self.text):
            return WAIT
        if self.text[after] != "=":
            return self._abort(i)
        items[-1].key.end, self._mode, self._stack, self._quote = found.end(), "value", [], ""
        return after + 1

    def _read_value(self, i: int) -> int:
        assert self.open is not None
        item, char = self.open.items[-1], self.text[i]
        if item.value is None:
            if char in " \n\t":
                return i + 1
            item.value = Span(i)
        if self._quote:
            return self._in_quotes(i)
        if char in "\"'":
            self._quote = char
        elif char in _CLOSING:
            self._stack.append(_CLOSING[char])
        elif self._stack and char == self._stack[-1]:
            self._stack.pop()
        elif not self._stack and char in ",)":
            item.value.end = i
            while self.text[item.value.end - 1].isspace():
                item.value.end -= 1
            self._mode = "key"
            return i
        elif char in ")]}":
            return self._abort(i)
        return i + 1

    def _in_quotes(self, i: int) -> int:
        if self.text[i] == "\\":
            return i + 2 if i + 1 < len(self.text) else WAIT
        if self.text[i] == self._quote:
            self._quote = ""
        return i + 1

    def _finish(self, i: int) -> int:
        assert self.open is not None and self.open.arguments is not None
        self.open.arguments.end, self.open.end = i, i + 1
        self.calls.append(self.open)
        self.open, self._mode = None, "text"
        return i + 1

    @property
    def certain(self) -> bool:
        """Tell whether the open call can only be a call: its first `key=` has come."""
        return self.open is not None and bool(self.open.items) and self.open.items[0].key.end is not None

    def _abort(self, i: int) -> int:
        """Give the call up and look at the character again."""
        self._break(i)
        self._mode, self._quote, self._stack = "text", "", []
        return i

    def arguments_text(self, call: CallSpans) -> str:
        """Write the finished arguments as JSON."""
        done = ((item.key.of(self.text), item.value) for item in call.items)
        pairs = [(key, json_of_python(value.of(self.text))) for key, value in done if value and value.end is not None]
        return as_object(pairs, call.end is not None)


def as_object(pairs: Iterable[tuple[str, str]], finished: bool) -> str:
    """Write (key, JSON value) pairs as an object, open as long as more may come."""
    inner = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in pairs)
    return "{" + inner + ("}" if finished else "")


def json_of_python(text: str) -> str:
    """Rewrite a Python literal as JSON; numbers keep their digits, and what is no literal becomes a string."""
    if _NUMBER.fullmatch(text) or text in ("true", "false", "null"):
        return text
    for read in (ast.literal_eval, partial(json.loads, strict=False)):
        try:
            return whole_characters(json.dumps(read(text), ensure_ascii=False, allow_nan=False))
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)
