"""Split an answer into content, reasoning and calls while it is being written.

One scanner decides where calls are, so the streamed view and the whole one cannot differ: feeding an answer in any
chunks gives the same joined deltas. Text that may still become a marker or a call is held until that is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ooospec.chat.formats.registry import CallFormat
from ooospec.chat.scanner import CallSpans, held_back
from ooospec.core import Tool

MAX_HELD = 128
"""Characters of markers in a row that are held back."""
THINK = ("<think>", "</think>")
FENCE = "```"
"""Opens and closes calls in some formats, and code that belongs to the words."""


@dataclass(frozen=True, slots=True)
class Content:
    """Words of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Words inside the reasoning block."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call's name is known."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrow:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Content | Reasoning | CallBegins | ArgumentsGrow


class ThinkSplitter:
    """Tell the words of a reasoning block from the answer after it, in any chunks."""

    def __init__(self, thinking: bool, reasons: bool, marks: tuple[str, str] = THINK) -> None:
        """`thinking` = the prompt ends inside the block; `reasons` = one may open the answer, between the `marks`."""
        self.thinking, self._undecided, self._marks = thinking, reasons and not thinking, marks
        self._text = ""

    @classmethod
    def of(cls, call_format: CallFormat | None, thinking: bool, reasons: bool) -> ThinkSplitter:
        """Make one for a format, which may have marks of its own."""
        marks = call_format.reasoning if call_format is not None else None
        return cls(thinking, reasons or marks is not None, marks or THINK)

    @property
    def answering(self) -> bool:
        """Tell whether what comes next belongs to the answer."""
        return not self.thinking and not self._undecided

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """Take more text; return what is known to be (reasoning, answer)."""
        self._text += text
        if self._undecided:
            start = self._text.lstrip()
            opening = self._marks[0]
            if not final and len(start) < len(opening) and opening.startswith(start):
                return "", ""
            self._undecided = False
            if start.startswith(opening):
                self.thinking, self._text = True, start[len(opening) :]
        if not self.thinking:
            answer, self._text = self._text, ""
            return "", answer
        ending = self._marks[1]
        at = self._text.find(ending)
        cut = at if at >= 0 else len(self._text) if final else held_back(self._text, 0, [ending])
        thought, answer = self._text[:cut], ""
        self._text = self._text[cut:]
        if at >= 0:
            self.thinking, answer, self._text = False, self._text[len(ending) :], ""
        return thought, answer


