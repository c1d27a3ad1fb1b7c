"""The methods: each is a list of proposers over the same loop. Register your own (docs/write_a_proposer.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ooospec.chat.style import StyleBook, ValueBook
from ooospec.core import Hint, Proposer, Tool
from ooospec.errors import UsageError
from ooospec.memory import Memory
from ooospec.proposers.calls import CallProposer
from ooospec.proposers.lookup import PromptLookup
from ooospec.proposers.recycling import SuccessorTable, TokenRecycling
from ooospec.proposers.retrieval import Retrieval, RetrievalMemory
from ooospec.proposers.samd import SuffixAutomatonDrafts
from ooospec.proposers.suffix import SuffixDecoding, SuffixMemory

Poll = Callable[[], Hint | None]
Ask = Callable[[Tool, str, str], None]
"""Called with a tool, the name of a slot or "" for all, and how its value begins, as JSON text."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a method may build its proposers from, for one request."""

    memory: Memory = field(default_factory=Memory)
    poll: Poll | None = None
    """Returns the hint as it stands, without waiting."""
    draft: Callable[[], Proposer] | None = None
    """Makes the proposer that runs a draft model; None where none is loaded."""
    ask: Ask | None = None
    """Asks the sidecar for more, as the target writes what the hint does not say."""


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the benchmark."""

    name: str
    summary: str
    build: Callable[[Setup], list[Proposer]]
    max_nodes: int = 64
    """Bound of the candidate tree, root included, as published."""
    hints: bool = False
    """Asks the sidecar."""
    remembers: bool = True
    """Has a memory that outlives a request."""
    stock: bool = False
    """Decodes with transformers' own `generate` instead of this project's loop."""


def _draft(setup: Setup) -> list[Proposer]:
    if setup.draft is None:
        raise UsageError(
            "Method draft needs a draft model with the target's tokenizer; give `ooospec bench` --draft MODEL, or "
            "Decoder(draft=MODEL), or leave this method out."
        )
    return [setup.draft()]


def _toolspec(setup: Setup) -> list[Proposer]:
    memory = setup.memory
    return [
        Retrieval(memory.part(RetrievalMemory)),
        CallProposer(memory.part(StyleBook)),
        TokenRecycling(memory.part(SuccessorTable)),
    ]


def _ooo(setup: Setup) -> list[Proposer]:
    memory = setup.memory
    return [
        CallProposer(memory.part(StyleBook), setup.poll, memory.part(ValueBook), setup.ask),
        Retrieval(memory.part(RetrievalMemory)),
        TokenRecycling(memory.part(SuccessorTable)),
    ]


METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Add a method under its name. Raises UsageError if the name is taken."""
    if method.name in METHODS:
        raise UsageError(f"A method {method.name!r} is registered already; choose another name.")
    METHODS[method.name] = method
    return method


for _method in (
    Method("ar", "one token a pass", lambda s: [], 1, remembers=False),
    Method("stock", "transformers' generate", lambda s: [], 1, remembers=False, stock=True),
    Method("lookup", "Prompt Lookup", lambda s: [PromptLookup()], 11, remembers=False),
    Method("recycling", "Token Recycling", lambda s: [TokenRecycling(s.memory.part(SuccessorTable))], 81),
    Method("samd", "SAM Decoding", lambda s: [SuffixAutomatonDrafts(s.memory.part(SuccessorTable))], 61),
    Method("suffix", "SuffixDecoding", lambda s: [SuffixDecoding(s.memory.part(SuffixMemory))], 64),
    Method("draft", "draft model", _draft, 16, remembers=False),
    Method("toolspec", "ToolSpec", _toolspec),
    Method("ooo", "OoO-Spec", _ooo, hints=True),
):
    register(_method)


def method_named(name: str) -> Method:
    """Find a method. Raises UsageError for an unknown name."""
    if name not in METHODS:
        raise UsageError(f"Unknown method {name!r}; choose one of {', '.join(METHODS)}.")
    return METHODS[name]


def served_methods() -> list[str]:
    """List the methods that a server's requests may ask for: those of this project's loop without a draft model."""
    return [name for name, method in METHODS.items() if not method.stock and name != "draft"]
