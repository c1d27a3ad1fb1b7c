"""Read the tools of a request off its rendered prompt, where nothing else is at hand."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from ooospec.chat.schema import read_tools
from ooospec.core import Tool
from ooospec.errors import ToolsError

_OBJECT = re.compile(r'\{\s*"(?:type|name|function)"\s*:')
MAX_TRIES, MAX_CHARS = 2000, 500_000
"""Objects and characters that are looked at."""


def tools_in_prompt(prompt: str) -> tuple[Tool, ...]:
    """Return the functions that a prompt describes as JSON objects, as chat templates write them.

    Each function once, in the order of the prompt; objects that only call a function are none. Linear in the prompt.
    """
    decoder, found, at = json.JSONDecoder(), dict[str, Tool](), 0
    for match in itertools.islice(_OBJECT.finditer(prompt[:MAX_CHARS]), MAX_TRIES):
        if match.start() < at:
            continue
        try:
            value, at = decoder.raw_decode(prompt, match.start())
        except json.JSONDecodeError as error:
            at = error.pos
            continue
        except (ValueError, RecursionError):
            break
        function = value.get("function", value)
        if _describes(function):
            try:
                (tool,) = read_tools([value])
            except ToolsError:
                continue
            found.setdefault(tool.name, tool)
    return tuple(found.values())


def _describes(function: Any) -> bool:
    """Tell a description from a call: it has parameters that are a schema, or a description and no arguments."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or "arguments" in function:
        return False
    parameters = function.get("parameters")
    schema = isinstance(parameters, Mapping) and ("properties" in parameters or parameters.get("type") == "object")
    return schema or (parameters is None and isinstance(function.get("description"), str))
