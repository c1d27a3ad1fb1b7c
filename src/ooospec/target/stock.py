"""Decode with transformers' own greedy `generate`: the second denominator of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ooospec.core import BONUS, Commit, DecodeContext
from ooospec.stopping import Limits
from ooospec.target.kv_cache import TreeCache
from ooospec.target.model import TargetModel


class _Clock(BaseStreamer):
    """Notes when each token comes; the prompt, which is streamed first, apart."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take note of tokens."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Finish."""


class _Limit(StoppingCriteria):
    """Ends where `Limits` would cut."""

    def __init__(self, limits: Limits, codec: Any, prompt: int) -> None:
        self.limits, self.codec, self.prompt = limits, codec, prompt
        self.reason: str | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return a flag per sequence. [1]"""
        output = input_ids[0, self.prompt :].tolist()
        _, self.reason = self.limits.cut(self.codec, output[:-1], output[-1:])
        return torch.tensor([self.reason is not None], device=input_ids.device)


def stock_decode(
    target: TargetModel, context: DecodeContext, output: list[int], limits: Limits, salt: str, clock: float
) -> Iterator[Commit]:
    """Decode greedily with `generate`, from what the prefix cache holds; yield a commit a token once it has ended."""
    prompt = list(context.prompt_ids)
    target.begin(prompt, salt)
    if target.threads is not None:
        torch.set_num_threads(target.threads())
    ids = torch.tensor([prompt], device=target.device)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=limits.max_new_tokens, repetition_penalty=1.0, pad_token_id=0,
        eos_token_id=sorted(context.codec.eos_ids),
    )  # fmt: skip
    watch, limit = _Clock(), _Limit(limits, context.codec, len(prompt))
    with torch.inference_mode():
        generated = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=watch,
            **{target.cache_name: _dynamic(target.cache)}, stopping_criteria=StoppingCriteriaList([limit]),
        )  # fmt: skip
    target.begin([0])  # the tokens of this request are in a cache of its own, which goes now
    output += generated[0, len(prompt) :].tolist()
    yield from _commits(output, [clock, *watch.times[-len(output) :]], clock, limit.reason, len(prompt))


def _commits(
    output: Sequence[int], times: Sequence[float], clock: float, reason: str | None, prompt: int
) -> Iterator[Commit]:
    for number, token in enumerate(output):
        last = number == len(output) - 1
        yield Commit(
            (token,), (BONUS,), number, 0,
            verify_ms=(times[number + 1] - times[number]) * 1e3,
            lead_tokens=0 if number else prompt,
            start_ms=(times[number] - clock) * 1e3,
            finish_reason=(reason or "length") if last else None,
        )  # fmt: skip


def _dynamic(cache: TreeCache) -> DynamicCache:
    """Copy the committed slots into transformers' own cache."""
    copy = DynamicCache()
    if cache.length:
        for index, layer in enumerate(cache.layers):
            copy.update(layer.keys.clone(), layer.values.clone(), index)
    return copy
