"""Message headers of harmony (gpt-oss): everything up to `<|message|>`, well formed or not, is no part of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ooospec.chat.scanner import held_back
from ooospec.core import Tool

BEGINS = ("<|start|>", "<|channel|>")
ENDS = "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
CALL = "<|channel|>commentary to=functions."
CONSTRAINT = " <|constrain|>json<|message|>"
MAX_HEADER = 256
"""Characters; what goes on without an end is no header."""
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HeaderFilter:
    """Takes headers out of an answer, in any chunks: at its beginning, and behind what ends a message.

    One that names an offered function, on whatever channel and in whatever order, comes out as the header of a call.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {tool.name for tool in tools}
        self._text, self._at_header = "", True

    def push(self, text: str, final: bool = False) -> str:
        """Take more text; return what is known not to be in a header, and calls' headers in their usual form."""
        text, at, out = self._text + text, 0, list[str]()
        while at < len(text) or final:
            step = self._header(text, at, final, out) if self._at_header else self._message(text, at, final, out)
            if step is None:
                break
            at = step
            if final and at >= len(text):
                break
        self._text = "" if final else text[at:]
        return "".join(out)

    def _header(self, text: str, at: int, final: bool, out: list[str]) -> int | None:
        """Read a header, if one stands here; return where to go on, None = that is not known yet."""
        start = at
        while start < len(text) and text[start].isspace():
            start += 1
        begun = any(text.startswith(mark, start) for mark in BEGINS)
        if not begun:
            rest = text[start : start + len(max(BEGINS, key=len))]
            if not final and any(mark.startswith(rest) for mark in BEGINS):
                return None
            self._at_header = False
            return at if at < len(text) else None
        end = text.find(ENDS, start, start + MAX_HEADER + len(ENDS))
        if end < 0:
            if not final and len(text) - start < MAX_HEADER + len(ENDS):
                return None
            self._at_header = False
            if final and len(text) - start < MAX_HEADER + len(ENDS):
                return len(text)  # cut off inside a header
            return at
        named = _RECIPIENT.search(text, start, end)
        if named is not None and named[1] in self._names:
            out.append(f"{CALL}{named[1]}{CONSTRAINT}")
        self._at_header = False
        return end + len(ENDS)

    def _message(self, text: str, at: int, final: bool, out: list[str]) -> int | None:
        """Pass a message on, to its end if that is there; return where to go on, None = that is not known yet."""
        found = min(((i, mark) for mark in MESSAGE_ENDS if (i := text.find(mark, at)) >= 0), default=None)
        if found is not None:
            stop, self._at_header = found[0] + len(found[1]), True
        else:
            stop = len(text) if final else held_back(text, at, MESSAGE_ENDS)
        out.append(text[at:stop])
        return stop if stop > at else None
