"""Latents of several categorical variables, drawn as one-hot vectors (DreamerV2: Hafner et al. 2021, arXiv 2010.02193).

K variables of C classes each. Distributions are log-probabilities or probabilities (..., K, C), always float32 or
float64, also under autocast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wmcli.nn.categorical import draw, uniform


def mixed_log_probabilities(logits: Tensor, unimix: float) -> Tensor:
    """log((1 - unimix) softmax(logits) + unimix / C), so that no class is ever impossible."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_probabilities = logits.log_softmax(-1)
    if unimix == 0:
        return log_probabilities
    floor = log_probabilities.new_full((), math.log(unimix / logits.shape[-1]))
    return torch.logaddexp(log_probabilities + math.log1p(-unimix), floor)


def one_hot(index: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """(...) int64 in 0..classes-1 to (..., classes). Torch's own goes through int64 and on a CPU checks the values."""
    zeros = torch.zeros(*index.shape, classes, dtype=dtype, device=index.device)
    return zeros.scatter_(-1, index[..., None], 1)


def draw_one_hot(probabilities: Tensor, numbers: Tensor | None = None) -> Tensor:
    """One-hot vectors (..., K, C) in the dtype of `probabilities`, exactly 0 and 1, without gradient.

    `numbers` (..., K), uniform in [0, 1), decide; None: drawn with torch's global generator.
    """
    if numbers is None:
        numbers = uniform(probabilities.shape[:-1], probabilities.device)
    with torch.no_grad():
        return one_hot(draw(probabilities, numbers), probabilities.shape[-1], probabilities.dtype)


def straight_through(probabilities: Tensor) -> Tensor:
    """A draw whose gradient is that of the probabilities. Its value is exactly 0 and 1: what is added is exactly 0."""
    return draw_one_hot(probabilities) + (probabilities - probabilities.detach())


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of (..., K, C), summed over the K variables: (...) nats."""
    return (log_p.exp() * (log_p - log_q)).sum((-2, -1))


def entropy(log_p: Tensor) -> Tensor:
    """Entropy of (..., K, C), summed over the K variables: (...) nats."""
    return -(log_p.exp() * log_p).sum((-2, -1))
