"""Categorical distributions: sampling that never waits for the device, and one-hot samples of latents.

A sample is a function of the distribution and of a number uniform in [0, 1). So a rollout can draw all its uniforms at
once.

Axes: K variables of C classes. Distributions of latents are log-probabilities or probabilities (..., K, C), always
float32 or float64, also under autocast.

Source: DreamerV2 (Hafner et al. 2021, arXiv 2010.02193).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wmcli import ranks
from wmcli.transfer import to_device

IMPOSSIBLE = -1e9
"""Logit of a class that cannot occur: its probability is exactly 0, and products with it are finite."""


def uniform(shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw numbers in [0, 1), float32, on `device`, from `generator` or the device's global generator.

    A generator draws on its own device, so the numbers do not depend on `device`. From a CPU generator to a GPU they
    are copied without a wait. The first axis has the rows of a batch.
    """
    if generator is None:
        return ranks.drawn(lambda every: torch.rand(every, device=device), shape)
    source = generator.device
    return to_device(ranks.drawn(lambda every: torch.rand(every, device=source, generator=generator), shape), device)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw indices (...) int64 from probabilities (..., N), which need not sum to 1.

    `uniforms` (...) are uniform in [0, 1). The inverse of the distribution function needs one random number per sample
    instead of N. On a CPU it is ten times as fast as `torch.multinomial` at N = 512. The host checks nothing.
    """
    cumulative = probabilities.cumsum(-1)
    # By rounding the last sum may differ from 1.
    threshold = uniforms[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=cumulative.shape[-1] - 1)


def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw indices (...) int64 from the softmax of logits (..., N); `uniforms` as in `draw`."""
    return draw(logits.float().softmax(-1), uniforms)


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw indices (...) int64 from softmax(logits / temperature) of logits (..., N), or the argmax at temperature 0.

    `generator` as in `uniform`. It is not used at temperature 0.
    """
    if temperature == 0:
        return logits.argmax(-1)
    return sample(logits / temperature, uniform(logits.shape[:-1], logits.device, generator))


# -- latents as one-hot vectors ----------------------------------------------------------------------------------------


def mixed_log_probabilities(logits: Tensor, unimix: float) -> Tensor:
    """Return log((1 - unimix) softmax(logits) + unimix / C), so that every class is possible."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_probabilities = logits.log_softmax(-1)
    if unimix == 0:
        return log_probabilities
    floor = log_probabilities.new_full((), math.log(unimix / logits.shape[-1]))
    return torch.logaddexp(log_probabilities + math.log1p(-unimix), floor)


def one_hot(index: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return one-hot vectors (..., classes) of indices (...) int64.

    Torch's own converts from int64 and on a CPU checks the values.
    """
    zeros = torch.zeros(*index.shape, classes, dtype=dtype, device=index.device)
    return zeros.scatter_(-1, index[..., None], 1)


def draw_one_hot(probabilities: Tensor, uniforms: Tensor | None = None) -> Tensor:
    """Draw one-hot vectors (..., K, C) in the dtype of `probabilities`, exactly 0 and 1, without gradient.

    `uniforms` (..., K) are uniform in [0, 1). None draws them from torch's global generator.
    """
    if uniforms is None:
        uniforms = uniform(probabilities.shape[:-1], probabilities.device)
    with torch.no_grad():
        return one_hot(draw(probabilities, uniforms), probabilities.shape[-1], probabilities.dtype)


def straight_through(probabilities: Tensor) -> Tensor:
    """Draw one-hot vectors, exactly 0 and 1, whose gradient is that of the probabilities."""
    return draw_one_hot(probabilities) + (probabilities - probabilities.detach())


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) of (..., K, C), summed over the K variables: (...) nats."""
    return (log_p.exp() * (log_p - log_q)).sum((-2, -1))


def entropy(log_p: Tensor) -> Tensor:
    """Return the entropy of (..., K, C), summed over the K variables: (...) nats."""
    return -(log_p.exp() * log_p).sum((-2, -1))
