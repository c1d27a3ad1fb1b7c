"""Vary requests: other inventories, orders and prompt forms, so that a sidecar reads schemas and does not know them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ooospec.chat.template import content_text
from ooospec.train.records import Example, made_call

_PROSE = """You help the user in a dialogue and can use the following tools:
{tools}

**Only generate a tool call**, as JSON in this form:
<tool_call>
{{"name": "tool", "parameters": {{"parameter": "value"}}}}
</tool_call>"""
_TAGS = {"user": "user", "assistant": "response", "tool": "obs"}
_CLOSINGS = (
    "Now do what I asked for, with exactly one call.",
    "Given everything said so far, which single call comes next?",
    "Please answer with one function call and nothing else.",
    "Considering the dialogue above, make the one call that serves me.",
    "Use a tool for this. One call only, no explanation.",
    "Go on with the next step of this conversation by calling a single tool.",
)
"""Lines as applications put them under every request."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How much requests are varied."""

    max_tools: int = 4
    """Tools kept at most; the ones that are called always stay."""
    distractors: int = 1
    """At most so many tools of other requests are added."""
    prose: float = 0.4
    """Share of requests whose tools are listed as prose in the system prompt, as API-Bank does."""
    closing: float = 0.4
    """Share of requests that end with a line which asks for nothing new; in half of them, it is above the last turn."""
    midway: float = 0.8
    """Share of requests with several calls in which the first of them have been made already."""


def vary(example: Example, pool: Sequence[Mapping[str, Any]], variation: Variation, seed: int) -> Example:
    """Choose, mix and shuffle the tools of a request; the same seed gives the same request."""
    if not example.tools:
        return example
    chance = random.Random(f"{seed}-{example.id}")
    if len(example.calls) > 1 and chance.random() < variation.midway:
        example = after_calls(example, chance.randint(1, len(example.calls) - 1))
    called = {call.name for call in example.calls}
    called |= {call["function"]["name"] for m in example.messages for call in m.get("tool_calls") or ()}
    names = {tool["function"]["name"] for tool in example.tools}
    kept = [tool for tool in example.tools if tool["function"]["name"] in called]
    others = [tool for tool in example.tools if tool["function"]["name"] not in called]
    room = max(0, variation.max_tools - len(kept))
    kept += chance.sample(others, min(len(others), chance.randint(0 if kept else 1, room)))
    for tool in chance.sample(pool, min(len(pool), chance.randint(0, variation.distractors))):
        if tool["function"]["name"] not in names and len(kept) < variation.max_tools:
            names.add(tool["function"]["name"])
            kept.append(dict(tool))
    chance.shuffle(kept)
    example = msgspec.structs.replace(example, tools=tuple(kept))
    closing, below = chance.choice(_CLOSINGS), chance.random() < 0.5
    if chance.random() < variation.closing:
        example = with_closing(example, closing, below)
    return as_prose(example) if chance.random() < variation.prose else example


def after_calls(example: Example, count: int) -> Example:
    """Move the first `count` calls into the dialogue, each with a result; the others are still to be made."""
    messages = list(example.messages)
    for number, call in enumerate(example.calls[:count]):
        result = {"api_name": call.name, "input": call.arguments, "output": "done", "exception": None}
        messages += made_call(f"call_{number}", call.name, call.arguments, result)
    return msgspec.structs.replace(example, messages=tuple(messages), calls=example.calls[count:])


def with_closing(example: Example, line: str, below: bool) -> Example:
    """Put a line under the dialogue as a user's turn, or above its last turn if that is a user's."""
    messages = list(example.messages)
    if not below and messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": f"{line}\n\n{content_text(messages[-1])}"}
    else:
        messages.append({"role": "user", "content": line})
    return msgspec.structs.replace(example, messages=tuple(messages))


def as_prose(example: Example) -> Example:
    """Write tools and dialogue as prose, as API-Bank's prompts do; a request with odd function names stays as it is."""
    entries = []
    for number, tool in enumerate(example.tools, 1):
        function = tool["function"]
        name = str(function["name"])
        if not all(char.isalnum() or char in "_.-" for char in name):
            return example
        slots = dict((function.get("parameters") or {}).get("properties") or {})
        text = " ".join(str(function.get("description", "")).split())
        entries.append(f"{number}. Name: {name}\nDescription: {text}\nParameters: {slots}")
    said = "\n".join(text for m in example.messages if m["role"] in _TAGS for text in _said(m))
    rules = [content_text(m) for m in example.messages if m["role"] not in _TAGS]
    messages = (
        {"role": "system", "content": "\n\n".join([*rules, _PROSE.format(tools="\n".join(entries))])},
        {"role": "user", "content": f"Dialogue so far:\n{said}"},
    )
    return msgspec.structs.replace(example, messages=messages, tools=())


def _said(message: Mapping[str, Any]) -> Iterator[str]:
    """Write a message in tags; calls as JSON objects with `parameters`, results as observations."""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        made = {"name": function["name"], "parameters": json.loads(function["arguments"])}
        yield f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>"
    text = content_text(message).strip()
    if text:
        yield f"<{_TAGS[message['role']]}>{text}</{_TAGS[message['role']]}>"


def tool_pool(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """List the different tools of all examples."""
    return list({json.dumps(tool, sort_keys=True): tool for e in examples for tool in e.tools}.values())
