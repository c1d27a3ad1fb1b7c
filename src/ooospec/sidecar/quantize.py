"""Int8 weights for a sidecar on a CPU: its precision changes no output, only how often hints are right.

What it buys is measured by benchmarks/wave.py and told in docs/performance.md.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ooospec.config import AUTO
from ooospec.errors import UsageError
from ooospec.sidecar.adapter import check_base, read_habits, shape_of
from ooospec.target.loading import DTYPES, LoadedModel, load_model, parse_device
from ooospec.target.packing import pack

MIN_HIDDEN_SIZE = 768
"""Narrower models lose most of their accuracy (SmolLM2-135M, width 576, does)."""


def can_quantize(hidden_size: int, device: str) -> bool:
    """Tell whether int8 pays: on x86 CPUs, for models wide enough."""
    return device == "cpu" and "x86" in torch.backends.quantized.supported_engines and hidden_size >= MIN_HIDDEN_SIZE


def quantize_int8(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every linear layer by one with int8 weights (per channel) and activations scaled per pass."""
    from torch.ao.quantization import PlaceholderObserver, QConfigDynamic, quantize_dynamic
    from torch.ao.quantization.observer import default_per_channel_weight_observer

    torch.backends.quantized.engine = "x86"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this interface will move
        activation = PlaceholderObserver.with_args(
            dtype=torch.quint8, quant_min=0, quant_max=255, is_dynamic=True, reduce_range=False
        )
        config = QConfigDynamic(activation=activation, weight=default_per_channel_weight_observer)
        layers = {name: config for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        quantized: PreTrainedModel = quantize_dynamic(model, layers, dtype=torch.qint8, inplace=True)
    return quantized


def check_sidecar_dtype(dtype: str) -> None:
    """Raise UsageError for a name that is no dtype of a sidecar."""
    if dtype not in (AUTO, "int8", *DTYPES):
        raise UsageError(f"Unknown sidecar dtype {dtype!r}; choose one of {AUTO}, int8, {', '.join(DTYPES)}.")


def load_sidecar(path: Path, name: str, dtype: str, device: str | None, adapter: str | None) -> LoadedModel:
    """Load a sidecar; dtype "auto" = int8 where it pays, else as for a target. Raises UsageError for other names."""
    check_sidecar_dtype(dtype)
    device = parse_device(device)
    config = json.loads((path / "config.json").read_text("utf-8"))
    hidden_size = int(config.get("hidden_size") or 0)
    if adapter:
        check_base(read_habits(adapter), adapter, name, shape_of(config))
    if dtype == "auto":
        dtype = "int8" if can_quantize(hidden_size, device) else AUTO
    if dtype != "int8":
        loaded = load_model(path, name, dtype, device, adapter)
        pack(loaded.model)
        return loaded
    loaded = load_model(path, name, "float32", device, adapter)
    return replace(loaded, model=quantize_int8(loaded.model), dtype="int8")
