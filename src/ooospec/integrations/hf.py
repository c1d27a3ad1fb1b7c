"""The transformers door: `model.generate(**inputs, custom_generate=ooo_generate(tokenizer, tools=tools))`.

Runs the ToolSpec proposers of this package in `generate`, and hints too when a `Hint` is given. For a live sidecar use
`ooospec.Decoder`, which starts it at request arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ooospec.chat.codec import TextCodec
from ooospec.chat.schema import read_tools
from ooospec.chat.template import template_format
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

PROCESSORS = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
}  # fmt: skip
CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
"""What the parameters of `_sampling` and `Limits` stand for."""


def ooo_generate(
    tokenizer: Any, tools: Any = None, hint: Hint | None = None, method: str = "ooo", max_nodes: int = 32,
    stop: Sequence[str] = (), streamer: Any = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """Build a `custom_generate` function for one tokenizer and tool list; it keeps its memory between calls.

    The function takes batch size one, greedy decoding or sampling, penalties and end ids as `generate` is given them,
    and returns ids [1, prompt + output]. `stop` = strings that end the output, `streamer` = one of transformers':
    `generate` does not hand its own on to custom functions. Raises UsageError for what would change the output
    otherwise: other batches, beams, other logits processors and stopping criteria.
    """
    memory, known, built = Memory(), read_tools(tools), method_named(method)

    def generate(
        model: Any, input_ids: Tensor, logits_processor: Any = None, stopping_criteria: Any = None,
        generation_config: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        config = generation_config or model.generation_config
        _check(config, logits_processor, stopping_criteria)
        if input_ids.shape[0] != 1:
            raise UsageError(f"ooo_generate decodes one sequence at a time; got a batch of {input_ids.shape[0]}.")
        prompt, output = input_ids[0].tolist(), list[int]()
        room = config.max_new_tokens or (config.max_length or len(prompt) + 20) - len(prompt)
        ends = config.eos_token_id
        ends = eos_ids(model, tokenizer) if ends is None else torch.as_tensor(ends).reshape(-1).tolist()
        codec = TextCodec(tokenizer.backend_tokenizer, ends)
        call_format, _why = template_format(tokenizer)
        context = DecodeContext(codec, prompt, output, known, f"generate/{call_format.name}", call_format.name)
        sources = built.build(Setup(memory, lambda: hint))
        chooser = make_chooser(_sampling(config), prompt)
        target, limits = TargetModel(model), Limits(room, tuple(stop))
        try:
            for commit in decode(target, context, output, sources, chooser, limits, Budget(max_nodes)):
                if streamer is not None:
                    streamer.put(torch.tensor(commit.tokens))
        finally:
            target.close()
        if streamer is not None:
            streamer.end()
        return torch.tensor([prompt + output], device=input_ids.device)

    return generate


def _check(config: Any, processors: Any, criteria: Any) -> None:
    """Refuse what this loop does not apply. Raises UsageError."""
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1 or config.return_dict_in_generate:
        raise UsageError(
            "ooo_generate writes one sequence: no beams, no return sequences, no dictionary; leave them out."
        )
    others = [type(each).__name__ for each in processors or () if type(each).__name__ not in PROCESSORS]
    others += [type(each).__name__ for each in criteria or () if type(each).__name__ not in CRITERIA]
    if others:
        raise UsageError(
            f"ooo_generate does not apply {', '.join(others)}; it takes temperature, top_k, top_p, min_p, "
            "repetition_penalty, max_length and eos_token_id. Leave them out, or use plain generate."
        )


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
