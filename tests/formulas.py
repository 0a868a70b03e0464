"""Weights and inputs from formulas, which other implementations can compute as well: for numbers of public code."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def numbers(*shape: int, phase: int = 0) -> Tensor:
    """In [-1, 1], float64, without a pattern that a matrix would notice, and exact."""
    i = torch.arange(math.prod(shape))
    return (((31 * i * i + 17 * i + 101 * phase) % 1009).double() / 504 - 1).view(shape)


@torch.no_grad()
def filled(model: nn.Module) -> nn.Module:
    """Every weight and statistic from its name, of a size that keeps outputs near 1."""
    for name, value in model.state_dict().items():
        new = numbers(*value.shape, phase=sum(name.encode()))
        if ".raw_" in name:
            value.copy_(2 + 1.5 * new)  # means, deviations and spans
        elif value.ndim > 1:
            value.copy_(new * math.sqrt(3 / value[0].numel()))
        elif value.ndim == 1:
            value.copy_(0.3 * new + name.endswith(("weight", "var")) * 1.0)  # norms begin at 1
    return model
