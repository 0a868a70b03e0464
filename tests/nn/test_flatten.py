"""Flattening: torch's own numbers, with gradients in the layout of the images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wmcli.nn.layers import Flatten


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 1, 1, 1)])
def test_values_and_gradients_are_torchs_in_the_layout_of_the_images(shape, layout):
    image = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(shape[1] * shape[2] * shape[3], dtype=torch.float64)
    found = []
    for module in (Flatten(), nn.Flatten()):
        x = image.clone(memory_format=torch.preserve_format).requires_grad_()
        layouts: list[bool] = []
        x.register_hook(lambda grad, layouts=layouts: layouts.append(grad.is_contiguous(memory_format=layout)))
        y = module(x)
        (gradient,) = torch.autograd.grad((y * weight).square().sum(), x)
        found.append((y, gradient, layouts))
    for got, want in zip(found[0][:2], found[1][:2], strict=True):
        assert got.shape == want.shape and torch.equal(got, want)
    assert found[0][2] == [True]


def test_a_gradient_that_is_one_number_everywhere_comes_back():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    (gradient,) = torch.autograd.grad(Flatten()(x).sum(), x)
    assert torch.equal(gradient, torch.ones(2, 3, 4, 5))


def test_derivatives_of_any_order():
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: Flatten()(x.square()).square(), (x,))
