"""OoO-Spec: faster tool calls from large language models, with exactly the same output.

from ooospec import Decoder

with Decoder() as decoder:
    result = decoder.generate("What is the weather in Oslo?", tools)
    print(result.calls, result.acceptance_length)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ooospec.core import Commit, Draft, Hint, Proposer, SlotHint, Tool, ToolCall
    from ooospec.errors import OooSpecError, UsageError
    from ooospec.generation import Generation
    from ooospec.models.resolver import resolve_model
    from ooospec.placement import Placement
    from ooospec.runtime import Decoder

__version__ = "0.1.0"

_HOMES = {
    "Commit": "core", "Draft": "core", "Hint": "core", "Proposer": "core", "SlotHint": "core", "Tool": "core",
    "ToolCall": "core", "OooSpecError": "errors", "UsageError": "errors", "resolve_model": "models.resolver",
    "Decoder": "runtime", "Generation": "generation", "Placement": "placement",
}  # fmt: skip
__all__ = [
    "Commit", "Decoder", "Draft", "Generation", "Hint", "OooSpecError", "Placement", "Proposer", "SlotHint", "Tool",
    "ToolCall", "UsageError", "resolve_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that the text side stays free of torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"ooospec.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ooospec' has no attribute {name!r}")
