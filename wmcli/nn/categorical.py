"""Categorical distributions: sampling that never waits for the device, and latents drawn as one-hot vectors.

A draw is a function of the distribution and of a number uniform in [0, 1). So the random numbers of a whole rollout can
be drawn at once, and the rest of it is arithmetic.

K variables of C classes each: distributions of latents are log-probabilities or probabilities (..., K, C), always
float32 or float64, also under autocast (DreamerV2: Hafner et al. 2021, arXiv 2010.02193).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def uniform(shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Numbers in [0, 1), float32, on `device`, from the device's global generator unless one is given.

    A generator draws where it lives, the same for every device; from the CPU to a GPU that costs a copy, not a wait.
    """
    if generator is None:
        return torch.rand(shape, device=device)
    pinned = device.type == "cuda" and generator.device.type == "cpu"  # a copy from other memory may wait
    uniforms = torch.rand(shape, device=generator.device, generator=generator, pin_memory=pinned)
    return uniforms.to(device, non_blocking=True)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from probabilities over the last axis, (..., N) to (...) int64; they need not sum to 1.

    `uniforms` (...) are uniform in [0, 1). By inverting the distribution function: one random number a draw instead of
    N, which on a CPU is ten times as fast as `torch.multinomial` at N = 512; and nothing is checked on the host.
    """
    cumulative = probabilities.cumsum(-1)
    # Rounding may leave the last sum a little off 1.
    threshold = uniforms[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=cumulative.shape[-1] - 1)


def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from the softmax over the last axis, (..., N) to (...) int64; `uniforms` as in `draw`."""
    return draw(logits.float().softmax(-1), uniforms)


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw from softmax(logits / temperature), (..., N) to (...) int64; at temperature 0 take the likeliest.

    `generator` as in `uniform`; nothing is drawn from it at temperature 0.
    """
    if temperature == 0:
        return logits.argmax(-1)
    return sample(logits / temperature, uniform(logits.shape[:-1], logits.device, generator))


# -- latents as one-hot vectors ----------------------------------------------------------------------------------------


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


def draw_one_hot(probabilities: Tensor, uniforms: Tensor | None = None) -> Tensor:
    """One-hot vectors (..., K, C) in the dtype of `probabilities`, exactly 0 and 1, without gradient.

    `uniforms` (..., K), uniform in [0, 1), decide; None: drawn with torch's global generator.
    """
    if uniforms is None:
        uniforms = uniform(probabilities.shape[:-1], probabilities.device)
    with torch.no_grad():
        return one_hot(draw(probabilities, uniforms), probabilities.shape[-1], probabilities.dtype)


def straight_through(probabilities: Tensor) -> Tensor:
    """A draw whose gradient is that of the probabilities. Its value is exactly 0 and 1: what is added is exactly 0."""
    return draw_one_hot(probabilities) + (probabilities - probabilities.detach())


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of (..., K, C), summed over the K variables: (...) nats."""
    return (log_p.exp() * (log_p - log_q)).sum((-2, -1))


def entropy(log_p: Tensor) -> Tensor:
    """Entropy of (..., K, C), summed over the K variables: (...) nats."""
    return -(log_p.exp() * log_p).sum((-2, -1))
