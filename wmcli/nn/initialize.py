"""Initializations of the papers, and none for modules whose weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wmcli.nn.block_linear import BlockLinear

TRUNCATION = 0.87962566  # standard deviation of a standard normal truncated at +-2
HIDDEN_GAIN = math.sqrt(2)
LAST_GAIN = 0.001  # a new policy is nearly uniform and a new value nearly 0

DRAWING = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
)
"""Functions of `torch.nn.init` that draw."""

Initialization = Literal["fan-average", "fan-in", "orthogonal", "torch"]


def initialize(module: nn.Module, kind: Initialization) -> None:
    """Initialize the linear layers and convolutions of `module`; "torch" leaves torch's defaults."""
    if kind == "fan-average":
        fan_average(module)
    elif kind == "fan-in":
        fan_in(module)
    elif kind == "orthogonal":
        orthogonal(module)


def fan_average(module: nn.Module) -> None:
    """Initialize every convolution and linear layer: truncated normal of variance 1 / mean(fan in, fan out), bias 0.

    Truncation is at two standard deviations, scaled so that the variance is exact after it. Fans include the kernel's
    area.

    Source: DreamerV3 (Hafner et al. 2023, arXiv 2301.04104).
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            area = math.prod(layer.weight.shape[2:])
            fans = area * (layer.weight.shape[0] + layer.weight.shape[1])
            std = math.sqrt(2 / fans) / TRUNCATION
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def fan_in(module: nn.Module) -> None:
    """Initialize every convolution and linear layer: truncated normal of variance 1 / fan in, bias 0.

    Truncation as in `fan_average`. The fan in of a `BlockLinear` counts all its inputs, those of other blocks included.

    Source: DreamerV3's public code since 2024, and Hafner et al. 2025, Nature 640.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | BlockLinear):
            if isinstance(layer, BlockLinear):
                fan = layer.inputs
            else:
                outputs = layer.weight.shape[1 if isinstance(layer, nn.ConvTranspose2d) else 0]
                fan = layer.weight.numel() // outputs
            std = math.sqrt(1 / fan) / TRUNCATION
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def scale_last(network: nn.Sequential, factor: float) -> None:
    """Multiply the weights of a network's last layer, for example by 0 for a head that predicts nothing at first."""
    last: Any = network[-1]
    last.weight.mul_(factor)


def orthogonal(module: nn.Module) -> None:
    """Initialize every linear layer: orthogonal rows or columns of length sqrt(2), 0.001 in the last layer; bias 0.

    Source: actor and critic in Drama's public code (Wang et al. 2024, arXiv 2410.08893).
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, LAST_GAIN if layer is layers[-1] else HIDDEN_GAIN)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@contextmanager
def without_initialization() -> Iterator[None]:
    """Build modules inside the `with` block without drawing weights: all of them are to be loaded afterwards.

    Constants that constructors compute are as ever, and so is torch's generator afterwards.
    """
    drawing = {name: getattr(nn.init, name) for name in DRAWING}
    try:
        for name in DRAWING:
            setattr(nn.init, name, _keep)
        with torch.random.fork_rng([]):
            yield
    finally:
        for name, function in drawing.items():
            setattr(nn.init, name, function)


def _keep(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor
