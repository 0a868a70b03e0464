"""A function applied to parts of a batch, with activations computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_parts(function: Callable[..., Tensor], size: int, *inputs: Tensor | None) -> Tensor:
    """Apply a function of rows to `size` rows at a time.

    Of each part only inputs and output are kept. The backward pass computes the function once more (Chen et al. 2016,
    arXiv 1604.06174). Under autocast it does so in the same precision.

    Args:
        function: Treats each row by itself and draws no random numbers. Its parameters get gradients.
        size: Rows of a part; 0 applies the function to all rows at once and keeps its activations.
        inputs: (N, ...) or None each.

    Returns:
        The outputs (N, ...).
    """
    if not size:
        return function(*inputs)
    count = next(len(each) for each in inputs if each is not None)
    parts = []
    for begin in range(0, count, size):
        part = (None if each is None else each[begin : begin + size] for each in inputs)
        parts.append(checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts)
