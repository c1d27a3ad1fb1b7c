"""Linear layers whose weights lie as the processor's matrix kernels read them.

Torch keeps weights row by row, so oneDNN puts them in order anew in every pass: for the few rows of a decoding step
that takes a third of the time, for one row half of it (docs/performance.md, entry 35). Here it is done once, at load.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ooospec.target.loading import has_bfloat16

logger = logging.getLogger("ooospec.target")
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
    """Replace all linear layers of a model in place; leave them where the processor or torch has no use for it.

    Every layer gets weights of its own: an output layer that shared those of the embeddings shares them no more.
    """
    if not _works():
        return
    for module in [module for module in model.modules() if type(module) is not nn.Linear]:  # a replaced one can go
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and _packable(child):
                setattr(module, name, PackedLinear(child))


def is_packed(model: nn.Module) -> bool:
    """Tell whether any layer of a model is packed."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


@cache
def _works() -> bool:
    """Tell whether this torch has the products, which are no part of its documented interface."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        with torch.inference_mode():
            PackedLinear(nn.Linear(8, 8, device="cpu", dtype=torch.float32))(torch.ones(1, 8))
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
        logger.warning(
            "Weights are not packed, as this torch lacks the products for it (%s); decoding is slower.", error
        )
        return False
    return True


def _packable(linear: nn.Linear) -> bool:
    weight = linear.weight
    return (
        type(weight.data) is torch.Tensor  # not one that a quantizing library put there
        and weight.device.type == "cpu"
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16()))
    )
