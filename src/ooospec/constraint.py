"""Constrained choice: a grammar engine (llguidance) masks what may not follow; drafts are cut at the first such token.

The matcher is advanced by committed tokens only: acceptance asks for one choice per committed token in output order, so
there is never anything to roll back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from ooospec.chat.answer import ThinkSplitter
from ooospec.chat.codec import TextCodec
from ooospec.chat.formats.registry import CallFormat
from ooospec.chat.scanner import Scanner
from ooospec.chat.style import CallStyle
from ooospec.core import Tool
from ooospec.errors import UsageError
from ooospec.sampling import Constraint
from ooospec.target.loading import LoadedModel

_GAP, _REST = r"GAP: /[^{]+/", r"REST: /(.|\n)*/"
"""What stands between a function's name and its arguments, and what follows them."""


class Grammars:
    """Compiles grammars for one target; the tokenizer's tables are built once, on first use."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[str, LLMatcher] = {}

    def calls(self, call_format: CallFormat, prompt: str, functions: Sequence[Mapping[str, Any]]) -> GrammarConstraint:
        """Ask for a call of one of these functions first; after it the target is free to end or to call on."""
        special = {str(token.content): index for index, token in self._loaded.tokenizer.added_tokens_decoder.items()}
        return self.constraint(call_grammar(call_format, prompt, functions, special), releases=True)

    def strict(
        self,
        call_format: CallFormat,
        tools: Sequence[Tool],
        functions: Sequence[Mapping[str, Any]],
        think: ThinkSplitter,
    ) -> StrictCalls | None:
        """Hold the arguments of the `strict` ones among these functions to their schemas, wherever a call begins.

        None where there are none, or where the format's arguments are not JSON. Raises UsageError.
        """
        if call_format.styles("")[0].values != "json":
            return None
        special = [index for index, token in self._loaded.tokenizer.added_tokens_decoder.items() if token.special]
        gap = f"gap: (GAP | <[{','.join(map(str, special))}]>)*" if special else "gap: GAP?"
        made = {}
        for function in functions:
            if function.get("strict") is True:
                name, schema = str(function["name"]), _arguments(function, flexible=True)
                grammar = _lark(f"start: gap {schema} REST", gap, _GAP, _REST)
                made[name] = self.constraint(grammar, True, f"schema of strict function {name!r}")
        return StrictCalls(self._loaded.codec, call_format.scanner(tools), think, made) if made else None

    def schema(self, schema: Any) -> GrammarConstraint:
        """Allow nothing but JSON that fits a schema."""
        return self.constraint(schema_grammar(schema))

    def constraint(self, grammar: str, releases: bool = False, what: str = "schema") -> GrammarConstraint:
        """Return a fresh constraint for a grammar; `releases` = it ends with the grammar.

        Raises UsageError where it does not compile.
        """
        if self._tokenizer is None:
            vocabulary = int(self._loaded.model.get_input_embeddings().weight.shape[0])
            eos = sorted(self._loaded.codec.eos_ids)
            self._tokenizer = from_tokenizer(self._loaded.tokenizer, n_vocab=vocabulary, eos_token=eos)
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise UsageError(f"The {what} cannot be enforced: {_reason(matcher.get_error())}")
            if len(self._compiled) >= 64:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = matcher
        return GrammarConstraint(matcher.deep_copy(), releases)


class AfterThinking:
    """A constraint that begins when the reasoning block, in which the prompt ends, is over."""

    def __init__(self, inner: Constraint, codec: TextCodec, splitter: ThinkSplitter) -> None:
        self._inner, self._stream, self._splitter = inner, codec.stream(), splitter

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits, masked once the block is over. [V]"""
        return self._inner.mask(logits) if self._splitter.answering else logits

    def advance(self, token: int) -> None:
        """Take note of the next committed token."""
        if self._splitter.answering:
            self._inner.advance(token)
        else:
            self._splitter.push(self._stream.push([token]))

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow in a row; what may end the block is verified, not foreseen."""
        return self._inner.allowed_length(tokens) if self._splitter.answering else len(tokens)


class StrictCalls:
    """Binds the arguments of calls to schemas, from the function's name to the last brace; all else is free."""

    def __init__(
        self, codec: TextCodec, scanner: Scanner, think: ThinkSplitter, schemas: Mapping[str, GrammarConstraint]
    ) -> None:
        self._codec, self._stream, self._scanner, self._think = codec, codec.stream(), scanner, think
        self._schemas, self._current = schemas, -1
        self._inner: GrammarConstraint | None = None

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits, masked within strict arguments. [V]"""
        return self._inner.mask(logits) if self._inner is not None else logits

    def advance(self, token: int) -> None:
        """Take note of the next committed token."""
        self._scanner.feed(self._think.push(self._stream.push([token]))[1])
        if self._inner is not None:
            self._inner.advance(token)
        call, scanner = self._scanner.open, self._scanner
        if call is None:
            self._inner = None
        elif call.start != self._current and call.name is not None and call.name.end is not None:
            self._current = call.start
            schema = self._schemas.get(scanner.name_of(call))
            written = self._codec.encode(scanner.text[call.name.end :], special=True)
            begun = call.arguments is not None and call.arguments.start < call.name.end  # written before the name
            self._inner = schema.following(written) if schema is not None and not begun else None

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow in a row; a call that begins among them is only verified."""
        return self._inner.allowed_length(tokens) if self._inner is not None else len(tokens)


