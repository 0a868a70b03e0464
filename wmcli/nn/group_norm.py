"""GroupNorm for channels last on a CPU.

The backward pass of torch's own takes up to forty times as long there as with channels first. Statistics and all
arithmetic are float32 (float64 for float64).

Axes: B batch, P pixels of a frame, C channels, G groups.

Source: Wu & He 2018, ECCV, arXiv 1803.08494.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wmcli.nn.low_precision import group_norm

CHUNK = 1 << 19  # numbers whose float32 copy stays in the processor's cache from one operation to the next


class GroupNorm(nn.GroupNorm):
    """Normalization of each group of channels of a frame, (B, C, H, W) -> the same shape and dtype.

    First derivatives only. On a CPU the result is channels last in memory for any layout of x. On other devices this is
    torch's norm.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return group_norm(x, self.weight, self.bias, self.num_groups, self.eps)
        pixels = x.permute(0, 2, 3, 1).flatten(1, 2)  # (B, P, C), no copy if channels last
        y = _GroupNorm.apply(pixels, self.weight, self.bias, self.num_groups, self.eps)
        return y.unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)


class _GroupNorm(torch.autograd.Function):
    """y = scale * x + shift of x (B, P, C), where scale and shift are (B, 1, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        channel_mean, channel_variance = x.new_empty(2, len(x), 1, x.shape[2], dtype=dtype)
        for of_x, m, v in _parts(x, channel_mean, channel_variance):
            of_x = of_x.to(dtype, copy=True)  # one array, modified in place, stays in the cache
            torch.mean(of_x, 1, keepdim=True, out=m)
            torch.mean(of_x.sub_(m).square_(), 1, keepdim=True, out=v)
        mean = _group_mean(channel_mean, groups)
        rstd = (_group_mean(channel_variance + (channel_mean - mean).square(), groups) + eps).rsqrt()

        scale = weight * rstd
        shift = bias - mean * scale
        y = x.new_empty(x.shape)
        for of_x, a, b, of_y in _parts(x, scale, shift, y):
            of_x = of_x.to(dtype, copy=True)
            of_y.copy_(torch.addcmul(b, of_x, a, out=of_x))
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups = groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        dtype = mean.dtype
        db, dy_x = torch.empty_like(mean), torch.empty_like(mean)  # sums over pixels of dy and dy * x
        for of_x, of_dy, b, w in _parts(x, dy, db, dy_x):
            of_dy = of_dy.to(dtype, copy=True)
            torch.sum(of_dy, 1, keepdim=True, out=b)
            torch.sum(of_dy.mul_(of_x.to(dtype)), 1, keepdim=True, out=w)
        dw = (dy_x - mean * db) * rstd

        # dx = rstd * (weight * dy - <weight * dy> - n * <weight * dy * n>), where n = (x - mean) * rstd and < > is the
        # mean over a group; here the factors of dy and x are collected.
        pixels = x.shape[1]
        by_dy = weight * rstd
        by_x = _group_mean(weight * dw, ctx.groups) * rstd.square() / -pixels
        rest = _group_mean(weight * db, ctx.groups) * rstd / -pixels - mean * by_x
        dx = x.new_empty(x.shape)
        for of_x, of_dy, a, b, c, of_dx in _parts(x, dy, by_x, by_dy, rest, dx):
            of_x = of_x.to(dtype, copy=True)
            of_dx.copy_(torch.addcmul(c, of_x, a, out=of_x).addcmul_(of_dy.to(dtype), b))
        return dx, dw.sum((0, 1)), db.sum((0, 1)), None, None


def _parts(x: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same frames of each tensor, in parts of one chunk of x."""
    frames = max(1, CHUNK // (x.shape[1] * x.shape[2]))
    return zip(*(tensor.split(frames) for tensor in (x, *more)), strict=True)


def _group_mean(x: Tensor, groups: int) -> Tensor:
    """Return for each channel of (B, 1, C) the mean over its group, (B, 1, C)."""
    grouped = x.unflatten(2, (groups, -1))
    return grouped.mean(-1, keepdim=True).expand_as(grouped).flatten(2)
