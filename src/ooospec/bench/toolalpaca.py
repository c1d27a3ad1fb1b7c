"""Read ToolAlpaca's simulated evaluation set: tools described in prose, gold calls as JSON text with quirks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooospec.bench.gold import GoldCall, text_gold

_PARAMETERS = re.compile(r"^Parameters: (\{.*\})\s*$", re.MULTILINE)
_REQUIRED = "Required. "
_CHOICES = re.compile(r"^One of: \[(?P<listed>[^\]]*)\]\.?\s*")
_TYPE = re.compile(r"^(?P<type>[A-Za-z]+)(?:\[(?P<item>[A-Za-z]+))?(?P<more>[^.]*)\.?\s*")
ASK_USER = "getDetails"
"""A pseudo tool in the gold answers that is not among the functions: asks the user back."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API with its requests."""

    name: str
    tools: tuple[dict[str, Any], ...]
    instructions: tuple[str, ...]
    gold: tuple[tuple[GoldCall, ...], ...]


def read_toolalpaca(path: Path) -> Iterator[Api]:
    """Yield the APIs of `eval_simulated.json` with tools in JSON Schema."""
    for api in json.loads(path.read_text("utf-8")):
        functions = {name: text for name, text in api["Function_Description"].items() if name != "components"}
        yield Api(
            api["Name"],
            tuple(_tool(name, text) for name, text in functions.items()),
            tuple(api["Instructions"]),
            tuple(tuple(map(_gold, calls)) for calls in api["Golden_Answers"]),
        )


def _tool(name: str, text: str) -> dict[str, Any]:
    """Turn "description, Parameters: {..}, Output: .." into a function definition."""
    found = _PARAMETERS.search(text)
    description = text[: found.start()].strip() if found is not None else text.strip()
    described: Mapping[str, str] = json.loads(found[1]) if found is not None else {}
    schema = {
        "type": "object",
        "properties": {slot: _slot(about) for slot, about in described.items()},
        "required": [slot for slot, about in described.items() if about.startswith(_REQUIRED)],
    }
    return {"name": name, "description": description, "parameters": schema}


def _slot(about: str) -> dict[str, Any]:
    """Read "Required. type. One of: [..]. text"."""
    rest = about.removeprefix(_REQUIRED)
    typed = _TYPE.match(rest)
    if typed is None:
        return {"description": rest}
    kind = typed["type"].lower()
    schema: dict[str, Any] = {"type": kind}
    if kind == "array":
        schema["items"] = {"type": (typed["item"] or "string").lower()}
    rest = rest[typed.end() :]
    choices = _CHOICES.match(rest)
    if choices is not None:
        schema["enum"] = [choice.strip() for choice in choices["listed"].split(",")]
        rest = rest[choices.end() :]
    return {**schema, "description": rest.strip()}


def _gold(call: Mapping[str, str]) -> GoldCall:
    """Read a gold call; arguments that refer to an earlier result (`${id from search}`) do not parse: unknown."""
    name = call["Action"].removeprefix("[Optional]")
    try:
        arguments = json.loads(call["Action_Input"])
    except ValueError:
        return GoldCall(name, None)
    return text_gold(name, arguments) if isinstance(arguments, dict) else GoldCall(name, None)
