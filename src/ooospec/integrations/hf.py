"""The transformers door: `model.generate(**inputs, custom_generate=ooo_generate(tokenizer, tools=tools))`.

Runs the ToolSpec proposers of this package in `generate`, and hints too when a `Hint` is given. For a live sidecar use
`ooospec.Decoder`, which starts it at request arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ooospec.chat.codec import TextCodec
from ooospec.chat.schema import read_tools
from ooospec.core import DecodeContext, Hint
from ooospec.engine import decode
from ooospec.errors import UsageError
from ooospec.memory import Memory
from ooospec.methods import Setup, method_named
from ooospec.planner import Budget
from ooospec.sampling import Sampling, make_chooser
from ooospec.stopping import Limits
from ooospec.target.loading import eos_ids
from ooospec.target.model import TargetModel


def ooo_generate(
    tokenizer: Any, tools: Any = None, hint: Hint | None = None, method: str = "ooo", max_nodes: int = 32
) -> Callable[..., Tensor]:
    """Build a `custom_generate` function for one tokenizer and tool list; it keeps its memory between calls.

    The function takes batch size one and returns ids [1, prompt + output]. Raises UsageError for other batches.
    """
    memory, known, built = Memory(), read_tools(tools), method_named(method)

    def generate(model: Any, input_ids: Tensor, generation_config: Any = None, **_: Any) -> Tensor:
        if input_ids.shape[0] != 1:
            raise UsageError(f"ooo_generate decodes one sequence at a time; got a batch of {input_ids.shape[0]}.")
        config = generation_config or model.generation_config
        prompt, output = input_ids[0].tolist(), list[int]()
        room = config.max_new_tokens or (config.max_length or len(prompt) + 20) - len(prompt)
        codec = TextCodec(tokenizer.backend_tokenizer, eos_ids(model, tokenizer))
        context = DecodeContext(codec, prompt, output, known, "generate")
        sources = built.build(Setup(memory, lambda: hint))
        chooser = make_chooser(_sampling(config), prompt)
        target = TargetModel(model)
        try:
            for _commit in decode(target, context, output, sources, chooser, Limits(room), Budget(max_nodes)):
                pass
        finally:
            target.close()
        return torch.tensor([prompt + output], device=input_ids.device)

    return generate


def _sampling(config: Any) -> Sampling:
    """Read the sampling parameters of a transformers generation config; greedy decoding keeps its penalty."""
    penalty = float(config.repetition_penalty or 1.0)
    if not config.do_sample:
        return Sampling(repetition_penalty=penalty)
    names = ("top_p", "top_k", "min_p")
    given = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    seed = torch.initial_seed() % 2**63
    return Sampling.of({"temperature": 1.0 if config.temperature is None else config.temperature, "seed": seed,
                        "repetition_penalty": penalty, **given})  # fmt: skip
