"""What the sidecar reads and is asked: compact tool signatures, the dialogue, and one question a slot.

Every question is the beginning of a call that the model would go on with, so an instruct model answers it zero-shot:
`To do this, I call the function "` for the function, `{"name": "T", "arguments": {"S":` for slot S of tool T.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ooospec.sidecar.protocol import ToolSignature, ToolSlot, Turn

if TYPE_CHECKING:  # this module is text only
    from ooospec.target.loading import LoadedModel

MAX_DESCRIPTION = 160
INTRODUCTION = "Answer with one function call as JSON. Functions:\n"
FUNCTION_QUESTION = 'To do this, I call the function "'
NEUTRAL_DIALOGUE = (Turn("user", "Hello."),)
"""A dialogue that asks for nothing: shows which names the model prefers whatever is asked."""
QUESTION_HEAD = '{"name": "'


def _short(text: str, limit: int = MAX_DESCRIPTION) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _type(slot: ToolSlot) -> str:
    if slot.choices:
        return "|".join(json.dumps(choice, ensure_ascii=False) for choice in slot.choices[:12])
    return "|".join(slot.types) or "any"


def signature(tool: ToolSignature) -> str:
    """Write a tool as a signature with one line a slot."""
    lines = [f"{tool.name}: {_short(tool.description)}"]
    for slot in tool.slots:
        optional = "" if slot.required else "?"
        lines.append(f"  {slot.name}{optional}: {_type(slot)} - {_short(slot.description)}".rstrip(" -"))
    return "\n".join(lines)


def chat_messages(tools: Sequence[ToolSignature], dialogue: Sequence[Turn]) -> list[dict[str, str]]:
    """Build the chat that is the wave's shared prefix: signatures first, so that they can be cached over requests."""
    system = INTRODUCTION + "\n".join(signature(tool) for tool in tools)
    messages = [{"role": "system", "content": system}]
    for turn in dialogue:
        role = turn.role if turn.role in ("user", "assistant") else "user"
        if not turn.text:
            continue
        if messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + turn.text
        else:
            messages.append({"role": role, "content": turn.text})
    return messages


def prefix_ids(loaded: LoadedModel, tools: Sequence[ToolSignature], dialogue: Sequence[Turn]) -> list[int]:
    """Render and tokenize the shared prefix with the sidecar's own chat template."""
    messages = chat_messages(tools, dialogue)
    text = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return loaded.codec.encode(str(text))


def slot_question(tool: str, slot: str) -> str:
    """Write the beginning of a call up to the colon of the slot's key."""
    return f'{QUESTION_HEAD}{tool}", "arguments": {{{json.dumps(slot, ensure_ascii=False)}:'
