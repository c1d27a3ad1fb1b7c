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
from ooospec.chat.style import CallStyle
from ooospec.errors import UsageError
from ooospec.sampling import Constraint
from ooospec.target.loading import LoadedModel


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

    def schema(self, schema: Any) -> GrammarConstraint:
        """Allow nothing but JSON that fits a schema."""
        return self.constraint(schema_grammar(schema))

    def constraint(self, grammar: str, releases: bool = False) -> GrammarConstraint:
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
                raise UsageError(f"The schema cannot be enforced: {_first_line(matcher.get_error())}")
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


class GrammarConstraint:
    """What a grammar allows next. With `releases`, everything is allowed once the grammar is fulfilled."""

    def __init__(self, matcher: LLMatcher, releases: bool = False) -> None:
        self._matcher, self._releases, self._released = matcher, releases, False

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
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    return f"{literal(style.head + name + gap)} {_json(schema, strict=bool(function.get('strict')))} {literal(tail)}"


def _json(schema: Mapping[str, Any], strict: bool = False) -> str:
    """Embed a schema, written as models write it on one line.

    Keywords the engine does not know are passed over unless the request asks for strictness.
    """
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _lark(*rules: str) -> str:
    grammar: str = LLMatcher.grammar_from_lark("\n".join(rules))
    return grammar


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else "no reason given"
