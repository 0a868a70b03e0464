"""Computation in float32 at least, for outputs whose small differences count."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is of lower precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Float32Linear(nn.Linear):
    """A Linear in the precision of its weights, float32 at least, also under autocast and in a frozen model.

    For the last layer of a head whose logits are decoded to numbers that are compared. In bfloat16 a logit has 8 bits:
    a search that rescales the values of siblings to [0, 1] would choose by rounding.
    """

    in_float32 = True  # `Machine.freeze` keeps the weights

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))
