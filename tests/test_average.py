"""Averaging adapters."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ooospec.errors import UsageError
from ooospec.sidecar.adapter import Habits, read_habits, write_habits
from ooospec.train.average import average_adapters, write_weights

NAME = "base_model.model.layers.0.q_proj.lora_{}.weight"


def adapter(folder, seed, rank=3, alpha=6, base="base", name=NAME, width=8):
    torch.manual_seed(seed)
    folder.mkdir()
    weights = {name.format("A"): torch.randn(rank, width), name.format("B"): torch.randn(10, rank)}
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": rank, "lora_alpha": alpha, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_habits(folder, Habits(base=base, answers_null=True))
    return folder


def update(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    down, up = (weights[NAME.format(part)].float() for part in "AB")
    return up @ down * config["lora_alpha"] / config["r"]


def test_the_mean_of_the_updates_is_kept_as_far_as_the_rank_allows(tmp_path):
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2, rank=2, alpha=2)
    mean = (update(one) + update(two)) / 2
    assert average_adapters([one, two], tmp_path / "whole", 5) == pytest.approx(0.0, abs=1e-5)
    torch.testing.assert_close(update(tmp_path / "whole"), mean, atol=0.05, rtol=0.05)  # bfloat16
    lost = average_adapters([one, two], tmp_path / "part", 2)
    error = (update(tmp_path / "part") - mean).square().sum() / mean.square().sum()
    assert 0.01 < lost < 1 and error == pytest.approx(lost, abs=0.01)
    assert read_habits(str(tmp_path / "part")).answers_null
    assert json.loads((tmp_path / "part" / "adapter_config.json").read_text())["r"] == 2


def test_the_rank_is_at_most_that_of_all_together(tmp_path):
    one = adapter(tmp_path / "one", 1)
    average_adapters([one], tmp_path / "out", 16)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 3
    torch.testing.assert_close(update(tmp_path / "out"), update(one), atol=0.05, rtol=0.05)


def test_an_adapter_is_not_written_over(tmp_path):
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    before = (one / "adapter_model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="is one of the adapters to be averaged"):
        average_adapters([one, two], tmp_path / "two" / ".." / "one", 4)
    assert (one / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_model.safetensors", b"cut"),
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b'{"lora_alpha": 3}'),
    ],
)
def test_a_damaged_adapter_is_told(tmp_path, file, content):
    one = adapter(tmp_path / "one", 1)
    (one / file).write_bytes(content)
    with pytest.raises(UsageError, match=r"is damaged .*train it again or fetch it anew"):
        average_adapters([one], tmp_path / "out", 4)


def test_a_full_disk_keeps_the_weights_that_were_there(tmp_path, monkeypatch):
    one = adapter(tmp_path / "one", 1)
    before = (one / "adapter_model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("ooospec.train.average.save_file", full)
    with pytest.raises(OSError, match="make room"):
        write_weights(one / "adapter_model.safetensors", {})
    assert (one / "adapter_model.safetensors").read_bytes() == before


def test_adapters_that_do_not_belong_together_are_refused(tmp_path):
    one = adapter(tmp_path / "one", 1)
    for other in (
        adapter(tmp_path / "base", 2, base="other"),
        adapter(tmp_path / "layers", 2, name=NAME.replace("q_proj", "k_proj")),
        adapter(tmp_path / "width", 2, width=9),
    ):
        with pytest.raises(UsageError, match="do not belong together"):
            average_adapters([one, other], tmp_path / "out", 4)
    with pytest.raises(UsageError, match="No adapter at"):
        average_adapters([one, tmp_path / "absent"], tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()
