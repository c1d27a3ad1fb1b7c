"""ToolSpec's retrieval (arXiv 2604.13519): copy from similar requests' outputs, the prompt and the output so far.

Suffixes of 7 to 5 tokens; the first four matches give candidates of 32, 16, 8 and 8 tokens. Similarity is the cosine
of the target's last hidden state at the prompt's end. Unlike the released code, matching covers the whole prompt and
drafts share one trie.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ooospec.core import Commit, DecodeContext, Draft

SUFFIXES = (7, 6, 5)
LENGTHS = (32, 16, 8, 8)
NEIGHBOURS = 10
TOKEN_BYTES = 36
"""A token in a list: a reference and a number."""
FIRST_CHANCE = {7: 0.7, 6: 0.65, 5: 0.55}


class RetrievalMemory:
    """Earlier outputs with the prompt states they came from; a ring of at most `capacity` requests."""

    def __init__(self, capacity: int = 2048) -> None:
        self.capacity = capacity
        self._states = np.zeros((0, 0), dtype=np.float32)
        self._outputs: list[list[int]] = []
        self._next = 0  # where the next one goes: behind the others, or in place of the oldest
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the states and the outputs."""
        return self._states.nbytes + TOKEN_BYTES * self._tokens

    def add(self, state: NDArray[np.float32], output: Sequence[int]) -> None:
        """Store one finished request; the oldest goes when the memory is full."""
        at = self._next
        if at == len(self._states):
            grown = np.zeros((min(self.capacity, max(16, 2 * at)), len(state)), dtype=np.float32)
            grown[:at] = self._states if at else 0.0
            self._states = grown
        if at == len(self._outputs):
            self._outputs.append([])
        self._tokens += len(output) - len(self._outputs[at])
        self._states[at], self._outputs[at] = state / (np.linalg.norm(state) or 1.0), list(output)
        self._next = (at + 1) % self.capacity

    def dump(self) -> bytes:
        """Write all requests."""
        oldest = self._next % max(1, len(self._outputs))
        order = [*range(oldest, len(self._outputs)), *range(oldest)]
        return msgspec.msgpack.encode([(self._states[i].tobytes(), self._outputs[i]) for i in order])

    def load(self, data: bytes) -> None:
        """Read what `dump` wrote."""
        for state, output in msgspec.msgpack.decode(data, type=list[tuple[bytes, list[int]]]):
            self.add(np.frombuffer(state, np.float32), output)

    def nearest(self, state: NDArray[np.float32], count: int = NEIGHBOURS) -> list[list[int]]:
        """Return the outputs of the `count` most similar requests, most similar first."""
        if not self._outputs:
            return []
        similarity = self._states[: len(self._outputs)] @ (state / (np.linalg.norm(state) or 1.0))
        return [self._outputs[i] for i in np.argsort(-similarity, kind="stable")[:count]]


class SuffixIndex:
    """Find earlier occurrences of the newest tokens by hashing n-grams as they come, newest occurrence first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int], separate: bool = False) -> None:
        """Append tokens; `separate` first puts a break that no n-gram crosses."""
        if separate:
            self.tokens.append(-1)
        for token in tokens:
            self.tokens.append(token)
            gram = tuple(self.tokens[-self.size :])
            if len(gram) == self.size and -1 not in gram:
                self._ends.setdefault(gram, []).append(len(self.tokens))

    def newest(self) -> tuple[int, ...]:
        """Return the last n-gram."""
        return tuple(self.tokens[-self.size :])

    def after_matches(self, gram: tuple[int, ...], count: int) -> list[int]:
        """Return where the text goes on after the occurrences of an n-gram, newest first."""
        ends = self._ends.get(gram, [])
        return [end for end in ends[::-1] if end < len(self.tokens)][:count]

    def read(self, start: int, length: int) -> list[int]:
        """Read up to `length` tokens, stopping at a break."""
        found = self.tokens[start : start + length]
        return found[: found.index(-1)] if -1 in found else found


class Retrieval:
    """Propose what followed earlier occurrences of the newest tokens."""

    name = "retrieval"
    wants_top = False

    def __init__(self, memory: RetrievalMemory) -> None:
        self.memory = memory
        self._context: DecodeContext | None = None
        self._state: NDArray[np.float32] | None = None
        self._indexes: list[SuffixIndex] = []
        self._neighbours: list[SuffixIndex] = []

    def begin(self, context: DecodeContext) -> None:
        """Start a request with the prompt alone; neighbours join once the prompt's state is known."""
        self._context, self._state = context, None
        self._indexes = [SuffixIndex(size) for size in SUFFIXES]
        self._neighbours = [SuffixIndex(size) for size in SUFFIXES]
        for index in self._indexes:
            index.extend(context.prompt_ids)

    def propose(self) -> list[Draft]:
        """Offer up to four continuations of the longest suffix that occurred before, in this request first."""
        for index, others in zip(self._indexes, self._neighbours, strict=True):
            gram = index.newest()
            places = [(index, start) for start in index.after_matches(gram, len(LENGTHS))]
            places += [(others, start) for start in others.after_matches(gram, len(LENGTHS) - len(places))]
            drafts = [text.read(start, length) for (text, start), length in zip(places, LENGTHS, strict=False)]
            if any(drafts):
                first = FIRST_CHANCE[index.size]
                return [Draft.uniform(d, self.name, first / (rank + 1), 0.9) for rank, d in enumerate(drafts) if d]
        return []

    def observe(self, commit: Commit) -> None:
        """Extend the searched text; look up the neighbours when the prompt's state arrives."""
        if commit.prompt_state is not None:
            self._state = commit.prompt_state
            for output in self.memory.nearest(commit.prompt_state)[::-1]:  # newest matches are offered first
                for index in self._neighbours:
                    index.extend(output, separate=True)
        for index in self._indexes:
            index.extend(commit.tokens)

    def end(self) -> None:
        """Remember the output for later requests."""
        if self._context is not None and self._state is not None and self._context.output_ids:
            self.memory.add(self._state, self._context.output_ids)
        self._context, self._indexes, self._neighbours = None, [], []
