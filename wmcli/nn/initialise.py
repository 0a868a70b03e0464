"""Initialisations that the papers state."""

from __future__ import annotations

import math

from torch import nn

TRUNCATION = 0.87962566  # standard deviation of a standard normal cut at +-2


def fan_average(module: nn.Module) -> None:
    """Every convolution and linear layer of `module`: truncated normal of variance 1 / mean(fan in, fan out), bias 0.

    Cut at two standard deviations and widened so that the variance holds after the cut. Fans count the kernel's area.
    As DreamerV3 (Hafner et al. 2023, arXiv 2301.04104) and its followers draw them.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            area = math.prod(layer.weight.shape[2:])
            fans = area * (layer.weight.shape[0] + layer.weight.shape[1])
            std = math.sqrt(2 / fans) / TRUNCATION
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
