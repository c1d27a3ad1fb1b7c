"""One sequence a request: the shared prefix once, every question with its answer as a branch under a block mask.

The prefix, the questions and the mask are those of the wave (`sidecar.predictor`), so a trained adapter meets nothing
new there; and a sequence costs a fraction of one row a question, which is how such sidecars were trained before
(arXiv 2608.00814).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooospec.sidecar.branches import Trie
from ooospec.sidecar.prompt import FUNCTION_QUESTION, prefix_ids, slot_question
from ooospec.target.loading import LoadedModel
from ooospec.train.records import Example

FUNCTION, VALUE, NULL = "function", "value", "null"
WEIGHTS = {FUNCTION: 1.0, VALUE: 1.0, NULL: 0.5}
"""Weight of a question in the loss, shared by the tokens of its answer; nulls are many and easy."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its right answer, as text that goes on where the question ends."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A request ready for one forward pass. S = tokens, A = predicted tokens, Q = questions."""

    tokens: list[int]
    positions: list[int]
    visible: NDArray[np.bool_]
    """[S, S]"""
    rows: list[int]
    """Index of the token that each predicted token follows. [A]"""
    targets: list[int]
    """[A]"""
    weights: list[float]
    """[A]"""
    owners: list[int]
    """Question of each predicted token. [A]"""
    kinds: list[str]
    """[Q]"""


def questions(example: Example) -> Iterator[Question]:
    """Ask for the function, and for every slot of the tool that is called first."""
    if not example.calls:
        return
    call, tools = example.calls[0], example.request()[0]
    if len(tools) > 1:
        yield Question(FUNCTION, FUNCTION_QUESTION, f'{call.name}"')
    for slot in next(tool for tool in tools if tool.name == call.name).slots:
        value: Any = call.arguments.get(slot.name)
        text = json.dumps(value, ensure_ascii=False)
        yield Question(VALUE if value is not None else NULL, slot_question(call.name, slot.name), f" {text}}}}}")


def pack(example: Example, loaded: LoadedModel, max_tokens: int = 2048) -> Packed | None:
    """Pack an example; None if it asks nothing or is longer than `max_tokens`."""
    prefix = prefix_ids(loaded, *example.signatures())
    trie = Trie([prefix[-1]])
    rows, targets, weights, owners, kinds = list[int](), list[int](), list[float](), list[int](), list[str]()
    base = len(prefix) - 1
    for question in questions(example):
        asked, whole = loaded.codec.encode(question.text), loaded.codec.encode(question.text + question.answer)
        first = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
        nodes = [0, *trie.add(whole)]
        rows += [base + node for node in nodes[first:-1]]
        targets += whole[first:]
        weights += [WEIGHTS[question.kind] / (len(whole) - first)] * (len(whole) - first)
        owners += [len(kinds)] * (len(whole) - first)
        kinds.append(question.kind)
    size = base + len(trie.tokens)
    if not kinds or size > max_tokens:
        return None
    visible = np.tri(size, dtype=np.bool_)
    visible[base:, base:] = np.eye(len(trie.tokens), dtype=np.bool_)
    depths = [0] * len(trie.tokens)
    for node in range(1, len(trie.tokens)):
        parent = trie.parents[node]
        visible[base + node, base:] |= visible[base + parent, base:]
        depths[node] = depths[parent] + 1
    positions = [*range(base), *(base + depth for depth in depths)]
    return Packed([*prefix[:-1], *trie.tokens], positions, visible, rows, targets, weights, owners, kinds)
