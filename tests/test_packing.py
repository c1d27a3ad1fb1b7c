"""Packed weights: the same products, whatever the number of rows."""

import pytest
import torch
from torch import nn

from conftest import load_tiny
from ooospec import Decoder
from ooospec.target import packing
from ooospec.target.loading import has_bfloat16
from ooospec.target.packing import FEWEST_ROWS, PackedLinear, is_packed, pack

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN packs nothing")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not has_bfloat16(), reason="no bf16"))]


def layer(dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 80, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_products_are_those_of_the_layer(dtype, bias):
    plain = layer(dtype, bias)
    packed = PackedLinear(plain)
    for shape in ((), (1,), (3,), (1, 1), (1, 2), (1, FEWEST_ROWS), (1, 17), (2, 3), (2, 33)):
        rows = torch.randn(*shape, 96).to(dtype)
        got = packed(rows)
        assert got.shape == (*shape, 80) and got.dtype == dtype
        torch.testing.assert_close(got, plain(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_is_rounded_alike_alone_and_among_others(dtype):
    packed, rows = PackedLinear(layer(dtype)), torch.randn(1, 33, 96).to(dtype)
    together = packed(rows)
    for size in (1, 2, 3, 4, 5, 8, 16, 17, 32):
        assert torch.equal(packed(rows[:, :size].contiguous()), together[:, :size]), size


def test_a_model_keeps_its_size_and_its_output():
    plain, model = load_tiny("qwen3"), load_tiny("qwen3")
    size = model.model.num_parameters()
    pack(model.model)
    left = [name for name, module in model.model.named_modules() if type(module) is nn.Linear]
    assert is_packed(model.model) and not is_packed(plain.model) and not left
    assert model.model.num_parameters() == size and model.model.dtype == torch.float32
    with Decoder(plain, None, budget="fixed") as a, Decoder(model, None, budget="fixed") as b:
        for method in ("ar", "toolspec", "stock"):
            want, got = (d.generate("hello there", method=method, max_new_tokens=24) for d in (a, b))
            assert got.output_ids == want.output_ids


def test_a_target_that_is_named_is_packed_and_one_that_is_given_is_left_alone(folder_of_tiny):
    with Decoder(str(folder_of_tiny), None, dtype="float32", budget="fixed") as decoder:
        assert is_packed(decoder.loaded.model)
    given = load_tiny("llama")
    with Decoder(given, None, budget="fixed"):
        assert not is_packed(given.model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_processor_cannot_multiply_is_left_alone(monkeypatch, dtype):
    monkeypatch.setattr(packing, "has_bfloat16", lambda: False)
    model = nn.Sequential(layer(dtype))
    pack(model)
    assert type(model[0]) is nn.Linear
