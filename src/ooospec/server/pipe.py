"""From committed tokens to what a client may see: text up to a stop string, split into content, reasoning and calls."""

from __future__ import annotations

from ooospec.chat.answer import CallBegins, Event
from ooospec.chat.codec import TextCodec
from ooospec.chat.scanner import held_back
from ooospec.core import Commit
from ooospec.generation import Generation
from ooospec.request import Request


class TextPipe:
    """The text of one choice. A stop string, and what may become one, is held back."""

    def __init__(self, codec: TextCodec, request: Request, include_stop: bool = False) -> None:
        """`include_stop` = a stop string that ends the text is shown."""
        self._hidden, self._stream = request.hidden, codec.stream()
        self._answer = request.answer_stream()
        self._stops, self._include_stop = request.limits.stop, include_stop
        self._held, self._stopped = "", False
        self._calls = 0

    def push(self, commit: Commit) -> tuple[str, list[Event]]:
        """Take a commit; return (new text, what it made visible)."""
        text = self._stream.push(token for token in commit.tokens if token not in self._hidden)
        return self._emit(text, final=False)

    def close(self) -> tuple[str, list[Event]]:
        """Return what was held back."""
        text, events = self._emit(self._stream.flush(), final=True)
        return text, events + self._count(self._answer.close())

    def _emit(self, text: str, final: bool) -> tuple[str, list[Event]]:
        if self._stopped:
            return "", []
        text = self._held + text
        found = [(at, len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, length = min(found)
            self._stopped, cut = True, at + length * self._include_stop
        else:
            cut = len(text) if final else held_back(text, 0, self._stops)
        shown, self._held = text[:cut], "" if self._stopped else text[cut:]
        return shown, self._count(self._answer.push(shown)) if shown else []

    def _count(self, events: list[Event]) -> list[Event]:
        self._calls += sum(isinstance(event, CallBegins) for event in events)
        return events

    def finish_reason(self, result: Generation) -> str:
        """Return OpenAI's word for how the choice ended."""
        if result.finish_reason == "length":
            return "length"
        cut = self._stopped and self._calls > len(self._answer.calls)  # by a stop string, inside a call
        return "tool_calls" if self._calls and not cut else "stop"
