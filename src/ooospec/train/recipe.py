"""Training settings and the file that holds them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from ooospec.errors import UsageError

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
"""Recipes by name: `published` (arXiv 2608.00814, for Qwen3-0.6B) and `small` (for CPUs and some hundred requests)."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to train. Batch = requests an optimiser step."""

    rank: int = 32
    alpha: int = 64
    dropout: float = 0.05
    first_layer: int = 0
    """Layers below this one get no adapter, so that no gradient has to be computed for them."""
    epochs: int = 1
    batch: int = 8
    learning_rate: float = 1e-4
    cycles: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How often the learning rate rises and falls."""
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    max_tokens: int = 2048
    seed: int = 0
    evaluate_every: int = 25
    """Optimiser steps."""
    checkpoint_every: int = 10


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
