"""Scalars of any size as distributions over fixed bins: two-hot.

The N bins are evenly spaced in symlog space. A number is divided between its two nearest bins, and a distribution is
read as its mean. There are two kinds.

- "symlog": numbers are divided and averaged in symlog space (DreamerV3's first version, STORM, Drama).
- "symexp": they are divided and averaged in the space of the numbers themselves (DreamerV3's newer code). So a mean of
  rewards is unbiased. Opposite bins are added first, so that a symmetric distribution is exactly 0.

All arithmetic is float32 at least, also under autocast: in bfloat16 a value of 100 has an error of one percent.

Source: Hafner et al. 2023, arXiv 2301.04104.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from wmcli.nn.layers import at_least_float32

TwoHot = Literal["symlog", "symexp"]
"""Space in which numbers are divided and averaged."""
BINS = 255  # an odd number, so that 0 is a bin
REACH = 20.0  # of the outermost bins, in symlog space
MIDDLE = BINS // 2  # the bin of 0
WIDTH = REACH / MIDDLE  # between neighbors, in symlog space


def symlog(x: Tensor) -> Tensor:
    """Return sign(x) log(1 + |x|)."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """Return the inverse of `symlog`: sign(x) (exp(|x|) - 1)."""
    return x.sign() * x.abs().expm1()


def encode(x: Tensor, kind: TwoHot = "symlog") -> Tensor:
    """Return the two-hot weights (..., BINS) of numbers (...), which sum to 1.

    Numbers beyond the outermost bins belong to these bins.
    """
    if kind == "symexp":
        return _encode_between(at_least_float32(x))
    place = (symlog(at_least_float32(x)) / WIDTH).clamp(-MIDDLE, MIDDLE)  # from the middle: small numbers stay exact
    below = place.floor().clamp(max=MIDDLE - 1)
    share = (place - below)[..., None]
    weights = share.new_zeros(*x.shape, BINS)
    index = below.long()[..., None] + MIDDLE
    return weights.scatter(-1, index, 1 - share).scatter(-1, index + 1, share)


def _encode_between(x: Tensor) -> Tensor:
    """Divide numbers (...) between the nearest bins in proportion to the distances."""
    bins = symexp(_bins(x))
    x = x.clamp(bins[0], bins[-1])[..., None]
    below = (torch.searchsorted(bins, x, right=True) - 1).clamp(0, BINS - 2)
    share = (x - bins[below]) / (bins[below + 1] - bins[below])
    weights = x.new_zeros(*x.shape[:-1], BINS)
    return weights.scatter(-1, below, 1 - share).scatter(-1, below + 1, share)


def _bins(like: Tensor) -> Tensor:
    """Return the bins (BINS,) in symlog space, in the dtype and on the device of `like`."""
    return torch.arange(-MIDDLE, MIDDLE + 1, device=like.device, dtype=like.dtype) * WIDTH


def decode(logits: Tensor, kind: TwoHot = "symlog") -> Tensor:
    """Return the numbers (...) that logits (..., BINS) represent."""
    logits = at_least_float32(logits)
    with torch.autocast(logits.device.type, enabled=False):
        bins = _bins(logits)
        if kind == "symexp":
            parts = logits.softmax(-1) * symexp(bins)
            return (parts[..., :MIDDLE].flip(-1) + parts[..., MIDDLE + 1 :]).sum(-1)
        # A product and a sum, not a matrix product: those may run in TF32.
        return symexp((logits.softmax(-1) * bins).sum(-1))


def loss(logits: Tensor, target: Tensor, kind: TwoHot = "symlog") -> Tensor:
    """Return the cross entropy (...), in nats, of logits (..., BINS) and the two-hot weights of `target` (...).

    `target` is a constant.
    """
    return -(encode(target.detach(), kind) * at_least_float32(logits).log_softmax(-1)).sum(-1)
