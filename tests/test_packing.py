"""Packed weights: the same products, whatever the number of rows."""

import gc
import weakref

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
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 80), (1024, 4), (4864, 24)])
@torch.inference_mode()
def test_a_row_is_rounded_alike_alone_and_among_others(dtype, inputs, outputs):
    """Up to the order of sums: kernels of other processors may take another one for more rows."""
    torch.manual_seed(0)
    packed, rows = PackedLinear(nn.Linear(inputs, outputs, dtype=dtype)), torch.randn(1, 33, inputs).to(dtype)
    together = packed(rows)
    for size in (1, 2, 3, 4, 5, 8, 16, 17, 32):
        alone = packed(rows[:, :size].contiguous())
        torch.testing.assert_close(
            alone, together[:, :size], rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
        if size < FEWEST_ROWS:  # filled up: the very same product
            filled = packed(torch.cat([rows[:, :size], torch.zeros(1, FEWEST_ROWS - size, inputs, dtype=dtype)], 1))
            assert torch.equal(alone, filled[:, :size])


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
    with Decoder(str(folder_of_tiny), None, dtype="float32", device="cpu", budget="fixed") as decoder:
        assert is_packed(decoder.loaded.model)
    given = load_tiny("llama")
    with Decoder(given, None, budget="fixed"):
        assert not is_packed(given.model)


def test_a_layer_that_is_replaced_is_let_go_before_the_next_one_is_packed(monkeypatch):
    model = nn.Sequential(*[nn.Sequential(layer(torch.float32)) for _ in range(4)])
    assert packing._works()
    alive = [weakref.ref(module[0]) for module in model]
    seen = []
    packed = packing.PackedLinear

    def counted(linear):
        gc.collect()
        seen.append(sum(ref() is not None for ref in alive))
        return packed(linear)

    monkeypatch.setattr(packing, "PackedLinear", counted)
    pack(model)
    assert seen == [4, 3, 2, 1]


def test_tied_weights_are_packed_apart_and_the_embeddings_stay():
    plain, tied = load_tiny("qwen2"), load_tiny("qwen2")
    for model in (plain.model, tied.model):
        model.lm_head.weight = model.get_input_embeddings().weight
    pack(model)
    assert type(model.lm_head) is PackedLinear and type(model.get_input_embeddings().weight.data) is torch.Tensor
    with Decoder(plain, None, budget="fixed") as a, Decoder(tied, None, budget="fixed") as b:
        assert a.generate("hello", max_new_tokens=16).output_ids == b.generate("hello", max_new_tokens=16).output_ids


def test_a_torch_without_the_products_packs_nothing_and_says_so(monkeypatch, caplog):
    packing._works.cache_clear()
    monkeypatch.setattr(packing, "PackedLinear", lambda linear: torch.ops.mkldnn.no_such_product)
    model = nn.Sequential(layer(torch.float32))
    pack(model)
    packing._works.cache_clear()
    assert type(model[0]) is nn.Linear and "not packed" in caplog.text


def test_weights_that_are_more_than_a_tensor_are_left_alone():
    class Quantized(torch.Tensor):
        pass

    model = nn.Sequential(layer(torch.float32))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Quantized))
    pack(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_processor_cannot_multiply_is_left_alone(monkeypatch, dtype):
    monkeypatch.setattr(packing, "has_bfloat16", lambda: False)
    model = nn.Sequential(layer(dtype))
    pack(model)
    assert type(model[0]) is nn.Linear
