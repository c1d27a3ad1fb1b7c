"""Render messages and tools into a prompt with the target's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2

from ooospec.chat.formats.registry import NO_SIGN, CallFormat, detect_format
from ooospec.chat.schema import openai_tools, prose_tools, read_tools
from ooospec.core import Tool
from ooospec.errors import UsageError

Message = Mapping[str, Any]
TEXT_PARTS = ("text", "refusal")
ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that renders chats."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render a conversation."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request as everything after the front door sees it."""

    prompt: str
    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]
    """What was said; without a system prompt that only lists tools as prose, which `tools` holds."""
    style_key: str
    call_format: str
    """Name of the format that the prompt asks for calls in."""
    thinking: bool = False
    """The prompt ends inside a reasoning block."""
    reasons: bool = False
    """The answer may begin with a reasoning block."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt that goes to the target as it is, as text or token ids, in place of messages."""

    text: str = ""
    ids: tuple[int, ...] = ()

    def conversation(self) -> Conversation:
        """Give it the form of a rendered request without tools."""
        return Conversation(self.text, (), (), "raw", "json")


_TOOL_PROMPT = """You may call one or more functions to assist with the user query.

Functions, as JSON:
{tools}

For each function call return a JSON object with the function's name and arguments:
{{"name": <function-name>, "arguments": <args-json-object>}}"""


def check_messages(messages: Any) -> tuple[Message, ...]:
    """Return the messages, or raise UsageError saying which one is wrong."""
    if isinstance(messages, str):
        return ({"role": "user", "content": messages},)
    if not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"Messages must be a non-empty list of {{role, content}}; got {type(messages).__name__}.")
    wrong = [i for i, m in enumerate(messages) if not isinstance(m, Mapping) or m.get("role") not in ROLES]
    if wrong:
        first = messages[wrong[0]]
        role = first.get("role") if isinstance(first, Mapping) else type(first).__name__
        more = f" ({len(wrong)} messages are wrong in all)" if len(wrong) > 1 else ""
        raise UsageError(f"Message {wrong[0]}: role must be one of {', '.join(ROLES)}; got {str(role)[:50]!r}.{more}")
    return tuple(messages)


def read_request(messages: Any, tools: Any = None) -> tuple[tuple[Message, ...], tuple[Tool, ...], tuple[Message, ...]]:
    """Return (checked messages, tools, what was said); tools from `tools` or from the prose of a system prompt.

    What was said lacks a system prompt that lists tools as prose. Raises UsageError or ToolsError.
    """
    checked = check_messages(messages)
    known = read_tools(tools)
    if known or checked[0]["role"] not in ("system", "developer"):
        return checked, known, checked
    known = prose_tools(str(checked[0].get("content") or ""))
    return checked, known, checked[1:] if known else checked


