"""Recurrent cells that torch has fused for CUDA alone, in plain operations.

B rows, H width. What the backward pass reads is what the forward pass kept; its layout is private to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def lstm(
    inputs: Tensor, hidden: Tensor, cell: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (B, H), next cell (B, H) and the gates (B, 4 H), from gates of the input and of the state."""
    gates = inputs + hidden
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    following = f * cell + i * c
    return o * following.tanh(), following, torch.cat((i, f, c, o), 1)


def lstm_backward(
    output: Tensor | None, following: Tensor | None, cell: Tensor, next_cell: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the gates, the cell and the bias, from those of the output and the next cell."""
    i, f, c, o = kept.chunk(4, 1)
    tanh = next_cell.tanh()
    output = torch.zeros_like(next_cell) if output is None else output
    of_cell = output * o * (1 - tanh * tanh) + (0 if following is None else following)
    of_i, of_f = of_cell * c * i * (1 - i), of_cell * cell * f * (1 - f)
    of_c, of_o = of_cell * i * (1 - c * c), output * tanh * o * (1 - o)
    gates = torch.cat((of_i, of_f, of_c, of_o), 1)
    return gates, of_cell * f, gates.sum(0) if has_bias else None


def gru(
    inputs: Tensor, hidden: Tensor, state: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the next state (B, H) and what the backward pass reads, from gates of the input and of the state."""
    if input_bias is not None and hidden_bias is not None:
        inputs, hidden = inputs + input_bias, hidden + hidden_bias
    input_r, input_z, input_n = inputs.chunk(3, 1)
    hidden_r, hidden_z, hidden_n = hidden.chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return (1 - z) * n + z * state, torch.cat((r, z, n, state, hidden_n), 1)


def gru_backward(
    output: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of both gates, of the state and of both biases, from that of the next state."""
    r, z, n, state, hidden_n = kept.chunk(5, 1)
    of_z, of_n = output * (state - n) * z * (1 - z), output * (1 - z) * (1 - n * n)
    of_r = of_n * hidden_n * r * (1 - r)
    inputs, hidden = torch.cat((of_r, of_z, of_n), 1), torch.cat((of_r, of_z, of_n * r), 1)
    return inputs, hidden, output * z, inputs.sum(0) if has_bias else None, hidden.sum(0) if has_bias else None


CELLS: dict[str, Callable[..., tuple[Tensor | None, ...]]] = {
    "_thnn_fused_lstm_cell": lstm,
    "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
    "_thnn_fused_gru_cell": gru,
    "_thnn_fused_gru_cell_backward": gru_backward,
}
