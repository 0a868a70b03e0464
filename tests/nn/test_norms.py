"""Norms over channels compute in float32 under autocast, gradients of weight and bias included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wmcli.nn.low_precision import group_norm
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
    x, dy = x.bfloat16(), (torch.randn(shape) + 0.3).bfloat16()

    def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = module(x)
        return torch.autograd.grad(y, list(module.parameters()), dy.to(y.dtype))

    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(module, x)
    for a, b in zip(ours, gradients(module.double(), x.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-2)


NARROW = {  # ours, torch's own
    "layer": (ChannelLayerNorm(6), lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (6,), w, b).permute(0, 3, 1, 2)),
    "group": (nn.GroupNorm(2, 6), lambda x, w, b: F.group_norm(x, 2, w, b)),
}


def in_its_dtype(case: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm that returns what it was given; of GroupNorm the form for a GPU."""
    if case == "layer":
        return module(x)
    return group_norm(x, module.weight, module.bias, module.num_groups, module.eps)


@pytest.mark.parametrize("case", NARROW)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_norms_of_images_are_torchs_and_return_the_dtype_that_they_were_given(case, dtype, layout) -> None:
    torch.manual_seed(0)
    module = copy.deepcopy(NARROW[case][0])
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    exact = module.to(torch.float64 if dtype == torch.float64 else torch.float32)
    x = (torch.randn(4, 6, 5, 3) * 2 + 1).to(dtype).contiguous(memory_format=layout).requires_grad_()
    dy = torch.randn(4, 6, 5, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = in_its_dtype(case, exact, x)
    ours = [y, *torch.autograd.grad(y, [x, exact.weight, exact.bias], dy)]
    wide = x.detach().to(exact.weight.dtype).requires_grad_()
    y = NARROW[case][1](wide, exact.weight, exact.bias)
    theirs = [y, *torch.autograd.grad(y, [wide, exact.weight, exact.bias], dy.to(y.dtype))]
    assert [each.dtype for each in ours] == [dtype, dtype, *[exact.weight.dtype] * 2]
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-6 if index > 1 else None, atol=1e-5 if index > 1 else None)


@pytest.mark.parametrize("case", NARROW)
def test_a_stack_keeps_its_activations_in_bfloat16(case) -> None:
    module, kept = NARROW[case][0], []
    x = torch.randn(4, 6, 16, 16).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        F.silu(in_its_dtype(case, module, x))
    assert sum(tensor.numel() == x.numel() for tensor in kept) == 2
    assert all(tensor.dtype == torch.bfloat16 for tensor in kept if tensor.numel() == x.numel())