def render(tokenizer: ChatTokenizer, messages: Any, tools: Any = None, call_format: str | None = None) -> Conversation:
    """Render a request and read its tools, from `tools` or from the prose of a system prompt.

    A template that knows no tools (SmolLM2) gets them in a system message. Raises UsageError or ToolsError.
    """
    checked, known, said = read_request(messages, tools)
    kind = "template" if known and tools else "prose" if known else "none"
    template = str(tokenizer.chat_template or "")
    check_content(checked)
    rendered = [_plain_message(message) for message in checked]
    if "developer" not in template:  # a role that templates without it pass over in silence
        rendered = [{**m, "role": "system"} if m["role"] == "developer" else m for m in rendered]
    if "tool_calls" not in template:
        rendered = [_with_calls_as_text(message) for message in rendered]
    if kind == "template" and "tools" not in template:
        rendered = _with_tool_prompt(rendered, openai_tools(tools))
        kind = "listed"
    listed = openai_tools(tools) if kind == "template" else None
    try:
        prompt = tokenizer.apply_chat_template(rendered, tools=listed, add_generation_prompt=True, tokenize=False)
    except (jinja2.TemplateError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(_refusal(checked, error)) from error
    # only those who write the prompt's instructions choose the format, never the words of a dialogue
    if call_format is None:
        asked = {"prose": str(checked[0].get("content") or "")}.get(kind, "")
        call_format = (template_format(tokenizer) if kind == "template" else detect_format(asked))[0].name
    thinking = str(prompt).rstrip().endswith("<think>")
    reasons = "<think>" in template and not str(prompt).rstrip().endswith("</think>")
    return Conversation(str(prompt), known, said, kind, call_format, thinking, reasons)


def _refusal(checked: Sequence[Message], error: Exception) -> str:
    """Say why a template failed: at calls whose arguments are no object, if there are any."""
    for index, message in enumerate(checked):
        for call in message.get("tool_calls") or ():
            given = call["function"].get("arguments")
            if not isinstance(_plain_call(call)["function"].get("arguments"), Mapping):
                return (
                    f"Message {index}: the target's chat template needs arguments of a call that are a JSON object; "
                    f"got {str(given)[:50]!r} ({error})."
                )
    return f"The target's chat template does not take these messages: {error}"


def check_content(messages: Sequence[Message]) -> None:
    """Raise UsageError for content that is no text, and for earlier calls that are none."""
    _check_parts(messages)
    _check_calls(messages)


def _check_parts(messages: Sequence[Message]) -> None:
    """Refuse content that is no text: targets here read nothing else."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str | list | None):
            kind = type(content).__name__
            raise UsageError(f"Message {index}: content must be text, a list of text parts, or null; got {kind}.")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if kind not in TEXT_PARTS:
                raise UsageError(f"Message {index}: content may hold parts of type text only; got {str(kind)[:50]!r}.")


def _check_calls(messages: Sequence[Message]) -> None:
    """Refuse earlier calls that are none."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list | None):
            raise UsageError(f"Message {index}: tool_calls must be a list; got {type(calls).__name__}.")
        for number, call in enumerate(calls or ()):
            function = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                raise UsageError(
                    f"Message {index}: tool_calls[{number}] must be an object with a function that has a name; "
                    f"got {str(call)[:50]!r}."
                )


def template_format(tokenizer: ChatTokenizer) -> tuple[CallFormat, str]:
    """Return the format that a target's template asks for, or else the one its vocabulary has tokens for; and why."""
    found, why = detect_format(str(tokenizer.chat_template or ""))
    if why != NO_SIGN:
        return found, f"of its chat template: {why}"
    found, why = detect_format("\n".join(getattr(tokenizer, "get_added_vocab", dict)()))
    return found, f"of its chat template and vocabulary: {why}" if why == NO_SIGN else f"of its vocabulary: {why}"


def _plain_message(message: Message) -> Message:
    """Give a message the form every template takes: text content, arguments of calls as objects."""
    plain = {**message, "content": content_text(message)}
    if isinstance(message.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError):
        return call


def _with_calls_as_text(message: Message) -> Message:
    """Write the calls of an earlier answer into its text, as the tool prompt asks for them."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    texts = [
        json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)
        for function in functions
        if isinstance(function, Mapping)
    ]
    return {**message, "content": "\n".join(filter(None, [message["content"], *texts]))} if texts else message


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content, which may be in parts."""
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") or part.get("refusal") or "" for part in content if isinstance(part, Mapping))
        return "\n".join(map(str, texts))
    return "" if content is None else str(content)


def _with_tool_prompt(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    listing = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TOOL_PROMPT.format(tools=listing)
    if messages[0]["role"] in ("system", "developer"):
        return [{**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def plain_text(message: Mapping[str, Any]) -> str:
    """Return what a message says, tool calls and tool results included, for the sidecar to read."""
    text = content_text(message)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            text += f"\ncall {function.get('name')}: {function.get('arguments')}"
    return f"result: {text}" if message.get("role") == "tool" else text
