"""SuffixDecoding (arXiv 2411.04975) through Arctic Inference's suffix trees, an optional dependency.

One tree over the request's own prompt and output, one over all earlier outputs; the better-scored continuation is
drafted. Parameters as in vLLM: depth 24, factor 1.0, minimum probability 0.1.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from ooospec.core import Commit, DecodeContext, Draft
from ooospec.errors import UsageError

DEPTH = 24
MAX_FACTOR = 1.0
MIN_PROBABILITY = 0.1
CAPACITY = 10_000
"""Earlier outputs kept."""
NODE_BYTES = 1024
"""What a token of an output may take in the trees: a node for each depth, where nothing is shared."""


class SuffixMemory:
    """Suffix trees of earlier outputs, rebuilt from those outputs when a saved memory is loaded."""

    def __init__(self) -> None:
        try:
            module: Any = importlib.import_module("arctic_inference.suffix_decoding")
        except ImportError as error:
            raise UsageError(
                "Method suffix needs the optional package arctic-inference (built from source: a C++ compiler); "
                "install it with: pip install 'ooo-spec[suffix]'. Or leave this method out."
            ) from error
        self.cache: Any = module.SuffixDecodingCache(DEPTH, CAPACITY)
        self.outputs: list[list[int]] = []
        self._tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs and, roughly, of their trees."""
        return NODE_BYTES * self._tokens

    def dump(self) -> bytes:
        """Write the outputs."""
        return msgspec.msgpack.encode(self.outputs)

    def load(self, data: bytes) -> None:
        """Read the outputs and build their trees."""
        for output in msgspec.msgpack.decode(data, type=list[list[int]]):
            number = self.start([])
            self.cache.add_active_response(number, output)
            self.finish(number, output)

    def start(self, prompt: list[int]) -> int:
        """Open a request; return its number."""
        number = len(self.outputs)
        self.cache.start_request(number, prompt)
        return number

    def finish(self, number: int, output: list[int]) -> None:
        """Close a request; its output stays."""
        self.cache.stop_request(number)
        self.outputs.append(output)
        self._tokens += len(output)


class SuffixDecoding:
    """Propose the likeliest continuations of the newest tokens in the suffix trees."""

    name = "suffix"
    wants_top = False

    def __init__(self, memory: SuffixMemory) -> None:
        self.memory = memory

    def begin(self, context: DecodeContext) -> None:
        """Start a request."""
        self._context = context
        self._number = self.memory.start(list(context.prompt_ids))

    def propose(self) -> list[Draft]:
        """Offer the tree that the better of the two suffix trees speculates."""
        output, prompt = self._context.output_ids, self._context.prompt_ids
        recent = [*prompt[-DEPTH:], *output[-DEPTH:]][-DEPTH:]
        found = self.memory.cache.speculate(
            self._number, recent, max_spec_tokens=DEPTH, max_spec_factor=MAX_FACTOR, min_token_prob=MIN_PROBABILITY,
            use_tree_spec=True,
        )  # fmt: skip
        return _paths(found.token_ids, found.parents, found.probs)

    def observe(self, commit: Commit) -> None:
        """Extend the trees."""
        self.memory.cache.add_active_response(self._number, list(commit.tokens))

    def end(self) -> None:
        """Keep the output for later requests."""
        self.memory.finish(self._number, list(self._context.output_ids))


def _paths(tokens: list[int], parents: list[int], chances: list[float]) -> list[Draft]:
    """Turn a tree (parent -1 = root; chances of whole paths) into its root-to-leaf paths."""
    inner = set(parents)
    drafts = []
    for leaf in (node for node in range(len(tokens)) if node not in inner):
        path: list[int] = []
        node = leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        path.reverse()
        before = [1.0, *(chances[node] for node in path)]
        steps = [min(1.0, chances[node] / max(1e-9, last)) for node, last in zip(path, before, strict=False)]
        drafts.append(Draft(tuple(tokens[node] for node in path), SuffixDecoding.name, tuple(steps)))
    return drafts
