"""Norms of torch's that compute in float32, and keep and return a tensor in its own lower precision.

Under autocast torch's norms return float32, and of a bfloat16 activation they keep a float32 copy for the backward
pass, as does the activation function behind them. In a stack of convolutions those copies are most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the LayerNorm over the last axis of x (..., C), with its shape and dtype. First derivatives only."""
    shape = weight.shape

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)

    def gradients(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, *parameters, [True] * 3)

    return _Norm.apply(x, weight, bias, norm, gradients)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """Return the GroupNorm of x (B, C, H, W), with its shape and dtype. First derivatives only."""
    sizes = (*x.shape[:2], x.shape[2:].numel())

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten.native_group_norm(x.contiguous(), weight, bias, *sizes, groups, eps)

    def gradients(
        dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_group_norm_backward(
            dy.contiguous(), x.contiguous(), mean, rstd, weight, *sizes, groups, [True] * 3
        )

    return _Norm.apply(x, weight, bias, norm, gradients)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: Callable[..., tuple[Tensor, Tensor, Tensor]],
        gradients: Callable[..., tuple[Tensor, ...]],
    ) -> Tensor:
        y, mean, rstd = norm(x.to(weight.dtype), weight, bias)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.gradients = gradients
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wide = weight.dtype
        dx, dw, db = ctx.gradients(dy.to(wide), x.to(wide), mean, rstd, weight, bias)
        return dx.to(x.dtype), dw, db, None, None
