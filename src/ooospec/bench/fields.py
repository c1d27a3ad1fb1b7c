"""Which part of a call each token of an output belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from ooospec.chat.codec import TextCodec
from ooospec.chat.scanner import CallScanner

FIELDS = ("text", "structure", "name", "key", "value", "end")
"""text = words around the calls; structure = openings, braces, quotes, closings; end = end of sequence."""


def token_pieces(codec: TextCodec, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; "" for one that only begins a character."""
    stream = codec.stream()
    return ["" if token in codec.eos_ids else stream.push([token]) for token in ids]


def token_fields(codec: TextCodec, ids: Sequence[int], pieces: Sequence[str]) -> list[str]:
    """Name the field in which each token's first character falls. [len(ids)]"""
    text = "".join(pieces)
    marks = _marks(text)
    fields, position = [], 0
    for token, piece in zip(ids, pieces, strict=True):
        inside = marks[position] if position < len(marks) else "text"
        fields.append("end" if token in codec.eos_ids else inside)
        position += len(piece)
    return fields


def _marks(text: str) -> list[str]:
    """Name the field of every character."""
    scanner = CallScanner()
    scanner.feed(text)
    marks = ["text"] * len(text)
    calls = scanner.calls + ([scanner.open] if scanner.open is not None and scanner.open.name is not None else [])
    for call in calls:
        _paint(marks, call.start, call.end, "structure")
        for fence in ("```json\n", "```<tool_call>\n", "<tool_call>\n", "```\n"):
            if text.endswith(fence, 0, call.start):
                _paint(marks, call.start - len(fence), call.start, "structure")
        if call.end is not None:
            rest = text[call.end :]
            closing = next((c for c in ("\n</tool_call>\n```", "\n</tool_call>", "\n```") if rest.startswith(c)), "")
            _paint(marks, call.end, call.end + len(closing), "structure")
        spans = [("name", call.name)]
        spans += [("key", item.key) for item in call.items]
        spans += [("value", item.value) for item in call.items]
        for field, span in spans:
            if span is not None:
                _paint(marks, span.start, span.end, field)
    return marks


def _paint(marks: list[str], start: int, end: int | None, field: str) -> None:
    end = len(marks) if end is None else min(end, len(marks))
    marks[start:end] = [field] * (end - start)
