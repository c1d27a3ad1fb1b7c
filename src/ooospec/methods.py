"""The methods: each is a list of proposers over the same loop, plus what they remember between requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ooospec.chat.style import StyleBook
from ooospec.core import Hint, Proposer
from ooospec.errors import UsageError
from ooospec.proposers.calls import CallProposer
from ooospec.proposers.lookup import PromptLookup
from ooospec.proposers.recycling import TokenRecycling
from ooospec.proposers.retrieval import Retrieval, RetrievalMemory

Poll = Callable[[], Hint | None]


@dataclass(slots=True)
class Memory:
    """What a method keeps from one request to the next. Never shared between methods that are compared."""

    book: StyleBook = field(default_factory=StyleBook)
    retrieval: RetrievalMemory = field(default_factory=RetrievalMemory)
    recycling: TokenRecycling = field(default_factory=TokenRecycling)


def _autoregressive(memory: Memory, poll: Poll | None) -> list[Proposer]:
    return []


def _lookup(memory: Memory, poll: Poll | None) -> list[Proposer]:
    return [PromptLookup()]


def _toolspec(memory: Memory, poll: Poll | None) -> list[Proposer]:
    return [Retrieval(memory.retrieval), CallProposer(memory.book), memory.recycling]


def _ooo(memory: Memory, poll: Poll | None) -> list[Proposer]:
    return [CallProposer(memory.book, poll), Retrieval(memory.retrieval), memory.recycling]


METHODS: dict[str, Callable[[Memory, Poll | None], list[Proposer]]] = {
    "ar": _autoregressive,
    "lookup": _lookup,
    "toolspec": _toolspec,
    "ooo": _ooo,
}


def proposers(method: str, memory: Memory, poll: Poll | None = None) -> list[Proposer]:
    """Build the proposers of a method. Raises UsageError for an unknown name."""
    if method not in METHODS:
        raise UsageError(f"Unknown method {method!r}; choose one of {', '.join(METHODS)}.")
    return METHODS[method](memory, poll)
