"""Layers that are more precise or faster than torch's own, or know of ranks: Float32Linear, Flatten, BatchNorm.

Axes: B batch, C channels, R rows of pixels, W pixels in a row. Images are channels last in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from wmcli import ranks

FEW = 1 << 16  # pixels of a batch, which torch sums with an error of 1e-5
ROWS = 1 << 13  # rows of pixels, summed along each column with an error of 1e-6
CHUNK = 1 << 19  # numbers that stay in the processor's cache from one operation to the next


def scaled(observation: Tensor) -> Tensor:
    """Convert frames (B, H, W, C) uint8 to (B, C, H, W) float32 in [0, 1], channels last in memory."""
    assert observation.dtype == torch.uint8, "frames are uint8"
    return observation.permute(0, 3, 1, 2).to(torch.float32).div_(255)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is of lower precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Float32Linear(nn.Linear):
    """A Linear in the precision of its weights, float32 at least, also under autocast and in a frozen model.

    It is the last layer of heads whose logits are decoded to numbers and compared. In bfloat16 a logit has 8 bits. A
    search that rescales the values of siblings to [0, 1] would choose by rounding errors.
    """

    in_float32 = True  # `Machine.freeze` does not convert the weights

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


class Flatten(nn.Module):
    """Flattening of (B, C, H, W) to (B, C H W), in the order C, H, W.

    The gradient has the layout of the images. With torch's own it has the order of the flattened vector. On a CPU the
    backward pass of an activation takes ten times as long over two layouts as over one.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _Flatten.apply(x)


class _Flatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        ctx.layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.reshape(ctx.shape).contiguous(memory_format=ctx.layout)


class BatchNorm2d(nn.BatchNorm2d):
    """Normalization of each channel of (B, C, H, W) over the batch, with the same shape and dtype.

    On a CPU torch's own adds up all pixels of all frames one by one in float32. With one thread, over 2,048 frames of
    64 x 64 (a batch of Drama's), the variance is then 1 % too small. Here the statistics of a large channels-last
    batch, and the gradients through them, are exact to float32's rounding (float64 for float64). First derivatives
    only. Several ranks normalize by the statistics of all their rows.

    Sources: Ioffe & Szegedy 2015, ICML, arXiv 1502.03167; Chan et al. 1983, The American Statistician 37 (pooled
    variance).
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        by_batch = self.training or self.running_mean is None
        if by_batch and ranks.is_sharing():
            return _normalize_over_ranks(self, x)
        pixels = x.numel() // self.num_features
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        if x.device.type != "cpu" or not by_batch or not channels_last or pixels <= FEW:
            return super().forward(x)
        y, mean, variance = _BatchNorm.apply(x, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            _track(self, mean, variance, pixels)
        return y


class BatchNorm1d(nn.BatchNorm1d):
    """Normalization of each feature of (B, C) over the batch, that of all ranks if there are several."""

    def forward(self, x: Tensor) -> Tensor:
        if ranks.is_sharing() and (self.training or self.running_mean is None):
            return _normalize_over_ranks(self, x)
        return super().forward(x)


def _normalize_over_ranks(norm: TorchBatchNorm, x: Tensor) -> Tensor:
    """Normalize x (B, C, ...) by the statistics of the rows of all ranks, and track them."""
    others, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
    wide = at_least_float32(x)

    def mean_of(values: Tensor) -> Tensor:
        return ranks.mean(values.mean(others, dtype=torch.float64)).to(wide.dtype)

    mean = mean_of(wide)
    centered = wide - mean.view(shape)
    variance = mean_of(centered.square())
    if norm.training and norm.track_running_stats:
        _track(norm, mean, variance, ranks.all_rows(x.numel() // x.shape[1]))
    y = centered * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        y = torch.addcmul(norm.bias.view(shape), y, norm.weight.view(shape))
    return y.to(x.dtype)


@torch.no_grad()
def _track(norm: TorchBatchNorm, mean: Tensor, variance: Tensor, pixels: int) -> None:
    """Update the running statistics by those of a batch, as torch does.

    Writes through `.data` preserve their version, as torch's kernel does. Torch saves the statistics in the graph of an
    earlier smaller batch through the same norm.
    """
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.data.mul_(1 - share).add_(mean, alpha=share)
    norm.running_var.data.mul_(1 - share).add_(variance, alpha=share * pixels / (pixels - 1))


class _BatchNorm(torch.autograd.Function):
    """Normalized x (B, C, H, W), with its mean (C,) and variance (C,).

    Torch's kernels compute the sums over parts of the batch, with each pixel of a row as a separate channel. Each sum
    has few terms and many sums run in parallel, which is also faster.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = _rows(x).split(ROWS)
        unused = x.new_zeros(2, parts[0].shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        each = zip(*(torch.batch_norm_update_stats(part, unused[0], unused[1], 0.0) for part in parts), strict=True)
        means, variances = (torch.stack(stacked).unflatten(1, (-1, x.shape[1])) for stacked in each)  # (parts, W, C)
        rows = means.new_tensor([len(part) for part in parts])[:, None, None]
        share = rows / rows.sum()
        mean = (share * means).sum(0).mean(0)
        variance = (share * (variances + (means - mean).square())).sum(0).mean(0)
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        ctx.mark_non_differentiable(mean, variance)
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy, dx = dy.contiguous(memory_format=torch.channels_last), torch.empty_like(x)
        width = x.shape[3]
        statistics = mean.repeat(width), rstd.repeat(width)
        sums = [
            torch.ops.aten.native_batch_norm_backward(
                of_dy, of_x, None, None, None, *statistics, True, 0.0, [False, True, True]
            )[1:]
            for of_x, of_dy in zip(_rows(x).split(ROWS), _rows(dy).split(ROWS), strict=True)
        ]
        dw, db = (torch.stack(each).sum(0).unflatten(0, (width, -1)).sum(0) for each in zip(*sums, strict=True))

        # dx = weight * rstd * (dy - <dy> - n * <dy * n>), where n = (x - mean) * rstd and < > is the mean over the
        # batch; here the factors of dy and x are collected.
        pixels = x.numel() // x.shape[1]
        by_dy = rstd if weight is None else weight * rstd
        by_x = by_dy * dw * rstd / -pixels
        rest = by_dy * db / -pixels - mean * by_x
        by_dy, by_x, rest = (each.repeat(width) for each in (by_dy, by_x, rest))
        step = max(1, CHUNK // len(rest))
        for of_x, of_dy, of_dx in zip(*(_rows(each).split(step) for each in (x, dy, dx)), strict=True):
            wide = of_dx if of_dx.dtype == rest.dtype else None
            of_dx.copy_(torch.addcmul(rest, of_x, by_x, out=wide).addcmul_(of_dy, by_dy))
        return (dx, None, None, None) if weight is None else (dx, dw, db, None)


def _rows(x: Tensor) -> Tensor:
    """Return the rows of pixels of x (B, C, H, W), channels last, as a view (R, W * C)."""
    return x.permute(0, 2, 3, 1).flatten(2).flatten(0, 1)
