"""Each kind of first weights: deviations, ranges and biases of large layers."""

from __future__ import annotations

import pytest
import torch
from draws import assert_fan_average, assert_torchs_default
from torch import nn

from wmcli.nn.block_linear import BlockLinear
from wmcli.nn.initialize import initialize, scale_last


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(300, 200),
        nn.Linear(200, 500, bias=False),
        nn.Conv2d(40, 30, 5),
        nn.ConvTranspose2d(30, 40, 4, bias=False),
        nn.Linear(500, 6),
    )


@pytest.mark.parametrize(("kind", "check"), [("fan-average", assert_fan_average), ("torch", assert_torchs_default)])
def test_layers_of_every_kind(kind, check):
    network = layers()
    initialize(network, kind)
    for layer in network:
        check(layer)


def test_torchs_defaults_draw_nothing():
    network, want = layers(), layers().state_dict()
    before = torch.get_rng_state()
    initialize(network, "torch")
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(network.state_dict(), want, rtol=0, atol=0)


def test_orthogonal_rows_or_columns_and_a_last_layer_near_zero():
    network = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 50, bias=False), nn.Linear(50, 6))
    initialize(network, "orthogonal")
    for layer, square in zip(network, (2, 2, 1e-6), strict=True):
        weight = layer.weight if len(layer.weight) <= layer.in_features else layer.weight.T
        torch.testing.assert_close(weight @ weight.T, square * torch.eye(len(weight)), rtol=0, atol=1e-5 * square)
        assert layer.bias is None or not layer.bias.any()


def test_fan_in():
    """Within two standard deviations of the untruncated normal. A block layer counts the inputs of all blocks."""
    torch.manual_seed(0)
    network = nn.Sequential(*layers(), BlockLinear(400, 800, 8))
    initialize(network, "fan-in")
    for layer, fan in zip(network, (300, 200, 40 * 25, 30 * 16, 500, 400), strict=True):
        assert float(layer.weight.detach().std()) * fan**0.5 == pytest.approx(1, abs=0.03)
        assert float(layer.weight.detach().abs().max()) * fan**0.5 <= 2 * 1.1369
        assert layer.bias is None or not layer.bias.any()
    weight = network[-1].weight.detach().clone()
    scale_last(network, 0.5)
    assert torch.equal(network[-1].weight, weight / 2)
