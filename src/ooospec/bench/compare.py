"""Run the methods back to back on a request and compare their outputs token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ooospec.bench.datasets import BenchRequest
from ooospec.generation import Generation
from ooospec.runtime import Decoder

SPACINGS_ALLOWED = 4
"""A divergence whose top-2 gap is wider than this many spacings of the dtype is a bug, not a rounding tie."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an output leaves the reference, and how close the call was there."""

    position: int
    expected: int
    got: int | None
    gap: float
    """Difference of the two largest logits in a plain forward pass over the reference's prefix."""
    spacing: float
    """Spacing of the dtype at the size of the largest logit."""

    @property
    def is_tie(self) -> bool:
        """Tell whether rounding explains the divergence."""
        return self.gap <= SPACINGS_ALLOWED * self.spacing


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request under all methods; the first is the reference."""

    request: BenchRequest
    results: dict[str, Generation]
    divergences: dict[str, Divergence]


def compare(
    decoder: Decoder,
    request: BenchRequest,
    methods: Sequence[str],
    report: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Decode `request` with every method, the reference ("ar") first."""
    results: dict[str, Generation] = {}
    divergences: dict[str, Divergence] = {}
    for method in methods:
        report(method)
        results[method] = decoder.generate(list(request.messages), request.tools, method=method, **options)
        found = find_divergence(decoder, request, results[methods[0]].output_ids, results[method].output_ids)
        if found is not None:
            divergences[method] = found
    return Comparison(request, results, divergences)


def find_divergence(
    decoder: Decoder, request: BenchRequest, expected: Sequence[int], got: Sequence[int]
) -> Divergence | None:
    """Find the first difference and measure the reference's top-2 gap there; None when the outputs are the same."""
    position = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if position is None:
        if len(expected) == len(got):
            return None
        position = min(len(expected), len(got))
    from ooospec.chat.template import render

    prompt = decoder.loaded.codec.encode(render(decoder.loaded.tokenizer, list(request.messages), request.tools).prompt)
    gap, top = decoder.top_gap([*prompt, *expected[:position]])
    spacing = torch.finfo(decoder.loaded.model.dtype).eps * 2.0 ** math.floor(math.log2(abs(top) or 1.0))
    at = [ids[position] if position < len(ids) else None for ids in (expected, got)]
    return Divergence(position, at[0] if at[0] is not None else -1, at[1], gap, spacing)
