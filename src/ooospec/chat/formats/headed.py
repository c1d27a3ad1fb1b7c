"""Formats with the name before a JSON object of arguments: Mistral, DeepSeek, harmony, Kimi, `<function=name>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ooospec.chat.scanner import WAIT, CallScanner, CallSpans, Item, Span, held_back
from ooospec.core import Tool

MAX_GAP = 80
"""Characters between a name and its arguments."""
_NAME = re.compile(r"[\w.\-/]+")


@dataclass(frozen=True, slots=True)
class Head:
    """How a call begins: `marker` name [anything short] `{`."""

    marker: str
    gap: str
    """Text between name and arguments, as the format writes it."""


class HeadedScanner(CallScanner):
    """Calls `marker name gap {arguments}`."""

    def __init__(self, head: Head, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self._head = head
        self._names = sorted((tool.name for tool in tools if not _NAME.fullmatch(tool.name)), key=len, reverse=True)

    def _step(self, i: int) -> int:
        if self._mode == "text":
            return self._seek(i)
        if self._mode == "name":
            return self._name(i)
        if self._mode == "gap":
            return self._gap(i)
        return super()._step(i)

    def _seek(self, i: int) -> int:
        at = self.text.find(self._head.marker, i)
        if at < 0:
            held = held_back(self.text, i, (self._head.marker,))
            return held if held > i else WAIT
        start = at + len(self._head.marker)
        self.open, self._mode = CallSpans(at, name=Span(start)), "name"
        return start

    def _name(self, i: int) -> int:
        assert self.open is not None and self.open.name is not None
        start = self.open.name.start
        if any(name.startswith(self.text[start : start + len(name)]) for name in self._names):
            odd = next((name for name in self._names if self.text.startswith(name, start)), None)
            if odd is None:
                return WAIT
            self.open.name.end, self._mode = start + len(odd), "gap"
            return start + len(odd)
        found = _NAME.match(self.text, i)
        if found is not None:
            if found.end() == len(self.text):
                return found.end()
            i = found.end()
        if i == self.open.name.start:
            return self._abort(i)
        self.open.name.end, self._mode = i, "gap"
        return i

    def _gap(self, i: int) -> int:
        assert self.open is not None and self.open.name is not None and self.open.name.end is not None
        if i - self.open.name.end > MAX_GAP:
            return self._abort(self.open.name.end)
        if self.text[i] == "{":
            self.open.arguments, self.open.arguments_key = Span(i), ""
            self._stack, self._mode = ["{"], "key_or_end"
        return i + 1

    def _abort(self, i: int) -> int:
        return super()._abort(max(i, self.open.name.start) if self.open is not None and self.open.name else i)

    # ------------------------------------------------------------------ the JSON machine, arguments at its top

    @property
    def in_arguments(self) -> bool:
        """Tell whether the scanner is directly inside the arguments object."""
        return len(self._stack) == 1

    def _start_key(self, start: int) -> None:
        assert self.open is not None
        self._key = Span(start) if self.in_arguments else None
        if self._key is not None:
            self.open.items.append(Item(self._key))

    def _start_value(self, i: int, char: str) -> None:
        assert self.open is not None
        if self.in_arguments and self.open.items:
            self.open.items[-1].value = Span(i)
        self._push(char)

    def _close_value(self, end: int) -> None:
        assert self.open is not None
        self._mode = "after_value"
        if self.in_arguments and self.open.items:
            value = self.open.items[-1].value
            if value is not None and value.end is None:
                value.end = end

    def _pop(self, i: int) -> None:
        assert self.open is not None and self.open.arguments is not None
        if len(self._stack) == 1:
            self.open.arguments.end = i + 1
        super()._pop(i)
