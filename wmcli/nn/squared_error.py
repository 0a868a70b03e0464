"""The squared error of images, with few passes over their pixels: on a CPU, passes are most of what a small world
model's decoder costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def squared_error(image: Tensor, target: Tensor) -> Tensor:
    """Summed over an image's numbers, (B,) in `target`'s dtype: images (B, ...) against targets of the same shape.

    `target`, of a precision no lower than the images', is lost: the difference takes its place until the backward pass,
    which can be done once.
    """
    return _SquaredError.apply(image, target)


class _SquaredError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target.sub_(image))
        ctx.dtype = image.dtype
        return torch.linalg.vector_norm(target, dim=tuple(range(1, target.ndim))).square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors  # torch refuses it once it has been written
        return difference.mul_((-2 * grad).view(-1, *[1] * (difference.ndim - 1))).to(ctx.dtype), None
