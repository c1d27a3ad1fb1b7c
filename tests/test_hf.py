"""`model.generate(custom_generate=...)` returns what stock `generate` returns."""

from __future__ import annotations

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
