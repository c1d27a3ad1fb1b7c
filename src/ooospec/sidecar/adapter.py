"""What a trained adapter brings besides its weights: how its answers are to be read; and the adapters that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ooospec.config import AUTO, DEFAULT_SIDECAR
from ooospec.errors import UsageError

SETTINGS = "ooospec.json"
SHIPPED = Path(__file__).parent / "adapters"
NONE = "none"
ZERO_SHOT_PRIOR_WEIGHT = 0.5
"""Share of a tool name's log-probability without any request that is taken off its score: zero-shot models favour
tools that are listed first and short names (domain-conditional PMI, arXiv 2104.08315, at half weight)."""


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How a sidecar's answers are read. The defaults are those of a model that was not trained for the questions."""

    base: str = ""
    """Model that the adapter was trained on."""
    base_shape: dict[str, int] = {}
    """Sizes in the base's config.json that must be the same."""
    answers_null: bool = False
    """It says null for every slot to be left out; otherwise only what the dialogue mentions is believed."""
    prior_weight: float = ZERO_SHOT_PRIOR_WEIGHT
    function_temperature: float = 1.0
    """Divides the functions' log-probabilities, to get honest chances (Guo et al., 2017)."""
    value_scale: float = 1.0
    value_shift: float = 0.0
    """Scale and shift of the log-odds of values, for the same (Platt, 1999)."""


_SHAPE = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")


def shape_of(config: Any) -> dict[str, int]:
    """List the sizes that an adapter depends on, from a model's config (an object or a mapping)."""
    found = {key: config.get(key) if isinstance(config, dict) else getattr(config, key, None) for key in _SHAPE}
    return {key: int(value) for key, value in found.items() if value is not None}


def find_adapter(adapter: str | None, sidecar: str) -> str | None:
    """Return the folder of the adapter to use: `auto` = the one that ships for this sidecar, if there is one."""
    if adapter == AUTO:
        shipped = SHIPPED / (DEFAULT_SIDECAR if sidecar == AUTO else sidecar)
        return str(shipped) if (shipped / "adapter_config.json").is_file() else None
    return None if adapter in (None, NONE) else adapter


def is_named(adapter: str | None) -> bool:
    """Tell whether somebody chose an adapter, and so wants the sidecar that it belongs to."""
    return adapter not in (AUTO, NONE, None)


def adapter_label(adapter: str | None, sidecar: str) -> str | None:
    """Name the adapter in reports: its folder as given, `shipped`, or None."""
    found = find_adapter(adapter, sidecar)
    return "shipped" if found is not None and adapter == AUTO else found


def read_habits(adapter: str | None) -> Habits:
    """Read the settings beside an adapter's weights; those of an untrained model where there are none."""
    path = Path(adapter) / SETTINGS if adapter else None
    if path is None or not path.is_file():
        return Habits()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Habits)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is damaged ({error}); train the adapter again or fetch it anew.") from error


def write_habits(adapter: Path, habits: Habits) -> None:
    """Write the settings beside an adapter's weights."""
    (adapter / SETTINGS).write_bytes(msgspec.json.format(msgspec.json.encode(habits)) + b"\n")


def check_base(habits: Habits, adapter: str, sidecar: str, shape: dict[str, int]) -> None:
    """Raise UsageError if the adapter was trained on a model of other sizes."""
    differing = [key for key, value in habits.base_shape.items() if shape.get(key) != value]
    if differing:
        told = ", ".join(f"{key} {habits.base_shape[key]}, here {shape.get(key)}" for key in differing)
        raise UsageError(
            f"Adapter {adapter!r} was trained on {habits.base} and does not fit sidecar {sidecar!r} ({told}); "
            f"use it with --sidecar {habits.base}, or --adapter none."
        )
