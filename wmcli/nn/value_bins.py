"""Scalars as distributions over integers in a transformed space, as for MuZero's rewards and values.

    h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x        bins -b, -b + 1, ..., b in the space of h

A number is transformed by h and divided between the two nearest of K = 2 b + 1 bins. The mean over the bins is computed
in the space of h and transformed back: b = 50 reaches to +-2364, b = 300 to +-58706. All arithmetic is float32 at
least, also under autocast.

Sources: h of Pohlen et al. 2018 (arXiv 1805.11593); MuZero (Schrittwieser et al. 2020, arXiv 1911.08265), appendix F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wmcli.nn.layers import at_least_float32

EPS = 1e-3  # slope of h far out, which makes it invertible


def squash(x: Tensor) -> Tensor:
    """Return h(x), in a form that is exact for small numbers."""
    return x / ((x.abs() + 1).sqrt() + 1) + EPS * x


def stretch(y: Tensor) -> Tensor:
    """Return the inverse of `squash`.

    u = sqrt(|x| + 1) is the root of EPS u^2 + u = |y| + 1 + EPS, and x = sign(y) (u^2 - 1). From
    (u - 1) (1 + EPS (u + 1)) = |y| follows a form without cancellation.
    """
    size = y.abs() + (1 + EPS)
    u = 2 * size / (1 + (1 + 4 * EPS * size).sqrt())
    return y * (u + 1) / (1 + EPS * (u + 1))


def bins(bound: int) -> int:
    """Return K, the number of bins from -`bound` to `bound`."""
    return 2 * bound + 1


def encode(x: Tensor, bound: int) -> Tensor:
    """Return the two-hot weights (..., K) of numbers (...), which sum to 1.

    Numbers beyond the outermost bins belong to these bins.
    """
    place = squash(at_least_float32(x)).clamp(-bound, bound)
    below = place.floor().clamp(max=bound - 1)
    share = (place - below)[..., None]
    index = below.long()[..., None] + bound
    weights = share.new_zeros(*x.shape, bins(bound))
    return weights.scatter(-1, index, 1 - share).scatter(-1, index + 1, share)


def decode(logits: Tensor) -> Tensor:
    """Return the numbers (...) that logits (..., K) represent."""
    logits = at_least_float32(logits)
    bound = _bound(logits)
    with torch.autocast(logits.device.type, enabled=False):
        places = torch.arange(-bound, bound + 1, device=logits.device, dtype=logits.dtype)
        # A product and a sum, not a matrix product: those may run in TF32.
        return stretch((logits.softmax(-1) * places).sum(-1))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy (...), in nats, of logits (..., K) and the two-hot weights of `target` (...).

    `target` is a constant.
    """
    return -(encode(target.detach(), _bound(logits)) * at_least_float32(logits).log_softmax(-1)).sum(-1)


def _bound(logits: Tensor) -> int:
    assert logits.shape[-1] % 2 == 1, "as many bins below 0 as above"
    return logits.shape[-1] // 2
