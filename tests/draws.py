"""Are first weights drawn as they should be? Deviations may miss by five standard errors for their number of elements.

A parameter of a few numbers tells little of its distribution: only its range is looked at.
"""

from __future__ import annotations

import math

import pytest
from torch import Tensor, nn

ERRORS = 5


def assert_deviation(weight: Tensor, want: float, kurtosis: float = 3.0) -> None:
    """The root mean square of draws with mean 0."""
    relative = ERRORS * math.sqrt((kurtosis - 1) / (4 * weight.numel()))
    assert weight.detach().double().square().mean().sqrt().item() == pytest.approx(want, rel=relative)


def assert_uniform(weight: Tensor, bound: float) -> None:
    """Uniform between -bound and bound."""
    assert weight.detach().abs().max() <= bound
    assert_deviation(weight, bound / math.sqrt(3), kurtosis=1.8)


def assert_fan_average(layer: nn.Module) -> None:
    """A truncated normal of variance 1 / mean(fan in, fan out), and no bias."""
    weight: Tensor = layer.weight
    want = math.sqrt(2 / ((weight.shape[0] + weight.shape[1]) * weight[0, 0].numel()))
    assert_deviation(weight, want, kurtosis=2.4)
    assert weight.detach().abs().max() <= 2.001 * want / 0.8796
    assert layer.bias is None or not layer.bias.any()


def assert_torchs_default(layer: nn.Module) -> None:
    """U(-a, a) with a^-2 the fan in of torch, of weight and bias."""
    weight: Tensor = layer.weight
    bound = 1 / math.sqrt(weight[0].numel())
    assert_uniform(weight, bound)
    if layer.bias is not None:
        assert 0 < layer.bias.detach().abs().max() <= bound
