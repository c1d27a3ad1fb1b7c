"""ToolSpec's retrieval (arXiv 2604.13519): copy from similar requests' outputs, the prompt and the output so far.

Suffixes of 7 to 5 tokens; the first four matches give candidates of 32, 16, 8 and 8 tokens. Similarity is the cosine
of the target's last hidden state at the prompt's end. Unlike the released code, matching covers the whole prompt and
drafts share one trie.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ooospec.core import Commit, DecodeContext, Draft

SUFFIXES = (7, 6, 5)
LENGTHS = (32, 16, 8, 8)
NEIGHBOURS = 10
TOKEN_BYTES = 36
"""A token in a list: a reference and a number."""
FIRST_CHANCE = {7: 0.7, 6: 0.65, 5: 0.55}
LONGEST_OUTPUT = 1024
"""Tokens kept of an output, counted from its end: calls come behind reasoning."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


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
        """Store one finished request, of a long output its end; the oldest goes when the memory is full."""
        at, output = self._next, output[-LONGEST_OUTPUT:]
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
    """Find earlier occurrences of the newest tokens, newest first: the hashes of all n-grams are compared at once."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.length = 0
        self._text = np.zeros(256, dtype=np.int64)
        self._powers = {size: _MULTIPLIER ** np.arange(size, dtype=np.uint64) for size in sizes}
        self._hashes = {size: np.zeros(256, dtype=np.uint64) for size in sizes}
        """Of the n-gram that ends with each token."""

    def extend(self, tokens: Sequence[int], separate: bool = False) -> None:
        """Append tokens; `separate` first puts a break that no n-gram crosses."""
        start, end = self.length, self.length + len(tokens) + separate
        if end > len(self._text):
            room = max(end, 2 * len(self._text)) - len(self._text)
            self._text = np.pad(self._text, (0, room))
            self._hashes = {size: np.pad(hashes, (0, room)) for size, hashes in self._hashes.items()}
        self._text[start:end] = [*[-1] * separate, *tokens]
        self.length = end
        for size, hashes in self._hashes.items():
            first = max(start, size - 1)
            if first < end:
                grams = sliding_window_view(self._text[first - size + 1 : end], size)
                hashes[first:end] = grams.astype(np.uint64) @ self._powers[size]

    def newest(self, size: int) -> tuple[int, ...]:
        """Return the last n-gram."""
        return tuple(self._text[max(0, self.length - size) : self.length].tolist())

    def after_matches(self, gram: tuple[int, ...], count: int) -> list[int]:
        """Return where the text goes on after the occurrences of an n-gram, newest first."""
        size, found = len(gram), list[int]()
        if size not in self._hashes or -1 in gram or self.length <= size:
            return found
        sought = np.array(gram, dtype=np.uint64) @ self._powers[size]
        last = np.flatnonzero(self._hashes[size][size - 1 : self.length - 1] == sought)[::-1]
        for end in (last[: 2 * count] + size).tolist():
            if len(found) < count and self._text[end - size : end].tolist() == list(gram):
                found.append(end)
        return found

    def read(self, start: int, length: int) -> list[int]:
        """Read up to `length` tokens, stopping at a break."""
        found: list[int] = self._text[start : min(start + length, self.length)].tolist()
        return found[: found.index(-1)] if -1 in found else found


class Retrieval:
    """Propose what followed earlier occurrences of the newest tokens."""

    name = "retrieval"
    wants_top = False

    def __init__(self, memory: RetrievalMemory) -> None:
        self.memory = memory
        self._context: DecodeContext | None = None
        self._state: NDArray[np.float32] | None = None
        self._index, self._neighbours = SuffixIndex(SUFFIXES), SuffixIndex(SUFFIXES)

    def begin(self, context: DecodeContext) -> None:
        """Start a request with the prompt alone; neighbours join once the prompt's state is known."""
        self._context, self._state = context, None
        self._index, self._neighbours = SuffixIndex(SUFFIXES), SuffixIndex(SUFFIXES)
        self._index.extend(context.prompt_ids)

    def propose(self) -> list[Draft]:
        """Offer up to four continuations of the longest suffix that occurred before, in this request first."""
        for size in SUFFIXES:
            gram = self._index.newest(size)
            if len(gram) < size:
                continue
            places = [(self._index, start) for start in self._index.after_matches(gram, len(LENGTHS))]
            more = self._neighbours.after_matches(gram, len(LENGTHS) - len(places))
            places += [(self._neighbours, start) for start in more]
            drafts = [text.read(start, length) for (text, start), length in zip(places, LENGTHS, strict=False)]
            if any(drafts):
                first = FIRST_CHANCE[size]
                return [Draft.uniform(d, self.name, first / (rank + 1), 0.9) for rank, d in enumerate(drafts) if d]
        return []

    def observe(self, commit: Commit) -> None:
        """Extend the searched text; look up the neighbours when the prompt's state arrives."""
        if commit.prompt_state is not None:
            self._state = commit.prompt_state
            for output in self.memory.nearest(commit.prompt_state)[::-1]:  # newest matches are offered first
                self._neighbours.extend(output, separate=True)
        self._index.extend(commit.tokens)

    def end(self) -> None:
        """Remember the output for later requests."""
        if self._context is not None and self._state is not None and self._context.output_ids:
            self.memory.add(self._state, self._context.output_ids)
        self._context = None
        self._index, self._neighbours = SuffixIndex(SUFFIXES), SuffixIndex(SUFFIXES)
