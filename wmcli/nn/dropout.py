"""Dropout whose random numbers cost little on a CPU.

torch draws one number per element there and takes longer over it than over a matrix product of the same size; and
however many threads there are, one of them draws. Here 8 random bits decide over an element, except where they equal
the first 8 bits of the chance: there 8 more do, which 32 elements have in common. An element is dropped with the chance
to 16 bits, and any two of them together with its square to 2^-18. Elsewhere, and in float64, it is torch's dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LEVELS = 1 << 16  # of chances to drop an element
SHARED = 32  # elements with the last 8 bits in common
CHUNK = 1 << 20  # elements whose bits and factors stay in the processor's cache


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x with each element zero with chance `p` (to 1 in 65,536), the others larger by what keeps the mean exact.

    Draws from torch's global generator. Can be differentiated once.
    """
    levels = round(p * LEVELS)
    ours = training and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    if not ours or not 0 < levels < LEVELS - 256:  # a limit of 256 would be no int8
        return F.dropout(x, p, training)
    return _Dropout.apply(x, levels)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        x = x.contiguous()
        keep = torch.empty(x.numel(), dtype=torch.int8)
        for part in keep.split(CHUNK):
            part.copy_(_kept(len(part), levels))
        ctx.save_for_backward(keep)
        ctx.scale = LEVELS / (LEVELS - levels)
        return _masked(x, keep, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _masked(gradient.contiguous(), keep, ctx.scale), None


def _kept(count: int, levels: int) -> Tensor:
    """1 or 0 for each of `count` elements, int8: 0 with chance `levels` / LEVELS."""
    columns = -(-count // (8 * SHARED)) * 8  # whole 64-bit numbers
    bits = torch.empty(SHARED + 1, columns // 8, dtype=torch.int64).random_(-(1 << 63), None).view(torch.int8)
    first, rest = divmod(levels, 256)
    limit = (bits[0] < rest - 128).view(torch.int8) + (first - 128)
    return (bits[1:] >= limit).view(torch.int8).view(-1)[:count]


def _masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """scale * x where `keep`, else 0: x contiguous, keep flat."""
    y = torch.empty_like(x)
    for source, target, factor in zip(*(each.view(-1).split(CHUNK) for each in (x, y, keep)), strict=True):
        torch.mul(source, scale, out=target)
        # The bits of a bfloat16 times 1, or +0: faster than its value.
        (target.view(torch.int16) if x.dtype == torch.bfloat16 else target).mul_(factor)
    return y
