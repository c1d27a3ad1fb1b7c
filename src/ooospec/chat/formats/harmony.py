"""Message headers of harmony (gpt-oss): everything up to `<|message|>`, well formed or not, is no part of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ooospec.chat.scanner import held_back
from ooospec.core import Tool

BEGINS = ("<|start|>", "<|channel|>")
ENDS = "<|message|>"
CALL = "<|channel|>commentary to=functions."
CONSTRAINT = " <|constrain|>json<|message|>"
MAX_HEADER = 256
"""Characters; what goes on without an end is no header."""
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HeaderFilter:
    """Takes headers out of an answer, in any chunks.

    One that names an offered function, on whatever channel and in whatever order, comes out as the header of a call.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {tool.name for tool in tools}
        self._text = ""

    def push(self, text: str, final: bool) -> str:
        """Take more text; return what is known not to be in a header, and calls' headers in their usual form."""
        self._text += text
        out = ""
        while True:
            start = min((at for mark in BEGINS if (at := self._text.find(mark)) >= 0), default=-1)
            if start < 0:
                cut = len(self._text) if final else held_back(self._text, 0, BEGINS)
                out, self._text = out + self._text[:cut], self._text[cut:]
                return out
            out, self._text = out + self._text[:start], self._text[start:]
            end = self._text.find(ENDS, 0, MAX_HEADER + len(ENDS))
            if end >= 0:
                named = _RECIPIENT.search(self._text[:end])
                is_call = named is not None and named[1] in self._names
                out += f"{CALL}{named[1]}{CONSTRAINT}" if named is not None and is_call else ""
                self._text = self._text[end + len(ENDS) :]
            elif len(self._text) >= MAX_HEADER + len(ENDS):
                out, self._text = out + self._text[0], self._text[1:]
            else:
                self._text = "" if final else self._text
                return out
