"""What a request says about calls: tool_choice, parallel_tool_calls, response_format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ooospec.chat.answer import ThinkSplitter
from ooospec.chat.codec import TextCodec
from ooospec.chat.formats.registry import CallFormat
from ooospec.core import Tool
from ooospec.errors import UsageError

AUTO, NO_CALL, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether calls are looked for, and which functions must be called."""

    kind: str = AUTO
    """auto, none, or required."""
    name: str = ""
    """The function that must be called; "" = any."""

    @property
    def forced(self) -> bool:
        """Tell whether the answer must be a call."""
        return self.kind == REQUIRED

    def active(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that may be called."""
        if self.kind == NO_CALL:
            return ()
        return tuple(tool for tool in tools if not self.name or tool.name == self.name)


def read_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Read OpenAI's tool_choice. Raises UsageError for other values, absent functions, or a choice without tools."""
    if value is None or value == AUTO:
        return ToolChoice()
    if value == NO_CALL:
        return ToolChoice(NO_CALL)
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if value != REQUIRED and not isinstance(name, str):
        raise UsageError(
            f"tool_choice must be auto, none, required or "
            f'{{"type": "function", "function": {{"name": ..}}}}; got {str(value)[:100]!r}.'
        )
    if not tools:
        raise UsageError("tool_choice asks for a call, but the request has no tools.")
    if name is not None and name not in {tool.name for tool in tools}:
        raise UsageError(
            f"tool_choice names {name!r}, which is not among the tools: {', '.join(t.name for t in tools)}."
        )
    return ToolChoice(REQUIRED, name or "")


def read_response_format(value: Any) -> Mapping[str, Any] | None:
    """Return the schema that OpenAI's response_format asks for, None for free text. Raises UsageError."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    wanted = value.get("json_schema") if isinstance(value, Mapping) else None
    schema = wanted.get("schema") if isinstance(wanted, Mapping) else None
    if kind == "json_schema" and isinstance(schema, Mapping):
        return schema
    raise UsageError(
        'response_format must have type text, json_object, or json_schema with {"json_schema": {"schema": ..}}; '
        f"got {str(value)[:100]!r}."
    )


class FirstCall:
    """Ends an output with the token that completes its first call of an offered function."""

    def __init__(
        self, codec: TextCodec, call_format: CallFormat, tools: Sequence[Tool], splitter: ThinkSplitter
    ) -> None:
        self._stream, self._splitter = codec.stream(), splitter
        self._headers = call_format.headers(tools) if call_format.headers is not None else None
        self._scanner, self._names = call_format.scanner(tools), {tool.name for tool in tools}

    def ends(self, token: int) -> bool:
        """Take the next token of the output."""
        text = self._splitter.push(self._stream.push([token]))[1]
        self._scanner.feed(self._headers.push(text) if self._headers is not None else text)
        return any(self._scanner.name_of(call) in self._names for call in self._scanner.calls)
