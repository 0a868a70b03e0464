"""The residual trunk: sizes, counts by arithmetic, its definition written out, memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.nn.residual_trunk import ACTIVATIONS, ResidualTrunk, TrunkBlock, side


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def block(inputs: int, outputs: int) -> int:
    """Two convolutions of 3 x 3 with a norm each, and a third convolution where the count of channels changes."""
    shortcut = 9 * inputs * outputs if inputs != outputs else 0
    return 9 * inputs * outputs + 9 * outputs**2 + 4 * outputs + shortcut


def test_the_papers_numbers():
    trunk = ResidualTrunk(3, (32, 64), "leaky_relu")
    first = 9 * 3 * 32 + 2 * 32
    assert (first, block(32, 32), block(32, 64), block(64, 64)) == (928, 18_560, 73_984, 73_984)
    assert count(trunk) == 928 + 18_560 + 73_984 + 3 * 73_984 == 315_424
    assert count(ResidualTrunk(4, (6, 10), "relu")) == 9 * 4 * 6 + 12 + block(6, 6) + block(6, 10) + 3 * block(10, 10)


def test_equal_counts_of_channels_still_shrink():
    assert ResidualTrunk(3, (8, 8), "relu")(torch.rand(2, 3, 32, 32)).shape == (2, 8, 4, 4)


@pytest.mark.parametrize("size", [64, 32, 20, 84, 9])
def test_sizes(size):
    trunk = ResidualTrunk(3, (4, 6), "relu")
    assert trunk(torch.rand(2, 3, size, size)).shape == (2, 6, side(size), side(size))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_its_definition(activation):
    """Written out with functions, in eval mode with statistics that are not those of the beginning."""
    torch.manual_seed(0)
    act = {"leaky_relu": F.leaky_relu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]
    trunk = ResidualTrunk(3, (4, 6), activation)
    x = torch.rand(3, 3, 32, 32)
    trunk(x)
    trunk.eval()

    def norm(layer: nn.BatchNorm2d, y: torch.Tensor) -> torch.Tensor:
        scale = layer.weight / (layer.running_var + 1e-5).sqrt()
        return (y - layer.running_mean[:, None, None]) * scale[:, None, None] + layer.bias[:, None, None]

    def run(layer: TrunkBlock, y: torch.Tensor, stride: int = 1) -> torch.Tensor:
        skip = F.conv2d(y, layer.skip.weight, None, stride, 1) if stride == 2 else y
        inner = act(norm(layer.norm1, F.conv2d(y, layer.conv1.weight, None, stride, 1)))
        return act(skip + norm(layer.norm2, F.conv2d(inner, layer.conv2.weight, None, 1, 1)))

    y = act(norm(trunk[1], F.conv2d(x, trunk[0].weight, None, 2, 1)))
    y = run(trunk[5], run(trunk[4], run(trunk[3], y), 2))
    y = F.pad(y, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2).mean((4, 5))
    assert_close(trunk(x), run(trunk[8], run(trunk[7], y)), rtol=1e-4, atol=1e-5)


def test_weights_and_outputs_are_channels_last():
    trunk = ResidualTrunk(3, (4, 6), "relu")
    assert trunk[3].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    y = trunk(torch.rand(2, 3, 32, 32).contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
