"""Read the tools of a request off its rendered prompt, where nothing else is at hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ooospec.chat.schema import prose_tools, read_tools
from ooospec.core import Tool
from ooospec.errors import ToolsError

_OBJECT = re.compile(r'\{\s*"(?:type|name|function)"\s*:')
MAX_TRIES = 2000
"""Objects that are looked at."""


def tools_in_prompt(prompt: str) -> tuple[Tool, ...]:
    """Return the functions that a prompt describes: JSON objects as chat templates write them, or API-Bank's prose.

    Each function once, in the order of the prompt; objects that only call a function are none.
    """
    decoder, found, at = json.JSONDecoder(), dict[str, Tool](), 0
    for match in _OBJECT.finditer(prompt):
        if match.start() < at or len(found) > MAX_TRIES:
            continue
        try:
            value, at = decoder.raw_decode(prompt, match.start())
        except (ValueError, RecursionError):
            continue
        function = value.get("function", value)
        if _describes(function):
            try:
                (tool,) = read_tools([value])
            except ToolsError:
                continue
            found.setdefault(tool.name, tool)
    return tuple(found.values()) or prose_tools(prompt)


def _describes(function: Any) -> bool:
    """Tell a description from a call: it has parameters that are a schema, or a description and no arguments."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or "arguments" in function:
        return False
    parameters = function.get("parameters")
    schema = isinstance(parameters, Mapping) and ("properties" in parameters or parameters.get("type") == "object")
    return schema or (parameters is None and isinstance(function.get("description"), str))
