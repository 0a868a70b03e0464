"""Sampling from categorical distributions without ever waiting for the device.

What is drawn is a function of the distribution and of a number uniform in [0, 1). So the random numbers of a whole
rollout can be drawn at once, and the rest of it is arithmetic alone.
"""

from __future__ import annotations

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
    numbers = torch.rand(shape, device=generator.device, generator=generator, pin_memory=pinned)
    return numbers.to(device, non_blocking=True)


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Draw from probabilities over the last axis, (..., N) to (...) int64; they need not sum to 1.

    `numbers` (...) are uniform in [0, 1). By inverting the distribution function: one random number a draw instead of
    N, which on a CPU is ten times as fast as `torch.multinomial` at N = 512; and nothing is checked on the host.
    """
    cumulative = probabilities.cumsum(-1)
    # Rounding may leave the last sum a little off 1.
    threshold = numbers[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=cumulative.shape[-1] - 1)


def sample(logits: Tensor, numbers: Tensor) -> Tensor:
    """Draw from the softmax over the last axis, (..., N) to (...) int64; `numbers` as in `draw`."""
    return draw(logits.float().softmax(-1), numbers)


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw from softmax(logits / temperature), (..., N) to (...) int64; at temperature 0 take the likeliest.

    `generator` as in `uniform`; nothing is drawn from it at temperature 0.
    """
    if temperature == 0:
        return logits.argmax(-1)
    return sample(logits / temperature, uniform(logits.shape[:-1], logits.device, generator))
