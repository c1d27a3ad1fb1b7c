"""The questions of a wave as branches of one tree, and what becomes of their answers."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ooospec.chat.codec import TextCodec
from ooospec.sidecar.prompt import slot_question
from ooospec.sidecar.protocol import ToolSlot

MAX_ANSWER_TOKENS = 40
MAX_CHOICES = 24
MIN_CHANCE = math.log(0.04)
"""An answer this unlikely is cut short: its beginning may still be right, its end hardly."""
_STRING_END = re.compile(r'(?<!\\)(?:\\\\)*"')
_WRONG_END = re.compile(r"['}\])\s]+$")
"""What stands where a string should have been closed, in answers that end without its quote."""
_NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


@dataclass(slots=True)
class Trie:
    """Token paths that share prefixes under one root; node 0 is the root."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, path: Sequence[int], start: int = 0) -> list[int]:
        """Add a path below node `start`; return the nodes along it."""
        nodes, node = [], start
        for token in path:
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self._children[node, token] = child
                self.tokens.append(token)
                self.parents.append(node)
            node = child
            nodes.append(node)
        return nodes

    def ancestors(self, node: int) -> list[int]:
        """List the node and everything above it, root first."""
        line = []
        while node >= 0:
            line.append(node)
            node = self.parents[node]
        return line[::-1]


def answer_kind(slot: ToolSlot) -> str:
    """Say how a slot is answered: scored (choices), string, number, or json (anything else)."""
    if slot.choices and len(slot.choices) <= MAX_CHOICES:
        return "scored"
    if set(slot.types) == {"string"}:
        return "string"
    if slot.types and set(slot.types) <= {"integer", "number"}:
        return "number"
    return "json"


_OPENINGS = {"string": (' "',), "array": (' ["', " ["), "object": (' {"', " {"), "number": (" ",)}
"""How the value of a kind or type usually begins; longer texts only where they are one token."""
_BEGINNINGS = {
    "string": re.compile(r' "'), "array": re.compile(r" \["), "object": re.compile(r" \{"),
    "number": re.compile(r" (?:-?[0-9]+|-)$"),
}  # fmt: skip


