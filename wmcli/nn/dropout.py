"""Dropout with cheap random numbers on a CPU.

On a CPU torch draws one number per element, in a single thread, which takes longer than a matrix product of the same
size. Here 8 random bits decide about an element, unless they equal the first 8 bits of the probability. Then 8 more
bits decide, which 32 elements share. The probability of dropping an element is exact to 16 bits. That of dropping any
two is its square to 2^-18. On other devices, and in float64, it is torch's dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from wmcli import ranks

LEVELS = 1 << 16  # of the probability of dropping an element
SHARED = 32  # elements that share the last 8 bits
CHUNK = 1 << 20  # elements whose bits and factors fit into the processor's cache


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Set each element of x to zero with probability `p`, to 1 in 65,536, and scale the others to preserve the mean.

    The bits come from torch's global generator. The first axis has the rows of a batch. First derivatives only.
    """
    levels = round(p * LEVELS)
    ours = training and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    if not ours or not 0 < levels < LEVELS - 256:  # a limit of 256 would be no int8
        return torch_dropout(x, p, training)
    return _Dropout.apply(x, levels)


def torch_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Do torch's dropout. The first axis has the rows of a batch."""
    if not (training and p and ranks.is_sharing()):
        return F.dropout(x, p, training)
    keep = ranks.drawn(lambda shape: torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p), x.shape)
    return x * keep.div_(1 - p)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        x = x.contiguous()
        keep = torch.empty(ranks.all_rows(x.numel()), dtype=torch.int8)
        for part in keep.split(CHUNK):
            part.copy_(_keep_mask(len(part), levels))
        keep = ranks.own_rows(keep)
        ctx.save_for_backward(keep)
        ctx.scale = LEVELS / (LEVELS - levels)
        return _masked(x, keep, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _masked(gradient.contiguous(), keep, ctx.scale), None


def _keep_mask(count: int, levels: int) -> Tensor:
    """Draw 1 or 0 for each of `count` elements, int8: 0 with probability `levels` / LEVELS."""
    columns = -(-count // (8 * SHARED)) * 8  # whole 64-bit numbers
    bits = torch.empty(SHARED + 1, columns // 8, dtype=torch.int64).random_(-(1 << 63), None).view(torch.int8)
    first, rest = divmod(levels, 256)
    limit = (bits[0] < rest - 128).view(torch.int8) + (first - 128)
    return (bits[1:] >= limit).view(torch.int8).view(-1)[:count]


def _masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Return scale * x where `keep`, else 0, for contiguous x and flat `keep`."""
    y = torch.empty_like(x)
    for source, target, factor in zip(*(each.view(-1).split(CHUNK) for each in (x, y, keep)), strict=True):
        torch.mul(source, scale, out=target)
        # Multiplication of a bfloat16's bits by 1 or 0 is faster than that of its value.
        (target.view(torch.int16) if x.dtype == torch.bfloat16 else target).mul_(factor)
    return y