class GrammarConstraint:
    """What a grammar allows next. With `releases`, everything is allowed once the grammar is fulfilled."""

    def __init__(self, matcher: LLMatcher, releases: bool = False) -> None:
        self._matcher, self._releases, self._released = matcher, releases, False

    def following(self, tokens: Sequence[int]) -> GrammarConstraint | None:
        """Return a copy that has taken these tokens; None where they do not fit."""
        copy = GrammarConstraint(self._matcher.deep_copy(), self._releases)
        if copy._matcher.try_consume_tokens(list(tokens)) < len(tokens):
            return None
        copy._released = copy._releases and bool(copy._matcher.is_accepting())
        return copy

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits with everything forbidden at -inf. [V]"""
        if self._released:
            return logits
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        size = min(len(bits), len(logits))
        allowed[:size] = torch.from_numpy(bits[:size].astype(np.bool_))
        return logits.masked_fill(~allowed, -torch.inf)

    def advance(self, token: int) -> None:
        """Take note of the next committed token."""
        if not self._released and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._released = self._releases and bool(self._matcher.is_accepting())

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow in a row."""
        if self._released:
            return len(tokens)
        return 0 if self._matcher.is_stopped() else int(self._matcher.validate_tokens(list(tokens)))


def schema_grammar(schema: Any) -> str:
    """Return the grammar of JSON values that fit a schema. Raises UsageError."""
    if not isinstance(schema, Mapping):
        raise UsageError(f"A JSON schema must be an object; got {type(schema).__name__}.")
    return _lark(f"start: {_json(schema)}")


def call_grammar(
    call_format: CallFormat,
    prompt: str,
    functions: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
) -> str:
    """Return the grammar of one call of these functions, as an answer in this format begins.

    `special` = tokens that are written as one id. Raises UsageError for a format whose values are not JSON.
    """
    style = call_format.styles(prompt)[0]
    if style.values != "json":
        raise UsageError(
            f"Calls cannot be enforced in format {call_format.name}, whose values are not JSON; use tool_choice auto."
        )
    literal = _Literals(special)
    calls = [_call(style, function, literal) for function in functions]
    rules = [f"call: {' | '.join(f'call{index}' for index in range(len(calls)))}"]
    rules += [f"call{index}: {call}" for index, call in enumerate(calls)]
    return _lark(f"start: {literal(style.opening)} call", *rules)


class _Literals:
    """Writes text for a grammar, special tokens by their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")

    def __call__(self, text: str) -> str:
        parts = (part for part in self._split.split(text) if part)
        written = (f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts)
        return " ".join(written) or '""'


def _call(style: CallStyle, function: Mapping[str, Any], literal: _Literals) -> str:
    name = str(function["name"])
    if style.head.endswith('"'):  # the name is a JSON string
        name = json.dumps(name, ensure_ascii=False)[1:-1]
    gap, tail = style.empty.rsplit("{}", 1)
    return f"{literal(style.head + name + gap)} {_arguments(function)} {literal(tail)}"


def _arguments(function: Mapping[str, Any], flexible: bool = False) -> str:
    """Write the grammar of a function's arguments; `flexible` = with breaks and indents as the target likes."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    return _json(schema, strict=function.get("strict") is True, flexible=flexible)


def _json(schema: Mapping[str, Any], strict: bool = False, flexible: bool = False) -> str:
    """Embed a schema, written as models write it on one line or, `flexible`, with any whitespace.

    Keywords the engine does not know are passed over unless the request asks for strictness.
    """
    one_line = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    options = {**({} if flexible else one_line), "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _lark(*rules: str) -> str:
    grammar: str = LLMatcher.grammar_from_lark("\n".join(rules))
    return grammar


def _reason(text: str) -> str:
    """Put the engine's lines into one, without the places in a grammar that nobody has seen."""
    lines = [re.sub(r"^at \d+\(\d+\): ", "", line.strip()) for line in text.splitlines()]
    return " ".join(filter(None, lines))[:300] or "no reason given"
