"""Average adapters of several training runs: on new requests often better than the best of them (model soups, Wortsman
et al., 2022). LoRA updates are averaged as matrices, and written again as one adapter of a lower rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ooospec.errors import UsageError
from ooospec.sidecar.adapter import read_habits, write_habits
from ooospec.target.loading import check_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def average_adapters(sources: Sequence[Path], out: Path, rank: int) -> float:
    """Write the mean of the adapters to `out`; return the share of its squared norm that the rank leaves out.

    The rank is at most the sum of theirs. Settings besides the weights are those of the last one. Raises UsageError for
    adapters that do not belong together.
    """
    if any(source.resolve() == out.resolve() for source in sources):
        raise UsageError(f"{out} is one of the adapters to be averaged; choose another --out.")
    states, configs, scales = zip(*map(read_adapter, sources), strict=True)
    bases = {config.get("base_model_name_or_path") for config in configs}
    if len(bases) > 1 or any(_outer_shapes(state) != _outer_shapes(states[0]) for state in states):
        raise UsageError("These adapters do not belong together: they were trained on other bases or layers.")
    if rank < 1:
        raise UsageError(f"The rank must be at least 1; got {rank}.")
    rank = min(rank, sum(int(config["r"]) for config in configs))
    made, kept, whole = dict[str, Tensor](), 0.0, 0.0
    for name in (name for name in states[0] if "lora_A" in name):
        other = name.replace("lora_A", "lora_B")
        downs = torch.cat([state[name] for state in states])
        ups = [state[other] * scale for state, scale in zip(states, scales, strict=True)]
        made[name], made[other], sizes = _truncated(torch.cat(ups, 1) / len(states), downs, rank)
        kept, whole = kept + float(sizes[:rank].square().sum()), whole + float(sizes.square().sum())
    out.mkdir(parents=True, exist_ok=True)
    write_weights(out / WEIGHTS, made)
    last = {**configs[-1], "r": rank, "lora_alpha": rank}
    (out / CONFIG).write_text(json.dumps(last, indent=2) + "\n", "utf-8")
    write_habits(out, read_habits(str(sources[-1])))
    return 1 - kept / whole if whole else 0.0


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """Return (the weights of an adapter in float32, its config, the scale of its updates). Raises UsageError."""
    check_adapter(str(folder))
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        state = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
        return state, config, float(config["lora_alpha"]) / float(config["r"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"Adapter {str(folder)!r} is damaged ({type(error).__name__}: {str(error)[:120]}); train it again or fetch "
            "it anew."
        ) from error


def write_weights(path: Path, state: dict[str, Tensor]) -> None:
    """Write an adapter's weights beside those that are there, then swap. Raises OSError where there is no room."""
    temporary = path.with_suffix(".tmp")
    try:
        save_file(state, temporary, metadata={"format": "pt"})
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}; make room and start the command again") from error
    temporary.replace(path)


def file_hash(path: Path) -> str:
    """Return the beginning of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _outer_shapes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the size of each matrix that the rank does not change."""
    return {name: tensor.shape[1 if "lora_A" in name else 0] for name, tensor in state.items()}


def _truncated(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Write `up @ down` with a lower rank; return (down [rank, in], up [out, rank], all singular values)."""
    left, left_rest = torch.linalg.qr(up)
    right, right_rest = torch.linalg.qr(down.T)
    u, sizes, v = torch.linalg.svd(left_rest @ right_rest.T)
    root = sizes[:rank].sqrt()
    new_up, new_down = (left @ u[:, :rank]) * root, (root[:, None] * v[:rank]) @ right.T
    return new_down.bfloat16().contiguous(), new_up.bfloat16().contiguous(), sizes
