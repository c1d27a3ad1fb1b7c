"""`model.generate(custom_generate=...)` returns what stock `generate` returns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ooospec.errors import UsageError
from ooospec.integrations.hf import ooo_generate
from test_exactness import PROMPT


@pytest.mark.parametrize("method", ["ar", "lookup", "toolspec", "ooo"])
def test_custom_generate_equals_stock(tiny, tools, method):
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    expected = tiny.model.generate(ids, **options)
    door = ooo_generate(tiny.tokenizer, tools, method=method)
    for _ in range(2):
        assert torch.equal(tiny.model.generate(ids, custom_generate=door, **options), expected)
    with pytest.raises(UsageError, match="batch of 2"):
        tiny.model.generate(ids.repeat(2, 1), custom_generate=door, max_new_tokens=3)


def test_what_generate_was_given_holds(tiny_llama, tools):
    ids, model = torch.tensor([PROMPT]), tiny_llama.model
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    plain = model.generate(ids, **options)[0, len(PROMPT) :].tolist()
    door = ooo_generate(tiny_llama.tokenizer, tools)
    texts = [tiny_llama.codec.decode([token]) for token in plain[4:]]
    stop = next(text for text in texts if text.isascii() and text.isalnum())
    for more in (
        {"eos_token_id": plain[5]},
        {"eos_token_id": [plain[7], plain[4]]},
        {"repetition_penalty": 1.4},
    ):
        expected = model.generate(ids, **options, **more)
        assert torch.equal(model.generate(ids, custom_generate=door, **options, **more), expected)
    stopped = model.generate(ids, **options, stop_strings=stop, tokenizer=tiny_llama.tokenizer)
    assert torch.equal(
        model.generate(ids, custom_generate=ooo_generate(tiny_llama.tokenizer, tools, stop=[stop]), **options),
        stopped,
    )
    shown = []
    streamer = SimpleNamespace(
        put=lambda tokens: shown.extend(tokens.reshape(-1).tolist()), end=lambda: shown.append("end")
    )
    model.generate(ids, custom_generate=ooo_generate(tiny_llama.tokenizer, tools, streamer=streamer), **options)
    assert shown == [*plain, "end"]
    for more, name in (
        ({"num_beams": 2}, "no beams"),
        ({"suppress_tokens": [3]}, "SuppressTokensLogitsProcessor"),
        ({"max_time": 5.0}, "MaxTimeCriteria"),
    ):
        with pytest.raises(UsageError, match=name):
            model.generate(ids, custom_generate=door, **options, **more)
