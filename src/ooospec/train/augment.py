"""Vary requests: other inventories, orders and prompt forms, so that a sidecar reads schemas and does not know them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ooospec.chat.template import plain_text
from ooospec.train.records import Example

_PROSE = """You help the user in a dialogue and can use the following tools:
{tools}

**Only generate a tool call**, as JSON in this form:
<tool_call>
{{"name": "tool", "parameters": {{"parameter": "value"}}}}
</tool_call>"""
_TAGS = {"user": "user", "assistant": "response", "tool": "obs"}


@dataclass(frozen=True, slots=True)
class Variation:
    """How much requests are varied."""

    max_tools: int = 4
    """Tools kept at most; the ones that are called always stay."""
    distractors: int = 1
    """At most so many tools of other requests are added."""
    prose: float = 0.25
    """Share of requests whose tools are listed as prose in the system prompt, as API-Bank does."""


def vary(example: Example, pool: Sequence[Mapping[str, Any]], variation: Variation, seed: int) -> Example:
    """Choose, mix and shuffle the tools of a request; the same seed gives the same request."""
    if not example.tools:
        return example
    chance = random.Random(f"{seed}-{example.id}")
    called = {call.name for call in example.calls}
    names = {tool["function"]["name"] for tool in example.tools}
    kept = [tool for tool in example.tools if tool["function"]["name"] in called]
    others = [tool for tool in example.tools if tool["function"]["name"] not in called]
    room = max(0, variation.max_tools - len(kept))
    kept += chance.sample(others, min(len(others), chance.randint(0 if kept else 1, max(room, 1))))
    for tool in chance.sample(pool, min(len(pool), chance.randint(0, variation.distractors))):
        if tool["function"]["name"] not in names and len(kept) < variation.max_tools:
            names.add(tool["function"]["name"])
            kept.append(dict(tool))
    chance.shuffle(kept)
    example = msgspec.structs.replace(example, tools=tuple(kept))
    return as_prose(example) if chance.random() < variation.prose else example


def as_prose(example: Example) -> Example:
    """Write tools and dialogue as prose, as API-Bank's prompts do; a request with nested schemas stays as it is."""
    entries = []
    for number, tool in enumerate(example.tools, 1):
        function = tool["function"]
        name = str(function["name"])
        if not all(char.isalnum() or char in "_.-" for char in name):
            return example
        slots = dict(function.get("parameters", {}).get("properties", {}))
        text = " ".join(str(function.get("description", "")).split())
        entries.append(f"{number}. Name: {name}\nDescription: {text}\nParameters: {slots}")
    said = "\n".join(
        f"<{_TAGS[m['role']]}>{plain_text(m).strip()}</{_TAGS[m['role']]}>"
        for m in example.messages
        if m["role"] in _TAGS
    )
    messages = (
        {"role": "system", "content": _PROSE.format(tools="\n".join(entries))},
        {"role": "user", "content": f"Dialogue so far:\n{said}"},
    )
    return msgspec.structs.replace(example, messages=messages, tools=())


def tool_pool(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """List the different tools of all examples."""
    return list({json.dumps(tool, sort_keys=True): tool for e in examples for tool in e.tools}.values())