class AnswerStream:
    """Turns text as it comes into events. `thinking` = the prompt ends inside a reasoning block."""

    def __init__(
        self, call_format: CallFormat | None, tools: Sequence[Tool], thinking: bool = False, reasons: bool = False
    ) -> None:
        """`call_format` None = calls are not looked for; `reasons` = a reasoning block may open the answer."""
        self._scanner = call_format.scanner(tools) if call_format is not None and tools else None
        self._openers = _longest_first(call_format.openers) if self._scanner and call_format else []
        self._closers = _longest_first(call_format.closers) if self._scanner and call_format else []
        self._markers = _longest_first([*self._openers, *self._closers])
        self._tags = [marker for marker in self._markers if marker.startswith(("<", "[TOOL"))]  # no ordinary text
        self._splitter = ThinkSplitter.of(call_format, thinking, reasons)
        self._headers = call_format.headers(tools) if call_format is not None and call_format.headers else None
        self._shown = 0  # characters of the scanner's text that are out or dropped
        self._names = {tool.name for tool in tools}
        self._found = 0  # calls of the scanner that have been looked at
        self._calls = 0  # calls that are out whole
        self._begun: CallSpans | None = None
        self._sent = ""  # arguments of the begun call that are out
        self._said = False  # words have been sent
        self._after_call = False  # no words since the last call
        self._space = ""  # spaces that are sent only if words follow
        self._fences = 0  # in the words that are out
        self._fenced = False  # the last call stands in a fence that was opened for it

    def push(self, text: str) -> list[Event]:
        """Take more text; return what it settles."""
        return list(self._push(text, final=False))

    def close(self) -> list[Event]:
        """Say that the answer is over; return what was held back."""
        return list(self._push("", final=True))

    def _push(self, text: str, final: bool) -> Iterator[Event]:
        thought, answer = self._splitter.push(text, final)
        if thought:
            yield Reasoning(thought)
        if self._headers is not None:
            answer = self._headers.push(answer, final)
        if answer or final:
            yield from self._answer(answer, final)

    def _declared(self, call: CallSpans) -> bool:
        """Tell whether a call is of a function that was offered; any other is content."""
        assert self._scanner is not None
        return self._scanner.name_of(call) in self._names

    @property
    def calls(self) -> list[tuple[str, dict[str, Any], str]]:
        """Finished calls of functions that were offered: (name, arguments, arguments as JSON text)."""
        return [call for call in self._scanner.finished() if call[0] in self._names] if self._scanner else []

    # ------------------------------------------------------------------ content and calls

    def _answer(self, text: str, final: bool) -> Iterator[Event]:
        scanner = self._scanner
        if scanner is None:
            if text:
                yield Content(text)
            return
        scanner.feed(text)
        found, self._found = scanner.calls[self._found :], len(scanner.calls)
        for call in filter(self._declared, found):
            yield from self._between(call.start)
            yield from self._call(call)
            assert call.end is not None
            self._calls, self._begun, self._sent, self._shown = self._calls + 1, None, "", call.end
            self._after_call = True
        if scanner.open is not None and scanner.certain and self._declared(scanner.open):
            yield from self._between(scanner.open.start)
            yield from self._call(scanner.open)
            return
        yield from self._words(len(scanner.text) if final else scanner.settled, final)

    def _between(self, stop: int) -> Iterator[Event]:
        """Send the words before a call that begins at `stop`, without the markers next to the call."""
        assert self._scanner is not None
        text = self._scanner.text[self._shown : stop]
        rest = self._without_beginning(text, True)
        words = self._without_ending(rest)
        self._leave_fence(text, rest)
        self._fenced |= FENCE in rest[len(words) :]
        self._shown = max(self._shown, stop)
        if words.strip():
            yield from self._say(words)
        self._space = ""

    def _words(self, stop: int, final: bool) -> Iterator[Event]:
        """Send words that can no longer belong to a call."""
        assert self._scanner is not None
        text = self._scanner.text[self._shown : stop]
        rest = self._without_beginning(text, final)
        if self._after_call and not final and self._may_be_marker(rest):
            self._leave_fence(text, rest)
            self._shown += len(text) - len(rest)
            return
        self._leave_fence(text, rest)
        if final:
            self._shown += len(text)
            yield from self._say(rest)
            return
        kept = self._without_ending(rest) if self._scanner.open is not None else self._certain_words(rest)
        if len(rest) - len(kept) > MAX_HELD:  # a heap of markers: settle all but the last of them
            kept = rest[: len(rest) - MAX_HELD // 4]
        self._shown += len(text) - len(rest) + len(kept)
        yield from self._say(kept)

    def _say(self, words: str) -> Iterator[Event]:
        """Send words; spaces at their end wait for more words, those before the first are dropped."""
        for tag in self._tags:
            words = words.replace(tag, "")
        text = self._space + words
        body = text.rstrip()
        if not body:
            self._space = text if self._said else ""
            return
        self._space = text[len(body) :]
        if not self._said:
            body = body.lstrip()
        self._said, self._after_call = True, False
        self._fences += body.count(FENCE)
        yield Content(body)

    def _call(self, call: CallSpans) -> Iterator[Event]:
        scanner = self._scanner
        assert scanner is not None and call.name is not None
        if self._begun is not call:
            self._begun, self._sent = call, ""
            yield CallBegins(self._calls, scanner.name_of(call))
        text = scanner.arguments_text(call)
        if len(text) > len(self._sent):
            yield ArgumentsGrow(self._calls, text[len(self._sent) :])
            self._sent = text

    # ------------------------------------------------------------------ markers

    def _without_ending(self, text: str) -> str:
        """Cut what opens a call, and spaces around it, off the end."""
        while True:
            bare = text.rstrip()
            marker = next((m for m in self._openers if bare.endswith(m)), None)
            if marker is None:
                return text
            before = bare[: len(bare) - len(marker)]
            if marker == FENCE and (self._fences + before.count(FENCE)) % 2:
                return text  # it ends a block of code
            text = before

    def _certain_words(self, text: str) -> str:
        """Cut off what may become a marker, or is one that may open a call."""
        while True:
            kept = self._without_ending(text[: held_back(text, 0, self._markers)])
            if kept == text:
                return text
            text = kept

    def _without_beginning(self, text: str, final: bool) -> str:
        """Cut what closes a call off the beginning; a fence only if the call stood in one, or nothing else comes."""
        fenced = self._fenced
        while self._after_call:
            bare = text.lstrip()
            if not final and any(m.startswith(bare) and m != bare for m in self._markers):
                return text  # it may become a longer marker
            marker = next((m for m in self._markers if bare.startswith(m)), None)
            if marker not in self._closers:
                return text
            after = bare[len(marker) :]
            if marker == FENCE:
                if not fenced and not (final and not after.strip()):
                    return text
                fenced = False
            text = after
        return text

    def _leave_fence(self, text: str, rest: str) -> None:
        """Note that the fence around a call was closed, if it is in what was cut off the beginning of `text`."""
        self._fenced &= FENCE not in text[: len(text) - len(rest)]

    def _may_be_marker(self, text: str) -> bool:
        bare = text.strip()
        return not bare or any(marker.startswith(bare) for marker in self._markers)


def _longest_first(markers: Sequence[str]) -> list[str]:
    return sorted(markers, key=len, reverse=True)
