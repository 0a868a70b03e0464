"""Scalars of any size as distributions over fixed bins: symlog two-hot.

A number is transformed by symlog and divided between the two nearest of N bins. The mean over the bins is computed in
symlog space and transformed back, as in STORM and Drama. DreamerV3's newer code averages in the space of rewards. All
arithmetic is float32 at least, also under autocast: in bfloat16 a value of 100 has an error of one percent.

Source: Hafner et al. 2023, arXiv 2301.04104.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wmcli.nn.layers import at_least_float32

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


def encode(x: Tensor) -> Tensor:
    """Return the two-hot weights (..., BINS) of numbers (...), which sum to 1.

    Numbers beyond the outermost bins belong to these bins.
    """
    place = (symlog(at_least_float32(x)) / WIDTH).clamp(-MIDDLE, MIDDLE)  # from the middle: small numbers stay exact
    below = place.floor().clamp(max=MIDDLE - 1)
    share = (place - below)[..., None]
    weights = share.new_zeros(*x.shape, BINS)
    index = below.long()[..., None] + MIDDLE
    return weights.scatter(-1, index, 1 - share).scatter(-1, index + 1, share)


def decode(logits: Tensor) -> Tensor:
    """Return the numbers (...) that logits (..., BINS) represent."""
    logits = at_least_float32(logits)
    with torch.autocast(logits.device.type, enabled=False):
        bins = torch.arange(-MIDDLE, MIDDLE + 1, device=logits.device, dtype=logits.dtype) * WIDTH
        # A product and a sum, not a matrix product: those may run in TF32.
        return symexp((logits.softmax(-1) * bins).sum(-1))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy (...), in nats, of logits (..., BINS) and the two-hot weights of `target` (...).

    `target` is a constant.
    """
    return -(encode(target.detach()) * at_least_float32(logits).log_softmax(-1)).sum(-1)
