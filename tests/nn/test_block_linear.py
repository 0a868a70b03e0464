"""The block-diagonal linear layer is the sum over its blocks."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from wmcli.nn.block_linear import BlockLinear


def test_it_is_a_block_diagonal_matrix() -> None:
    layer = BlockLinear(6, 9, 3).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    matrix = torch.block_diag(*layer.weight.detach())
    torch.testing.assert_close(layer(x), x @ matrix + layer.bias)
    torch.testing.assert_close(layer(x[0, 0]), (x @ matrix + layer.bias)[0, 0])
    assert sum(parameter.numel() for parameter in layer.parameters()) == 6 * 9 // 3 + 9


def test_one_block_is_a_linear_layer_also_under_autocast() -> None:
    layer = BlockLinear(6, 9, 1)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight[0].T, layer.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
