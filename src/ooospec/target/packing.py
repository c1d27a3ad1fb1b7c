"""Linear layers whose weights lie as the processor's matrix kernels read them.

Torch keeps weights row by row, so oneDNN puts them in order anew in every pass: for the few rows of a decoding step
that takes a third of the time, for one row half of it (docs/performance.md, entry 35). Here it is done once, at load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ooospec.target.loading import has_bfloat16

FEWEST_ROWS = 4
"""Fewer rows are filled up to so many: kernels for less are slower, and the one for one row rounds otherwise."""
USUAL_ROWS = 16
"""Rows of a pass that the weights' order is made for; it is right for any number."""


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU. [.., inputs] -> [.., outputs]"""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        order: Any = torch.ops.mkldnn._reorder_linear_weight
        self.weight = nn.Parameter(order(linear.weight.detach(), USUAL_ROWS), requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product: Any = torch.ops.mkldnn._linear_pointwise

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply by the weights and add the bias."""
        rows = inputs.reshape(-1, self.in_features)
        missing = max(0, FEWEST_ROWS - len(rows))
        filled = nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        outputs: Tensor = self._product(filled, self.weight, self.bias, "none", [], "")
        return outputs[: len(rows)].reshape(*inputs.shape[:-1], self.out_features)


def pack(model: nn.Module) -> None:
    """Replace all linear layers of a model in place; leave them where the processor or torch has no use for it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and _packable(child):
                setattr(module, name, PackedLinear(child))


def is_packed(model: nn.Module) -> bool:
    """Tell whether any layer of a model is packed."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def _packable(linear: nn.Linear) -> bool:
    weight = linear.weight
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16()))
    )
