"""Dropout whose random numbers cost little on a CPU.

torch draws one number per element there and takes longer over it than over a matrix product of the same size. Here 64
random bits decide over four elements. Elsewhere, and in float64, it is torch's dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LEVELS = 1 << 16  # of chances to keep an element
CHUNK = 1 << 18  # elements whose bits and factors stay in the processor's cache


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x with each element zero with chance `p` (to 1 in 65,536), the others larger by what keeps the mean exact.

    Draws from torch's global generator. Can be differentiated once.
    """
    kept_levels = round((1 - p) * LEVELS)
    ours = training and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    if not ours or not 0 < kept_levels < LEVELS:
        return F.dropout(x, p, training)
    return _Dropout.apply(x, kept_levels)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept_levels: int) -> Tensor:
        x = x.contiguous()
        keep = torch.empty(x.numel(), dtype=torch.int16)  # 1 or 0; as wide as bfloat16, whose bits it multiplies
        for part in keep.split(CHUNK):
            bits = torch.empty(-(-len(part) // 4), dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
            torch.lt(bits[: len(part)], kept_levels - LEVELS // 2, out=part)
        ctx.save_for_backward(keep)
        ctx.scale = LEVELS / kept_levels
        return _masked(x, keep, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _masked(gradient.contiguous(), keep, ctx.scale), None


def _masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """scale * x where `keep`, else 0: x contiguous, keep flat."""
    y = torch.empty_like(x)
    for source, target, factor in zip(*(each.view(-1).split(CHUNK) for each in (x, y, keep)), strict=True):
        torch.mul(source, scale, out=target)
        if x.dtype == torch.bfloat16:
            target.view(torch.int16).mul_(factor)  # the bits of a number times 1, or +0
        else:
            target.mul_(factor.to(x.dtype))
    return y
