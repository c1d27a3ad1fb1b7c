"""Calls as tags with one element an argument: Qwen3-Coder's `<function=..>` and GLM's `<arg_key>`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ooospec.chat.formats.pythonic import as_object
from ooospec.chat.scanner import WAIT, CallSpans, Item, Scanner, Span, held_back, refuse_constant, whole_characters
from ooospec.core import Slot, Tool


@dataclass(frozen=True, slots=True)
class Tags:
    """Literal text around the parts of a call."""

    call: str
    name_end: str
    key: str
    value: str
    """From the end of a key to the beginning of its value."""
    value_end: str
    end: str


class TagScanner(Scanner):
    """Calls `call name name_end (key k value v value_end)* end`; a line break beside a value is not part of it."""

    def __init__(self, tags: Tags, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tags, self._mode = tags, "text"
        self._tools = {tool.name: tool for tool in tools}

    def _step(self, i: int) -> int:
        return {"text": self._seek, "name": self._name, "body": self._body, "key": self._key, "value": self._value}[
            self._mode
        ](i)

    def _find(self, i: int, *literals: str) -> tuple[int, int]:
        """Return (where the first of the literals stands or -1, where to go on if none does)."""
        at = min((found for literal in literals if (found := self.text.find(literal, i)) >= 0), default=-1)
        held = held_back(self.text, i, literals) if at < 0 else at
        return at, held if held > i else WAIT

    def _seek(self, i: int) -> int:
        at, later = self._find(i, self._tags.call)
        if at < 0:
            return later
        start = at + len(self._tags.call)
        self.open, self._mode = CallSpans(at, name=Span(start)), "name"
        return start

    def _name(self, i: int) -> int:
        assert self.open is not None and self.open.name is not None
        stop = self._tags.name_end.strip() or "\n"
        at, later = self._find(i, stop, self._tags.key.strip(), self._tags.end.strip())
        if at < 0:
            return later
        name = self.text[self.open.name.start : at].strip()
        if not name or "\n" in name or "<" in name:
            return self._abort(at)
        self.open.name.end = self.open.name.start + len(self.text[self.open.name.start : at].rstrip())
        self.open.arguments, self.open.arguments_key, self._mode = Span(at), "", "body"
        return at + len(stop) if self.text.startswith(stop, at) and stop != "\n" else at

    def _body(self, i: int) -> int:
        """Between arguments: the next one, or the end of the call."""
        assert self.open is not None and self.open.arguments is not None
        if self.text[i].isspace():
            return i + 1
        key, end = self._tags.key.strip(), self._tags.end.strip()
        rest = self.text[i : i + max(len(key), len(end))]
        if rest.startswith(key):
            self.open.items.append(Item(Span(i + len(key))))
            self._mode = "key"
            return i + len(key)
        if rest.startswith(end):
            self.open.arguments.end, self.open.end = i, i + len(end)
            self.calls.append(self.open)
            self.open, self._mode = None, "text"
            return i + len(end)
        return WAIT if key.startswith(rest) or end.startswith(rest) else self._abort(i)

    def _key(self, i: int) -> int:
        assert self.open is not None
        key = self.open.items[-1].key
        if key.end is None:
            at, later = self._find(i, self._tags.value.split("\n")[0])
            if at < 0:
                return later
            key.end = at
            return at
        after = key.end
        for part in filter(None, self._tags.value.split("\n")):
            while after < len(self.text) and self.text[after].isspace():
                after += 1
            if not self.text.startswith(part, after):
                return WAIT if part.startswith(self.text[after : after + len(part)]) else self._abort(after)
            after += len(part)
        if self._tags.value.endswith("\n"):
            if after == len(self.text):
                return WAIT
            after += self.text[after] == "\n"
        self.open.items[-1].value, self._mode = Span(after), "value"
        return after

    def _value(self, i: int) -> int:
        assert self.open is not None and self.open.items[-1].value is not None
        stop = self._tags.value_end.strip()
        at, later = self._find(i, stop)
        if at < 0:
            return later
        value = self.open.items[-1].value
        value.end = at - (self._tags.value_end.startswith("\n") and at > value.start and self.text[at - 1] == "\n")
        self._mode = "body"
        return at + len(stop)

    def _abort(self, i: int) -> int:
        """Give the call up: as plain text from after its first tag, or as far as it came if it was certain."""
        assert self.open is not None
        after = self.open.start + len(self._tags.call)
        self._mode = "text"
        return i if self._break(i) else after

    def arguments_text(self, call: CallSpans) -> str:
        """Write the finished arguments as JSON, each value as its slot's type says."""
        assert call.name is not None
        tool = self._tools.get(call.name.of(self.text))
        pairs = []
        for item in call.items:
            if item.value is not None and item.value.end is not None:
                name = item.key.of(self.text)
                pairs.append((name, json_of_raw(item.value.of(self.text), tool.slot(name) if tool else None)))
        return as_object(pairs, call.end is not None)


def json_of_raw(text: str, slot: Slot | None) -> str:
    """Write raw text as JSON: as it is if it is JSON of a type the slot takes, else as a string."""
    types = slot.types if slot is not None else ()
    if types != ("string",):
        try:
            value = json.loads(text, strict=False, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
            text = json.dumps(value)
        if not isinstance(value, str) and (not types or _fits(value, types) or "string" not in types):
            return text.strip()
    return whole_characters(json.dumps(text if types == ("string",) else _raw(text), ensure_ascii=False))


def _raw(text: str) -> str:
    """Take the quotes off a JSON string."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str) else text


def _fits(value: Any, types: Sequence[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "string")
