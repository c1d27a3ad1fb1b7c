"""Keep evaluation requests out of training data: by name of a called function and by wording."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooospec.bench.datasets import BENCHMARKS, load_benchmark
from ooospec.chat.template import plain_text, read_request
from ooospec.train.records import Example

NGRAM = 8
"""Words in a row that must not be shared with a user's words in an evaluation request."""
_WORD = re.compile(r"[^\W_]+")


def normalized_name(name: str) -> str:
    """Write a function name without case and punctuation: `Get_Weather` and `get.weather` are one."""
    return "".join(_WORD.findall(name.lower()))


def word_ngrams(text: str) -> Iterator[str]:
    """Give all runs of NGRAM words, normalised (NFKC, lower case, words only)."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    return (" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))


def _user_words(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (plain_text(message) for message in messages if message["role"] == "user")


@dataclass(frozen=True, slots=True)
class Inventory:
    """What evaluation requests hold."""

    names: frozenset[str]
    """Normalised names of all their functions."""
    ngrams: frozenset[str]

    @classmethod
    def of(cls, requests: Iterable[tuple[Sequence[dict[str, Any]], list[dict[str, Any]] | None]]) -> Inventory:
        """Take stock of (messages, tools) pairs."""
        names, seen = set[str](), Counter[str]()
        for messages, tools in requests:
            _, known, said = read_request(messages, tools)
            names.update(normalized_name(tool.name) for tool in known)
            words = [dict(message) for message in said]
            seen.update({gram for text in _user_words(words) for gram in word_ngrams(text)})
        # words that dozens of requests share are a template's, not a request's
        return cls(frozenset(names), frozenset(gram for gram, count in seen.items() if count <= 20))

    @classmethod
    def load(cls, data: Path) -> Inventory:
        """Take stock of all benchmarks in a data folder. Raises UsageError where one is missing."""
        requests = (r for name in BENCHMARKS for r in load_benchmark(name, data))
        return cls.of((request.messages, request.tools) for request in requests)

    def clash(self, example: Example) -> str:
        """Say why an example must not be trained on; "" if it may."""
        if any(normalized_name(call.name) in self.names for call in example.calls):
            return "calls a function named like one of an evaluation set"
        said = (gram for text in _user_words(example.messages) for gram in word_ngrams(text))
        return "shares wording with an evaluation request" if any(gram in self.ngrams for gram in said) else ""
