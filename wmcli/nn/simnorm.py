"""Simplicial normalization: a latent as many small distributions.

A latent is D / V groups of V non-negative numbers that sum to 1. All arithmetic is float32 at least, also under
autocast.

Axes: D width of a latent, V members of a group.

Source: TD-MPC2 (Hansen et al. 2024, arXiv 2310.16828).
"""

from __future__ import annotations

from torch import Tensor

from wmcli.nn.layers import at_least_float32

EPS = 1e-6  # added to every probability before the logarithm


def simnorm(x: Tensor, members: int) -> Tensor:
    """Return the softmax of x (..., D), at temperature 1, over each group of `members` adjacent numbers."""
    return at_least_float32(x).unflatten(-1, (-1, members)).softmax(-1).flatten(-2)


def divergence(target: Tensor, predicted: Tensor, members: int) -> Tensor:
    """Return KL(target || predicted) of latents (..., D), averaged over groups: (...) nats. `target` is a constant."""
    p, q = (each.unflatten(-1, (-1, members)) + EPS for each in (target.detach(), predicted))
    return (p * (p / q).log()).sum(-1).mean(-1)
