"""Loaders of public training sets (formats: docs/training.md). Rows that do not fit are counted, not mended."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooospec.chat.schema import normalize_schema
from ooospec.errors import ToolsError, UsageError
from ooospec.train.records import Call, Example, fault, made_call

Row = tuple[str, Any]
"""A row of a file with a name for it."""
MAX_CALLS = 8
_REFERENCE = re.compile(r"API_call_\d+|\b[A-Za-z_]\w*\.\w+$")
"""A value that stands for an earlier call's result."""


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": normalize_schema(function)}


def _function(name: str, description: str, slots: Mapping[str, Any], required: Iterable[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": dict(slots), "required": [r for r in required if r in slots]}
    return _tool({"name": name.strip(), "description": description, "parameters": schema})


# ---------------------------------------------------------------- Schema-Guided Dialogue


def _sgd_rows(folder: Path) -> Iterator[Row]:
    schemas = {s["service_name"]: s for s in json.loads((folder / "schema.json").read_text("utf-8"))}
    for file in sorted(folder.glob("dialogues_*.json")):
        for dialogue in json.loads(file.read_text("utf-8")):
            yield f"sgd-{dialogue['dialogue_id']}", (dialogue, [schemas[name] for name in dialogue["services"]])


def _sgd(name: str, row: Any) -> Iterator[Example]:
    """Every service call, after the turns, calls and results before it."""
    dialogue, services = row
    tools = tuple(tool for service in services for tool in _sgd_tools(service))
    history: list[dict[str, Any]] = []
    for number, turn in enumerate(dialogue["turns"]):
        for frame in turn["frames"]:
            call = frame.get("service_call")
            if call is not None:
                given = {slot: value for slot, value in call["parameters"].items() if value != "dontcare"}
                yield Example(
                    id=f"{name}-{number}", source="sgd", messages=tuple(history), tools=tools,
                    calls=(Call(call["method"], given),),
                )  # fmt: skip
                history += made_call(f"call_{number}", call["method"], given, frame.get("service_results", [])[:1])
        history.append(_message("user" if turn["speaker"] == "USER" else "assistant", turn["utterance"]))


def _sgd_tools(service: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    slots = {slot["name"]: slot for slot in service["slots"]}
    for intent in service["intents"]:
        names = [*intent["required_slots"], *intent["optional_slots"]]
        described = {name: _sgd_slot(slots[name]) for name in names}
        yield _function(intent["name"], intent["description"], described, intent["required_slots"])


def _sgd_slot(slot: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "string", "description": slot["description"]}
    if slot["is_categorical"] and slot["possible_values"]:
        schema["enum"] = list(slot["possible_values"])
    return schema


# ---------------------------------------------------------------- Seal-Tools

_SEAL_LIST = re.compile(r"api_list = (\[.*\])\s*task_instruction = (.*?)(?:\s*Output:\s*)?\Z", re.DOTALL)


def _seal_rows(folder: Path) -> Iterator[Row]:
    for file in sorted((folder / "dataset_for_finetune").glob("*.json")):
        for number, row in enumerate(json.loads(file.read_text("utf-8"))):
            yield f"seal-{file.stem}-{number}", row


def _seal(name: str, row: Any) -> Iterator[Example]:
    found = _SEAL_LIST.search(row["conversations"][0]["value"])
    if found is None:
        raise ValueError("no api_list")
    answer = ast.literal_eval(row["conversations"][1]["value"])
    calls = tuple(Call(call["api"], call["parameters"]) for call in answer)
    tools = tuple(
        _function(a["api_name"], a["api_description"], a["parameters"], a.get("required", ()))
        for a in ast.literal_eval(found[1])
    )
    said = (_message("user", found[2].strip().strip('"')),)
    yield Example(id=name, source="seal_tools", messages=said, tools=tools, calls=calls)


# ---------------------------------------------------------------- ToolRL's selection of ToolACE, xLAM and Hammer

_RLLA_TOOL = re.compile(
    r"\d+\. Name: (?P<name>.*?)\nDescription: (?P<text>.*?)\nParameters: (?P<slots>\{.*?\})\n", re.DOTALL
)
_TAGGED = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
_TURNS = re.compile(r"<(user|response|tool_call|obs)>(.*?)</\1>", re.DOTALL)
_ROLES = {"user": "user", "response": "assistant", "tool_call": "assistant", "obs": "user"}


def _rlla_rows(folder: Path) -> Iterator[Row]:
    for number, row in enumerate(json.loads((folder / "rlla_sft.json").read_text("utf-8"))):
        yield f"rlla-{number}", row


def _rlla(name: str, row: Any) -> Iterator[Example]:
    tools = tuple(
        _function(tool["name"], tool["text"].strip(), _rlla_slots(json.loads(tool["slots"])), ())
        for tool in _RLLA_TOOL.finditer(row["instruction"])
    )
    tagged = _TAGGED.search(row["output"])
    lines = tagged[1].splitlines() if tagged is not None else []
    yield Example(
        id=name, source="toolrl_rlla",
        messages=tuple(_message(_ROLES[kind], text.strip()) for kind, text in _TURNS.findall(row["input"])),
        tools=tools, calls=tuple(Call(c["name"], c["parameters"]) for c in map(json.loads, filter(str.strip, lines))),
    )  # fmt: skip


def _rlla_slots(slots: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {
            "type": str(about.get("type", "")).split(",")[0],
            "description": str(about.get("description", "")),
            **({"default": about["default"]} if about.get("default") not in (None, "") else {}),
        }
        for name, about in slots.items()
    }


# ---------------------------------------------------------------- Glaive


def _glaive_rows(folder: Path) -> Iterator[Row]:
    for number, row in enumerate(json.loads((folder / "glaive_toolcall_en_demo.json").read_text("utf-8"))):
        yield f"glaive-{number}", row


def _glaive(name: str, row: Any) -> Iterator[Example]:
    """Every assistant turn after a user's: a function call, or the reply that needed none."""
    functions = json.loads(row["tools"]) if row.get("tools") else []
    tools = tuple(map(_tool, functions))
    history: list[dict[str, Any]] = []
    for number, message in enumerate(row["conversations"]):
        kind, value = message["from"], message["value"]
        if kind in ("function_call", "gpt") and history and history[-1]["role"] == "user":
            call = json.loads(value) if kind == "function_call" else None
            yield Example(
                id=f"{name}-{number}", source="glaive_demo", messages=tuple(history), tools=tools,
                calls=(Call(call["name"], call["arguments"]),) if call is not None else (),
            )  # fmt: skip
        history.append(_message("assistant" if kind in ("gpt", "function_call") else "user", value))


# ---------------------------------------------------------------- MTU-Bench

_MTU_LIST = re.compile(r"that you can use:\s*(?=\[)")
_MTU_LINE = re.compile(r"^\s*(user|assistant|function|observation):\s*(.*)$", re.IGNORECASE)
_MTU_ROLES = {"user": "user", "assistant": "assistant", "function": "assistant", "observation": "user"}


def _json_lines(folder: Path, pattern: str) -> Iterator[Row]:
    for file in sorted(folder.glob(pattern)):
        for number, line in enumerate(file.read_text("utf-8").splitlines()):
            yield f"{file.stem}-{number}", json.loads(line)


def _mtu_rows(folder: Path) -> Iterator[Row]:
    return _json_lines(folder, "*_eval.jsonl")


def _mtu(name: str, row: Any) -> Iterator[Example]:
    found = _MTU_LIST.search(row["question"])
    if found is None:
        raise ValueError("no list of tools")
    listed, rest = _leading_list(row["question"][found.end() :])
    answer = json.loads(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
    yield Example(
        id=f"mtu-{name}", source="mtu_bench",
        messages=_mtu_turns(rest), tools=tuple(_mtu_tool(tool) for tool in listed),
        calls=tuple(Call(tool.strip(), given) for tool, given in answer.items() if tool.strip()),
    )  # fmt: skip


def _leading_list(text: str) -> tuple[list[Any], str]:
    """Read the JSON or Python list that a text begins with; return it and the rest."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        end = text.index("]\n") + 1 if "]\n" in text else text.rindex("]") + 1
        value = ast.literal_eval(text[:end])
    return value, text[end:]


def _mtu_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    slots: dict[str, Any] = {}
    required: list[str] = []
    for key in ("required_parameters", "optional_parameters", "parameters"):
        entries = tool.get(key) or []
        for entry in entries:
            name = entry["name"] if isinstance(entry, Mapping) else str(entry)
            about = entry if isinstance(entry, Mapping) else {}
            default = entries[name] if isinstance(entries, Mapping) else None
            text = str(about.get("description", "")) + (f" Default: {default}." if default else "")
            slots[name] = {"type": str(about.get("type", "string")), "description": text.strip()}
            required += [name] if key == "required_parameters" else []
    return _function(str(tool["name"]), str(tool.get("description", "")), slots, required)


def _mtu_turns(text: str) -> tuple[dict[str, Any], ...]:
    turns: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = _MTU_LINE.match(line)
        if match is not None:
            turns.append((_MTU_ROLES[match[1].lower()], match[2].strip()))
        elif turns and line.strip():
            turns[-1] = turns[-1][0], f"{turns[-1][1]}\n{line.strip()}"
    return tuple(_message(*turn) for turn in turns)


# ---------------------------------------------------------------- Microsoft's retail dialogues

_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id")


def _retail_rows(folder: Path) -> Iterator[Row]:
    return _json_lines(folder, "*.jsonl")


def _retail(name: str, row: Any) -> Iterator[Example]:
    history: list[dict[str, Any]] = []
    for number, message in enumerate(row["messages"]):
        made = message.get("tool_calls") or []
        if message["role"] == "assistant" and made:
            calls = tuple(Call(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in made)
            yield Example(
                id=f"retail-{name}-{number}", source="ms_foundry_retail", messages=tuple(history),
                tools=tuple(row["tools"]), calls=calls,
            )  # fmt: skip
        history.append({key: message[key] for key in _MESSAGE_KEYS if key in message})


@dataclass(frozen=True, slots=True)
class Source:
    """A training set: where it lies, under which licence, how to read it."""

    folder: str
    licence: str
    rows: Callable[[Path], Iterator[Row]]
    examples: Callable[[str, Any], Iterator[Example]]


SOURCES = {
    "toolrl_rlla": Source("toolrl_rlla", "Apache-2.0", _rlla_rows, _rlla),
    "seal_tools": Source("seal_tools", "Apache-2.0", _seal_rows, _seal),
    "glaive_demo": Source("glaive_demo", "Apache-2.0", _glaive_rows, _glaive),
    "sgd": Source("sgd/train", "CC BY-SA 4.0", _sgd_rows, _sgd),
    "mtu_bench": Source("mtu_bench", "Apache-2.0", _mtu_rows, _mtu),
    "ms_foundry_retail": Source("ms_foundry_retail", "MIT", _retail_rows, _retail),
}
ROW_FAULTS = (KeyError, IndexError, TypeError, AttributeError, ValueError, SyntaxError, OverflowError, RecursionError)
"""What reading rows of a form that is not the set's raises."""


def load_source(name: str, data: Path) -> tuple[list[Example], Counter[str]]:
    """Read a training set from `data`; returns the examples and what was left out, counted by reason.

    Raises UsageError where the set is unknown or its files are missing or damaged.
    """
    if name not in SOURCES:
        raise UsageError(f"Unknown training set {name!r}; choose from {', '.join(SOURCES)}.")
    source = SOURCES[name]
    if not (data / source.folder).is_dir():
        raise UsageError(f"No folder {data / source.folder} for training set {name}; give --data FOLDER that holds it.")
    kept, left_out = list[Example](), Counter[str]()
    try:
        for label, row in source.rows(data / source.folder):
            try:
                found = list(source.examples(label, row))
            except ROW_FAULTS:
                left_out["row of another form"] += 1
                continue
            for example in found:
                reason = _fault(example)
                left_out[reason] += bool(reason)
                kept += [] if reason else [example]
    except (*ROW_FAULTS, OSError) as error:
        raise UsageError(
            f"Training set {name} in {data / source.folder} is damaged or of another version "
            f"({type(error).__name__}: {str(error)[:120]})."
        ) from error
    if not kept:
        raise UsageError(f"Training set {name} in {data / source.folder} has no usable row: {dict(left_out)}.")
    return kept, +left_out


def _fault(example: Example) -> str:
    try:
        reason = fault(example)
        example.fingerprint()
    except ToolsError:
        return "tools that are no JSON Schema"
    except UsageError:
        return "messages that are no dialogue"
    except ROW_FAULTS:  # such as half a surrogate pair, or null for a schema
        return "row of another form"
    if reason:
        return reason
    if len(example.calls) > MAX_CALLS:
        return "too many calls"
    values = (value for call in example.calls for value in call.arguments.values())
    if any(isinstance(value, str) and _REFERENCE.fullmatch(value) for value in values):
        return "refers to an earlier result"
    return ""
