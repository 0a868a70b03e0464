"""Causal convolution over time, one filter per channel, with an explicit state: the short convolution of Mamba (Gu and
Dao 2023, arXiv 2312.00752).

    y_t = bias + sum_k weight_k x_{t - W + 1 + k}        k = 0 ... W - 1, the oldest tap first

`reference` says what the operation means, one element at a time. The state holds the newest W - 1 inputs, newest last,
zeros where there were none. A reset also clears what later taps would reach back to.

States and sums are float32 (float64 for float64 operands) also under autocast.

Axes: B batch, C channels, W taps, T time, N blocks, L elements of a block with what is asked behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, one element after the other. Arguments and results as in `causal_conv`."""
    if state is None:
        state = weight.new_zeros(len(x), weight.shape[0], weight.shape[1] - 1)
    outputs = []
    for t in range(x.shape[1]):
        if reset is not None:
            state = state.masked_fill(reset[:, t, None, None], 0.0)
        seen = torch.cat((state, x[:, t, :, None]), -1)  # (B, C, W)
        outputs.append(torch.einsum("bcw,cw->bc", seen, weight) + bias)
        state = seen[:, :, 1:]
    return torch.stack(outputs, 1), state


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All elements at once.

    x (B, T, C); weight (C, W), W >= 2; bias (C,); state (B, C, W - 1) or None for zeros; reset (B, T) bool, True clears
    the state before that element. Returns y (B, T, C) in the dtype of x, and the state after the last element.
    """
    past, length = weight.shape[1] - 1, x.shape[1]
    padded = _behind(x, past, state)
    segment = None if reset is None else F.pad(reset.long().cumsum(1), (past, 0))  # (B, W - 1 + T): resets so far
    y = bias.to(padded.dtype).expand(x.shape)
    for tap in range(past + 1):
        seen = padded[:, tap : tap + length]
        if segment is not None and tap < past:
            seen = seen.masked_fill((segment[:, tap : tap + length] != segment[:, past:])[..., None], 0.0)
        y = torch.addcmul(y, seen, weight[:, tap].to(padded.dtype))
    last = padded[:, length:]
    if segment is not None:
        last = last.masked_fill((segment[:, length:] != segment[:, -1:])[..., None], 0.0)
    return y.to(x.dtype), last.mT


def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One element: x (B, C); weight (C, W); bias (C,); state (B, C, W - 1); reset (B,) bool.

    Returns y (B, C) in the dtype of x, and the new state.
    """
    if reset is not None:
        state = state.masked_fill(reset[:, None, None], 0.0)
    seen = torch.cat((state, x[..., None].to(state.dtype)), -1)  # (B, C, W)
    y = (seen * weight).sum(-1) + bias
    return y.to(x.dtype), seen[..., 1:]


def causal_conv_fork(
    x: Tensor, weight: Tensor, bias: Tensor, block: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """N blocks whose first `block` elements enter the state and whose other elements do not.

    x (B, N, L, C); weight (C, W); bias (C,); state (B, C, W - 1) or None for zeros; 1 <= block <= L, and block may be
    smaller than W - 1. The elements from `block` on see what comes before them up to their block's end and themselves,
    and leave no trace. Returns y (B, N, L, C) in the dtype of x, and the state after the last block.
    """
    past = weight.shape[1] - 1
    # The state before each block and after the last one: W - 1 inputs wide, a block further each time.
    states = _behind(x[:, :, :block].flatten(1, 2), past, state).unfold(1, past, block)  # (B, N + 1, C, W - 1)
    y, _ = causal_conv(x.flatten(0, 1), weight, bias, states[:, :-1].flatten(0, 1))
    return y.unflatten(0, x.shape[:2]), states[:, -1]


def _behind(x: Tensor, past: int, state: Tensor | None) -> Tensor:
    """x (B, T, C) behind the inputs of a state, (B, W - 1 + T, C) in the dtype of states."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.pad(x, (0, 0, past, 0)) if state is None else torch.cat((state.mT.to(x.dtype), x), 1)