@dataclass(slots=True)
class Branch:
    """One slot's question and, once decoding goes on, its answer."""

    tool: int
    slot: int
    kind: str
    spec: ToolSlot
    type: str = ""
    """Type that the answer is held to from its first token on; "" = any."""
    colon: int = -1
    """Node where the value begins: its logits weigh `null` against a value."""
    opening: list[int] = field(default_factory=list)
    """Tokens that a value of this type usually begins with."""
    end: int = -1
    """Node of the last of them."""
    null: int = -1
    """First token of `null` in the value's place."""
    options: list[list[int]] = field(default_factory=list)
    """Scored kinds: the nodes of every choice."""
    answer: list[int] = field(default_factory=list)
    log_chance: float = 0.0
    seen: list[int] = field(default_factory=list)
    """KV slots that the next token may see besides the prefix."""
    position: int = 0
    given: int = 0
    """Tokens at the answer's beginning that were not decoded."""

    @classmethod
    def continuing(
        cls, trie: Trie, codec: TextCodec, tool: tuple[int, str], slot: tuple[int, ToolSlot], written: str
    ) -> Branch:
        """Add the question for a slot, and the beginning of its value, to the trie."""
        asked, begun = codec.encode(slot_question(tool[1], slot[1].name)), codec.encode(f" {written}")
        nodes = trie.add([*asked, *begun])
        branch = cls(tool[0], slot[0], "json", replace(slot[1], required=True))
        branch.colon, branch.end = nodes[len(asked) - 1], nodes[-1]
        branch.answer, branch.given = begun, len(begun)
        return branch

    @classmethod
    def plant(cls, trie: Trie, codec: TextCodec, tool: tuple[int, str], slot: tuple[int, ToolSlot]) -> Branch:
        """Add the question for a slot to the trie."""
        spec = slot[1]
        kind = answer_kind(spec)
        single = spec.types[0] if len(spec.types) == 1 and spec.types[0] in _OPENINGS else ""
        branch = cls(tool[0], slot[0], kind, spec, kind if kind in _OPENINGS else single)
        question = slot_question(tool[1], spec.name)
        asked = codec.encode(question)
        nodes = trie.add(asked)
        branch.colon = branch.end = nodes[-1]
        branch.null = (codec.encode(question + " null")[len(asked) :] or [-1])[0]
        if kind == "scored":
            for choice in spec.choices:
                text = codec.encode(f"{question} {json.dumps(choice, ensure_ascii=False)}")
                branch.options.append(trie.add(text[len(asked) :], nodes[-1]) if text[: len(asked)] == asked else [])
        elif branch.type:
            openings = [codec.encode(question + opening) for opening in _OPENINGS[branch.type]]
            usual = openings[0] if len(openings[0]) == len(asked) + 1 else openings[-1]
            if usual[: len(asked)] == asked and len(usual) > len(asked):
                branch.opening = usual[len(asked) :]
                branch.end = trie.add(branch.opening, nodes[-1])[-1]
        return branch

    def may_begin(self, text: str) -> bool:
        """Tell whether a token's text may be the first of an answer that is held to a type."""
        return _BEGINNINGS[self.type].match(text) is not None

    def finish(self, codec: TextCodec) -> tuple[bool, Any]:
        """Say whether the answer is complete, and its value (None while it is not, or if it is no JSON)."""
        ended = next((at for at, token in enumerate(self.answer) if token in codec.eos_ids), None)
        text = codec.decode(self.answer[:ended])
        enough = ended is not None or len(self.answer) - self.given >= MAX_ANSWER_TOKENS
        enough = enough or self.log_chance < MIN_CHANCE
        if self.kind == "string":
            text = text.lstrip().removeprefix('"')
            closing = _STRING_END.search(text)
            if closing is not None:
                return True, _without_full_stop(_loads(f'"{text[: closing.end()]}'))
            text = text if ended is None else _WRONG_END.sub("", text)
            return enough, _loads(f'"{text}"') if enough else None
        if self.kind == "number":
            number = _NUMBER.match(text)
            done = enough or (number is not None and number.end() < len(text))
            return done, _loads(number[0]) if done and number is not None else None
        text = text.lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            literal = _python_literal(text)
            if literal is not None:
                return True, literal
            return enough, _finished_part(text) if enough else None
        return enough or end < len(text) or isinstance(value, list | dict | str), value


def _without_full_stop(value: Any) -> Any:
    """Take the full stop off a URL, code or address that was copied from the end of a sentence."""
    if isinstance(value, str) and value.endswith(".") and re.search(r"[0-9/@_]", value) and not re.search(r"\s", value):
        return value[:-1]
    return value


def _python_literal(text: str) -> Any:
    """Return the list or object at the beginning of a text that quotes as Python does, `['a']`; None if there is none.

    Dialogues hold such texts, and small models copy them.
    """
    if "'" not in text or text[:1] not in ("[", "{"):
        return None
    for at, char in enumerate(text):
        if char in "]}":
            try:
                with warnings.catch_warnings(action="ignore"):  # unknown escapes
                    value = ast.literal_eval(text[: at + 1])
                return json.loads(json.dumps(value, allow_nan=False))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
    return None


def _finished_part(text: str) -> Any:
    """Return the elements of a list that was cut short: the finished ones, or what there is of the first; or None."""
    text = text.strip()
    if not text.startswith("["):
        return None
    cuts = [at + (char != ",") for at, char in enumerate(text) if char in ',"]}']
    tries = [*(f"{text[:at]}]" for at in reversed(cuts)), f'{text}"]']
    return next((value for each in tries if (value := _loads(each)) not in (None, [""])), None)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
