"""Stacks of dense layers against the formulas, and their parameters by arithmetic."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from wmcli.nn.mlp import mlp


def by_hand(x: torch.Tensor, network: nn.Sequential, kind: str, activation: str) -> torch.Tensor:
    layers = list(network)
    while len(layers) > 1:
        linear, scale, _, *layers = layers
        x = x @ linear.weight.T
        if kind == "rms":
            x = x + linear.bias
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale.weight
        else:
            x = x - x.mean(-1, keepdim=True)
            x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.weight + scale.bias
        x = x * torch.sigmoid(x) if activation == "silu" else x.clamp(min=0)
    return x @ layers[0].weight.T + layers[0].bias


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("layers", [0, 2])
def test_layer_by_layer(kind, activation, layers):
    torch.manual_seed(0)
    network = mlp(3, 7, layers, 4, norm_kind=kind, activation=activation).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    x = 1e-2 * torch.randn(2, 5, 3, dtype=torch.float64)  # small, so that eps matters
    torch.testing.assert_close(network(x), by_hand(x, network, kind, activation))
    inputs = 3 if layers else None
    # A bias and a scale each: the bias stands before an RMSNorm, and in a LayerNorm.
    want = 0 if inputs is None else (3 * 7 + 7 * 7) + 2 * 7 * 2
    want += (7 if layers else 3) * 4 + 4
    assert sum(parameter.numel() for parameter in network.parameters()) == want


def test_under_autocast():
    """Norms of one kernel (torch warns where it takes several), every gradient there, and near those of float32."""
    torch.manual_seed(0)
    network = mlp(32, 64, 2, 5)
    x = torch.randn(8, 32)
    want = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        y = network(x)
    got = torch.autograd.grad(y.float().square().sum(), list(network.parameters()))
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm()) < 0.03 * float(other.norm())
