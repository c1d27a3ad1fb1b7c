"""Training settings and the file that holds them."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from ooospec.errors import UsageError

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
"""Recipes by name: `published` (arXiv 2608.00814, for Qwen3-0.6B) and `small` (for CPUs and some hundred requests)."""


Count = Annotated[int, msgspec.Meta(ge=1)]


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to train. Batch = requests an optimiser step."""

    rank: Count = 32
    alpha: Count = 64
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    first_layer: int = 0
    """Layers below this one get no adapter, so that no gradient has to be computed for them."""
    epochs: Count = 1
    batch: Count = 8
    learning_rate: Annotated[float, msgspec.Meta(gt=0)] = 1e-4
    cycles: Count = 1
    """How often the learning rate rises and falls."""
    warmup: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    clip: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    max_tokens: Count = 2048
    seed: int = 0
    evaluate_every: Count = 25
    """Optimiser steps."""
    checkpoint_every: Count = 10

    def __post_init__(self) -> None:
        for name in ("learning_rate", "warmup", "weight_decay", "clip"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number")


def read_recipe(name: str) -> Recipe:
    """Read a recipe by name or a TOML file; what it leaves out keeps its default. Raises UsageError."""
    path = SHIPPED.get(name) or Path(name)
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), Recipe)
    except OSError as error:
        known = ", ".join(SHIPPED)
        raise UsageError(
            f"Cannot read the recipe {name!r}: {error.strerror}; give a file, or one of {known}."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        allowed = ", ".join(Recipe.__struct_fields__)
        raise UsageError(f"The recipe {str(path)!r} is not usable: {error}. Settings: {allowed}.") from error
