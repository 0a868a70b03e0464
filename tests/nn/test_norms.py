"""Norms over channels compute in float32 under autocast, gradients of weight and bias included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from wmcli.nn.mlp import ChannelLayerNorm, ChannelRMSNorm, norm

CASES = {
    "rms": (norm("rms", 6), (8192, 6)),
    "layer": (norm("layer", 6), (8192, 6)),
    "channel-rms": (ChannelRMSNorm(6, 1e-6), (8, 6, 32, 32)),
    "channel-layer": (ChannelLayerNorm(6), (8, 6, 32, 32)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_bfloat16_are_exact_to_float32s_rounding(case: str) -> None:
    """Of torch's LayerNorm, half of the bias's is missing on one thread."""
    torch.manual_seed(0)
    made, shape = CASES[case]
    module = copy.deepcopy(made)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format)
    x, dy = x.bfloat16(), torch.randn(shape) + 0.3

    def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = module(x)
        return torch.autograd.grad(y, list(module.parameters()), dy.to(y.dtype))

    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(module, x)
    for a, b in zip(ours, gradients(module.double(), x.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-2)
