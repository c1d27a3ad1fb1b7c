"""Load a transformers model and its tokenizer from a folder, ready for tree verification."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ooospec.chat.codec import TextCodec
from ooospec.config import AUTO
from ooospec.errors import UsageError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with everything that belongs to it."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    codec: TextCodec
    dtype: str
    device: str


def default_device() -> str:
    """Return the accelerator torch sees, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def parse_device(name: str | None) -> str:
    """Return the device `name`, or the default one for None. Raises UsageError for one that is not here."""
    if name is None:
        return default_device()
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    here += ["mps"] if torch.backends.mps.is_available() else []
    if name not in here and not (name == "cuda" and len(here) > 1 and here[1].startswith("cuda")):
        raise UsageError(f"No device {name!r} here; choose one of {', '.join(here)}, or none for the best.")
    return name


def chosen_dtype(name: str, device: str) -> str:
    """Return the dtype `name`; `auto` = bfloat16, or what the device computes in where it has no bfloat16.

    A processor without it multiplies matrices in bfloat16 row by row, so that to verify ten tokens takes as long as to
    write several one by one (docs/performance.md, entry 31). Raises UsageError for other names.
    """
    if name == AUTO:
        if device.startswith("cuda"):
            with torch.cuda.device(device):
                return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        return "float32" if device == "cpu" and not has_bfloat16() else "bfloat16"
    if name not in DTYPES:
        raise UsageError(f"Unknown dtype {name!r}; choose one of {', '.join((AUTO, *DTYPES))}.")
    return name


def has_bfloat16() -> bool:
    """Tell whether the CPU has instructions for bfloat16; on x86 oneDNN says so of every AVX-512, too."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """List the model's end-of-sequence ids, the usual one first."""
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        if value is not None:
            return list(value) if isinstance(value, list | tuple) else [int(value)]
    return []


def load_model(
    path: Path, name: str, dtype: str = AUTO, device: str | None = None, adapter: str | None = None
) -> LoadedModel:
    """Load the model in folder `path`, with a peft adapter merged into it.

    Raises UsageError for an unknown dtype or device, or a folder that transformers cannot load.
    """
    device = parse_device(device)
    dtype = chosen_dtype(dtype, device)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
    except (ValueError, OSError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise UsageError(
            f"Cannot load {name!r} from {path}: {_first_line(error)}. A folder with config.json, a tokenizer and "
            "safetensors weights that transformers can load is needed."
        ) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if adapter:
        model = _with_adapter(model, adapter)
    model = model.to(device).eval()
    codec = TextCodec(tokenizer.backend_tokenizer, eos_ids(model, tokenizer))
    return LoadedModel(name, model, tokenizer, codec, dtype, device)


def stored_weights(path: Path) -> int:
    """Count the weights in a model's folder without loading them; 0 where they are not safetensors or damaged."""
    total = 0
    try:
        for file in path.glob("model*.safetensors"):
            with safe_open(file, "pt") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return 0
    return total


def _with_adapter(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    check_adapter(adapter)
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except RuntimeError as error:
        raise UsageError(f"Adapter {adapter!r} does not fit {model.config.model_type}: {str(error)[:200]}") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"Adapter {adapter!r} is damaged ({_first_line(error)}); train it again or fetch it anew."
        ) from error


def check_adapter(adapter: str | None) -> None:
    """Raise UsageError if `adapter` is no folder of a peft adapter."""
    if not adapter:
        return
    folder = Path(adapter)
    weights = any((folder / f"adapter_model.{ending}").is_file() for ending in ("safetensors", "bin"))
    if not weights or not (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"No adapter at {adapter!r}: a folder with adapter_config.json and adapter_model.safetensors is needed."
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.') if lines else 'no message'}"
