from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from wmcli.tokenizers.categorical import squared_error


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_it_is_the_sum_over_an_image_and_so_are_its_gradients(layout):
    image = torch.randn(3, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    target, weight = torch.randn_like(image), torch.randn(3, dtype=torch.float64)
    want = (image - target).square().sum((1, 2, 3))
    found = squared_error(image, target.clone())
    assert_close(found, want)
    gradients = [torch.autograd.grad(error @ weight, image)[0] for error in (found, want)]
    assert_close(*gradients)
    assert gradients[0].stride() == image.stride()


def test_images_of_lower_precision_are_compared_in_that_of_the_target():
    image = torch.randn(2, 3, 8, 8).bfloat16().requires_grad_()
    target = torch.randn(2, 3, 8, 8)
    want = (image.detach().float() - target).square().sum((1, 2, 3))
    found = squared_error(image, target.clone())
    assert found.dtype == torch.float32
    assert_close(found.detach(), want)
    found.sum().backward()
    assert image.grad.dtype == torch.bfloat16
    assert_close(image.grad, (2 * (image.detach().float() - target)).bfloat16())


def test_a_second_backward_pass_is_refused():
    image = torch.randn(2, 3, requires_grad=True)
    error = squared_error(image, torch.randn(2, 3)).sum()
    error.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        error.backward()
