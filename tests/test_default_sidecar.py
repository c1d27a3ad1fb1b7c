"""Where the default sidecar is used, and where it is left out."""

from __future__ import annotations

import re

import pytest

from ooospec.config import AUTO
from ooospec.placement import Placement
from ooospec.runtime import Decoder
from ooospec.target.loading import stored_weights


def reached(self, sidecar, *rest):
    raise InterruptedError(sidecar)


THREADS, TURNS = Placement(1, 2, 1), Placement(0, 2, 2)


@pytest.mark.parametrize(
    ("placement", "smaller", "named", "used"),
    [
        (TURNS, 2, (), False),
        (TURNS, 1, (), True),
        (THREADS, 2, (), True),
        (TURNS, 2, ("sidecar",), True),
        (TURNS, 2, ("adapter",), True),
    ],
    ids=["as large, by turns", "small enough", "cores of its own", "sidecar named", "adapter named"],
)
def test_the_default_sidecar_is_used_where_it_pays(
    tiny_llama, folder_of_tiny, tmp_path, monkeypatch, placement, smaller, named, used
):
    monkeypatch.setattr("ooospec.runtime.DEFAULT_SIDECAR", str(folder_of_tiny))
    monkeypatch.setattr("ooospec.config.SMALLER", smaller)
    monkeypatch.setattr("ooospec.config.DEFAULT_SIDECAR_WEIGHTS", tiny_llama.model.num_parameters())
    monkeypatch.setattr(Decoder, "_reach", reached)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    folders = {"sidecar": str(folder_of_tiny), "adapter": str(tmp_path)}
    options = {"sidecar": AUTO, **{name: folders[name] for name in named}}
    if used:
        with pytest.raises(InterruptedError, match=re.escape(str(folder_of_tiny))):
            Decoder(tiny_llama, device="cpu", budget="fixed", placement=placement, **options)
        return
    with Decoder(tiny_llama, device="cpu", budget="fixed", placement=placement, **options) as decoder:
        assert "name a sidecar" in decoder.left_out
        assert decoder.sidecar_name == ""
        ar, ooo = (decoder.generate("Hello", method=name, max_new_tokens=8) for name in ("ar", "ooo"))
        assert ooo.output_ids == ar.output_ids


def test_weights_are_counted_without_loading_them(tiny_llama, folder_of_tiny, tmp_path):
    assert stored_weights(folder_of_tiny) == tiny_llama.model.num_parameters()
    assert stored_weights(tmp_path) == 0
