"""A dense layer that autocast leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wmcli.nn.layers import Float32Linear
from wmcli.training.device import Machine

CPU = torch.device("cpu")


def test_is_a_linear_in_the_precision_of_its_weights() -> None:
    plain, layer = nn.Linear(5, 3), Float32Linear(5, 3)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(4, 5)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.double()(x), plain.double()(x.double()))


@pytest.mark.parametrize("frozen", [False, True])
def test_neither_autocast_nor_freezing_rounds(frozen: bool) -> None:
    layer, x = Float32Linear(5, 3), torch.randn(4, 5).bfloat16()
    want = layer(x.float())
    machine = Machine(CPU, "bfloat16", 1)
    if frozen:
        machine.freeze(layer)
    with machine.autocast():
        assert torch.equal(layer(x), want)
        assert nn.Linear(5, 3)(x).dtype == torch.bfloat16  # autocast goes on behind it
