"""Read tool definitions: OpenAI form, bare functions, BFCL's type names, and API-Bank's prose."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ooospec.core import Slot, Tool
from ooospec.errors import ToolsError

_TYPE_NAMES = {
    "dict": "object", "float": "number", "double": "number", "tuple": "array", "list": "array", "set": "array",
    "str": "string", "int": "integer", "long": "integer", "bool": "boolean", "any": "", "none": "null",
}  # fmt: skip
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_REF_DEPTH = 16


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    known: list[str] = []
    for name in names:
        if not isinstance(name, str):
            continue
        base = name.split("(")[0].split("[")[0].strip().lower()
        mapped = _TYPE_NAMES.get(base, base)
        if mapped in _JSON_TYPES and mapped not in known:
            known.append(mapped)
    return tuple(known)


def _resolve(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """Follow local `$ref`s and merge the first usable branch of anyOf/oneOf/allOf."""
    if not isinstance(schema, Mapping) or depth > MAX_REF_DEPTH:
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
        return _resolve({**found, **{k: v for k, v in schema.items() if k != "$ref"}}, root, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(union)
        if isinstance(branches, list) and "type" not in schema:
            resolved = [_resolve(branch, root, depth + 1) for branch in branches]
            types = [t for branch in resolved for t in _types(branch)]
            choices = [c for branch in resolved for c in _choices(branch, _types(branch))]
            merged = {k: v for branch in resolved[::-1] for k, v in branch.items()}
            return {**merged, **schema, "type": list(dict.fromkeys(types)), **({"enum": choices} if choices else {})}
    return schema


def _choices(schema: Mapping[str, Any], types: tuple[str, ...]) -> tuple[Any, ...]:
    if "const" in schema:
        return (schema["const"],)
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return tuple(values)
    return (True, False) if types == ("boolean",) else ()


def _slots(parameters: Any) -> tuple[Slot, ...]:
    if not isinstance(parameters, Mapping):
        return ()
    root = parameters
    parameters = _resolve(parameters, root)
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return ()
    required = parameters.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    slots = []
    for name, raw in properties.items():
        schema = _resolve(raw, root)
        types = _types(schema)
        description = str(schema.get("description") or "")
        slots.append(Slot(str(name), types, str(name) in names, description, _choices(schema, types)))
    return tuple(slots)


def read_tools(tools: Any) -> tuple[Tool, ...]:
    """Read a tool list: `[{"type": "function", "function": {...}}]` or the bare functions.

    Raises ToolsError naming the entry that is wrong.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise ToolsError(f"Tools must be a JSON list of functions; got {_kind(tools)}. Wrap a single function in [ ].")
    result = []
    for index, entry in enumerate(tools):
        function = entry.get("function", entry) if isinstance(entry, Mapping) else entry
        if not isinstance(function, Mapping):
            raise ToolsError(f"Tool {index} must be an object with a name; got {_kind(function)}.")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ToolsError(
                f"Tool {index} needs a name that is a non-empty string; got {name!r}. "
                'Expected {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}.'
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ToolsError(f"Tool {name!r}: parameters must be a JSON Schema object; got {_kind(parameters)}.")
        result.append(Tool(name, str(function.get("description") or ""), _slots(parameters)))
    return tuple(result)


def _kind(value: Any) -> str:
    shown = json.dumps(value, default=str)
    return f"{type(value).__name__} {shown if len(shown) < 60 else shown[:57] + '...'}"


def normalize_schema(schema: Any) -> Any:
    """Rewrite foreign type names (BFCL's `dict`, `float`, `tuple`, Python's) as JSON Schema ones, recursively."""
    if isinstance(schema, list):
        return [normalize_schema(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: normalize_schema(value) for key, value in schema.items()}
    if isinstance(schema.get("type"), str):
        types = _types(schema)
        if types:
            result["type"] = types[0]
        else:
            result.pop("type")
    return result


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give every tool the form that chat templates expect, with JSON Schema type names."""
    return [{"type": "function", "function": normalize_schema(tool.get("function", tool))} for tool in tools]


# ---------------------------------------------------------------- API-Bank's prose

_PROSE_START = re.compile(r"use the following tools:\s*\n")
_PROSE_END = "\n\n**Only generate"
_PROSE_TOOL = re.compile(
    r"^\d+\. (?:Name: )?(?P<name>[\w.\-]+)(?:\nDescription: |: )(?P<text>.*?)"
    r"\nParameters: (?P<parameters>\{.*?\})[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


def prose_tools(system: str) -> tuple[Tool, ...]:
    """Read tools that a system prompt lists as prose (API-Bank); empty where it has no such list."""
    start = _PROSE_START.search(system)
    if start is None:
        return ()
    end = system.find(_PROSE_END, start.end())
    tools = []
    for match in _PROSE_TOOL.finditer(system, start.end(), end if end >= 0 else len(system)):
        try:
            parameters = ast.literal_eval(match["parameters"])
        except (ValueError, SyntaxError):
            continue
        schema = {"type": "object", "properties": parameters, "required": list(parameters)}
        tools.append(Tool(match["name"], match["text"].strip(), _slots(schema)))
    return tuple(tools)
