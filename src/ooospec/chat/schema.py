"""Read tool definitions: OpenAI form, bare functions, BFCL's type names, and API-Bank's prose."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from ooospec.core import Slot, Tool
from ooospec.errors import ToolsError

_TYPE_NAMES = {
    "dict": "object", "float": "number", "double": "number", "tuple": "array", "list": "array", "set": "array",
    "str": "string", "char": "string", "int": "integer", "long": "integer", "short": "integer", "byte": "integer",
    "bool": "boolean", "hashmap": "object", "arraylist": "array", "any": "", "none": "null",
}  # fmt: skip
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_BRANCHES = 32
"""Branches of one union that are looked at."""
_LITERAL = ("default", "const", "enum", "example", "examples")
_BAD_TARGETS = (TypeError, ValueError, AttributeError, KeyError, IndexError, RecursionError)
"""What `referencing` raises on schemas that are none: numbers for maps, maps for names."""
_MAPS = ("properties", "$defs", "definitions", "patternProperties")


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


class _Resolver:
    """Follows `$ref`s within the schema (pointers, anchors, ids), each once, merges unions; linear in the schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._document: Any = None  # a resolver, made for the first reference
        self._known: dict[str, Mapping[str, Any]] = {}

    def resolve(self, schema: Any, depth: int = 0) -> Mapping[str, Any]:
        """Return the schema with its outermost references and unions resolved."""
        if not isinstance(schema, Mapping) or depth > MAX_BRANCHES:
            return {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            own = {key: value for key, value in schema.items() if key != "$ref"}
            return self.resolve({**self._referred(reference, depth), **own}, depth + 1)
        for union in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(union)
            if isinstance(branches, list) and "type" not in schema:
                return _merged(schema, [self.resolve(branch, depth + 1) for branch in branches[:MAX_BRANCHES]])
        return schema

    def _referred(self, reference: str, depth: int) -> Mapping[str, Any]:
        if reference not in self._known:
            self._known[reference] = {}  # what refers to itself finds nothing there
            try:
                if self._document is None:
                    self._document = Registry().with_resource("", DRAFT202012.create_resource(self._root)).resolver()
                self._known[reference] = self.resolve(self._document.lookup(reference).contents, depth + 1)
            except (Unresolvable, *_BAD_TARGETS):
                pass  # what points nowhere, or outside the schema, allows everything
        return self._known[reference]


def _merged(schema: Mapping[str, Any], branches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Merge a union: all types; choices only if every branch but null lists its own."""
    types = list(dict.fromkeys(t for branch in branches for t in _types(branch)))
    listed = [_choices(branch, ()) for branch in branches if _types(branch) != ("null",)]
    choices = [choice for part in listed for choice in part] if all(listed) else []
    merged = {key: value for branch in branches[::-1] for key, value in branch.items() if key not in ("const", "enum")}
    return {**merged, **schema, "type": types, **({"enum": choices} if choices else {})}


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
    resolver = _Resolver(parameters)
    parameters = resolver.resolve(parameters)
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return ()
    required = parameters.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    slots = []
    for name, raw in properties.items():
        schema = resolver.resolve(raw)
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
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _LITERAL:
            result[key] = value
        elif key in _MAPS and isinstance(value, Mapping):
            result[key] = {name: normalize_schema(part) for name, part in value.items()}
        else:
            result[key] = normalize_schema(value)
    if isinstance(schema.get("type"), str):
        types = _types(schema)
        if types:
            result["type"] = types[0]
        else:
            result.pop("type")
    return result


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give every tool the form that chat templates expect, with JSON Schema type names."""
    listed = []
    for tool in tools:
        function = dict(tool.get("function", tool))
        if "parameters" in function:
            function["parameters"] = normalize_schema(function["parameters"])
        listed.append({"type": "function", "function": function})
    return listed


# ---------------------------------------------------------------- API-Bank's prose

_PROSE_START = re.compile(r"use the following tools:\s*\n")
_PROSE_END = "\n\n**Only generate"
_PROSE_ENTRY = re.compile(r"^(?=\d+\. )", re.MULTILINE)
_PROSE_HEAD = re.compile(r"\d+\. (?:Name: )?([\w.\-]+)(?:\nDescription: |: )")
_PROSE_PARAMETERS = "\nParameters: "


def prose_tools(system: str) -> tuple[Tool, ...]:
    """Read tools that a system prompt lists as prose (API-Bank); empty where it has no such list."""
    start = _PROSE_START.search(system)
    if start is None:
        return ()
    end = system.find(_PROSE_END, start.end())
    tools = []
    for entry in _PROSE_ENTRY.split(system[start.end() : end if end >= 0 else len(system)]):
        head = _PROSE_HEAD.match(entry)
        text, found, written = entry.rstrip().rpartition(_PROSE_PARAMETERS)
        if head is None or not found or head.end() > len(text) or not (written[:1] == "{" and written[-1] == "}"):
            continue
        try:
            parameters = ast.literal_eval(written)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        schema = {"type": "object", "properties": parameters, "required": list(parameters)}
        tools.append(Tool(head[1], text[head.end() :].strip(), _slots(schema)))
    return tuple(tools)
