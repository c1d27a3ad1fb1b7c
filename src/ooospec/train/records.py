"""One form for every training example: a request as a target gets it, and the calls that answer it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ooospec.chat.template import plain_text, read_request
from ooospec.core import Tool
from ooospec.errors import UsageError
from ooospec.sidecar.client import signature
from ooospec.sidecar.protocol import ToolSignature, Turn


def read_dialogue(
    messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[tuple[Tool, ...], tuple[Turn, ...]]:
    """Return the tools and the dialogue of a request as the sidecar is given them. Raises ToolsError or UsageError."""
    _, known, said = read_request(list(messages), tools)
    return known, tuple(Turn(str(message["role"]), plain_text(message)) for message in said)


def submission(
    messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[tuple[ToolSignature, ...], tuple[Turn, ...]]:
    """Return what a Submit message carries for a request."""
    known, dialogue = read_dialogue(messages, tools)
    return tuple(signature(tool) for tool in known), dialogue


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call that answers a request: name and argument map."""

    name: str
    arguments: dict[str, Any]


def made_call(call_id: str, name: str, arguments: Mapping[str, Any], result: Any) -> list[dict[str, Any]]:
    """Return the two messages of a call that has been made: the assistant's and the tool's."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return [
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": json.dumps(result, ensure_ascii=False)},
    ]  # fmt: skip


class Example(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request with its calls in order; no calls = the answer is none."""

    id: str
    source: str
    """Data set it came from."""
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Functions in OpenAI form; empty where the system prompt lists them as prose."""
    calls: tuple[Call, ...] = ()
    teacher: str = ""
    """Model that wrote the calls; "" = the data set's own."""

    def request(self) -> tuple[tuple[Tool, ...], tuple[Turn, ...]]:
        """Return the tools and the dialogue as the sidecar is given them. Raises ToolsError or UsageError."""
        return read_dialogue(self.messages, list(self.tools) or None)

    def signatures(self) -> tuple[tuple[ToolSignature, ...], tuple[Turn, ...]]:
        """Return what a Submit message carries."""
        return submission(self.messages, list(self.tools) or None)

    def fingerprint(self) -> str:
        """Hash the request: equal requests have equal fingerprints."""
        return hashlib.sha256(msgspec.json.encode((self.messages, self.tools))).hexdigest()


def fault(example: Example) -> str:
    """Say why an example cannot be trained on; "" if it can."""
    tools = {tool.name: tool for tool in example.request()[0]}
    if not tools:
        return "no tools"
    if example.tools and len(tools) < len(example.tools):
        return "two tools of one name"
    if not any(message["role"] == "user" and plain_text(message).strip() for message in example.messages):
        return "no user's words"
    for call in example.calls:
        if call.name not in tools:
            return "call of an unknown tool"
        if not set(call.arguments) <= {slot.name for slot in tools[call.name].slots}:
            return "argument that the schema lacks"
    return ""


def append_example(path: Path, example: Example) -> None:
    """Add one line to a file and have it on the disk before returning."""
    with path.open("ab") as sink:
        sink.write(msgspec.json.encode(example) + b"\n")
        sink.flush()
        os.fsync(sink.fileno())


def read_examples(path: Path) -> Iterator[Example]:
    """Read lines of examples; a last line that was cut short is left out. Raises UsageError naming a wrong line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read training examples from {path}: {error.strerror}.") from error
    lines = data.split(b"\n")
    decoder = msgspec.json.Decoder(Example)
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines):
                return
            raise UsageError(
                f"{path}, line {number} is not a training example ({error}); remove that line, or write such files "
                "with `ooospec collect`."
            ) from error
