"""Causal convolution over time, one filter per channel, with an explicit state: Mamba's short convolution.

    y_t = bias + sum_k weight_k x_{t - W + 1 + k}        k = 0 ... W - 1, the oldest tap first

`reference` is the definition, one element at a time. The state is the last W - 1 inputs, newest last, with zeros before
the first. A reset clears the inputs that later taps would reach. The other forms add one tap after the other; in
PyTorch for all elements at once. `causal_conv` has first derivatives only.

States and sums are float32 (float64 for float64 operands), also under autocast.

Axes: B batch, C channels, W taps, T time, N blocks, L elements of a block including its queries.

Source: Mamba (Gu and Dao 2023, arXiv 2312.00752).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from wmcli.kernels.dispatch import jit, on_triton, tl, triton

ROWS, CHANNELS = 32, 64  # of a Triton program's tile


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `causal_conv` by its definition, one element after the other."""
    if state is None:
        state = weight.new_zeros(len(x), weight.shape[0], weight.shape[1] - 1)
    outputs = []
    for t in range(x.shape[1]):
        if reset is not None:
            state = state.masked_fill(reset[:, t, None, None], 0.0)
        window = torch.cat((state, x[:, t, :, None]), -1)  # (B, C, W)
        outputs.append(torch.einsum("bcw,cw->bc", window, weight) + bias)
        state = window[:, :, 1:]
    return torch.stack(outputs, 1), state


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Filter all elements at once.

    Args:
        x: (B, T, C).
        weight: (C, W), W >= 2.
        bias: (C,).
        state: (B, C, W - 1), or None for zeros.
        reset: (B, T) bool. True clears the state before that element.

    Returns:
        y (B, T, C) in the dtype of x, and the state after the last element.
    """
    if on_triton(x, weight, bias):
        y, state = _TritonConv.apply(x[:, None], weight, bias, state, reset, x.shape[1])
        return y[:, 0], state
    past, length = weight.shape[1] - 1, x.shape[1]
    padded = _behind(x, past, state)
    visible = None
    last = padded[:, length:]
    if reset is not None:
        segment = F.pad(reset.long().cumsum(1), (past, 0))  # (B, W - 1 + T): resets so far
        own = segment[:, past:]
        visible = torch.stack([segment[:, tap : tap + length] == own for tap in range(past)]).to(padded.dtype)[
            ..., None
        ]
        last = last.masked_fill((segment[:, length:] != segment[:, -1:])[..., None], 0.0)
    y = _Taps.apply(padded, weight.to(padded.dtype), bias.to(padded.dtype), visible)
    return y.to(x.dtype), last.mT


def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Filter one element.

    Args:
        x: (B, C).
        weight: (C, W).
        bias: (C,).
        state: (B, C, W - 1).
        reset: (B,) bool. True clears the state before the element.

    Returns:
        y (B, C) in the dtype of x, and the new state.
    """
    if on_triton(x, weight, bias):
        y, state = _TritonConv.apply(x[:, None, None], weight, bias, state, reset, 1)
        return y[:, 0, 0], state
    if reset is not None:
        state = state.masked_fill(reset[:, None, None], 0.0)
    window = torch.cat((state.mT, x[:, None].to(state.dtype)), 1)  # (B, W, C)
    taps = weight.mT.contiguous()
    y = torch.addcmul(bias, window[:, 0], taps[0])
    for tap in range(1, len(taps)):
        y.addcmul_(window[:, tap], taps[tap])
    return y.to(x.dtype), window[:, 1:].mT


def causal_conv_fork(
    x: Tensor, weight: Tensor, bias: Tensor, block: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Filter N blocks of which only the first `block` elements enter the state.

    The other elements (queries) depend on everything before them in their block and on the past, but do not enter the
    state.

    Args:
        x: (B, N, L, C).
        weight: (C, W).
        bias: (C,).
        block: Elements that enter the state, 1 <= block <= L; may be smaller than W - 1.
        state: (B, C, W - 1), or None for zeros.

    Returns:
        y (B, N, L, C) in the dtype of x, and the state after the last block.
    """
    if on_triton(x, weight, bias):
        return _TritonConv.apply(x, weight, bias, state, None, block)
    past = weight.shape[1] - 1
    # The state before each block and after the last one: W - 1 inputs wide, a block further each time.
    states = _behind(x[:, :, :block].flatten(1, 2), past, state).unfold(1, past, block)  # (B, N + 1, C, W - 1)
    y, _ = causal_conv(x.flatten(0, 1), weight, bias, states[:, :-1].flatten(0, 1))
    return y.unflatten(0, x.shape[:2]), states[:, -1]


# -- torch -------------------------------------------------------------------------------------------------------------


def _behind(x: Tensor, past: int, state: Tensor | None) -> Tensor:
    """Return x (B, T, C) after the inputs of a state: (B, W - 1 + T, C) in the dtype of states."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.pad(x, (0, 0, past, 0)) if state is None else torch.cat((state.mT.to(x.dtype), x), 1)


class _Taps(torch.autograd.Function):
    """Sum of taps: padded (B, W - 1 + T, C), weight (C, W), bias (C,) to (B, T, C).

    `visible` (W - 1, B, T, 1) is 1 where a tap uses its input, else 0; None uses all. Every tap adds to one output,
    because new memory costs a CPU more than the arithmetic.
    """

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor, visible: Tensor | None) -> Tensor:
        taps = weight.mT.contiguous()
        past = len(taps) - 1
        length = padded.shape[1] - past
        y = torch.addcmul(bias, padded[:, past:], taps[past])
        room = None if visible is None else torch.empty_like(y)
        for tap in range(past):
            x = padded[:, tap : tap + length]
            y.addcmul_(x if visible is None else torch.mul(x, visible[tap], out=room), taps[tap])
        ctx.save_for_backward(padded, taps, visible)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        padded, taps, visible = ctx.saved_tensors
        length = grad_y.shape[1]
        grad_padded, grad_taps, room = torch.zeros_like(padded), torch.empty_like(taps), torch.empty_like(grad_y)
        for tap in range(len(taps)):
            at = slice(tap, tap + length)
            masked = visible is not None and tap < len(visible)
            grad = torch.mul(grad_y, visible[tap], out=room) if masked else grad_y
            grad_padded[:, at].addcmul_(grad, taps[tap])
            grad_taps[tap] = torch.mul(padded[:, at], grad, out=room).sum((0, 1))
        return grad_padded, grad_taps.mT, grad_y.sum((0, 1)), None


# -- Triton ------------------------------------------------------------------------------------------------------------
#
# The first `block` elements of all blocks enter the state, one block after the other. Element `at` of block n is
# their number n block + at, also for at < 0, an element of an earlier block. The state has the numbers 1 - W to -1.


@jit
def _flags(reset, row, inside):
    """Return whether each row is reset; False where not `inside`."""
    return tl.load(reset + row, mask=inside, other=0) != 0


@jit
def _inputs(
    x, state, x_row, x_channel, sequence, n, at, channel, channels, blocks, size, block, inside, PAST: tl.constexpr
):
    """Load the elements `at`, from block n: (ROWS, C), zeros where not `inside` or without a state."""
    number = n * block + at
    in_x = (at >= 0) | (number >= 0)
    entered = tl.maximum(number, 0)
    row = sequence * blocks * size + tl.where(at < 0, entered // block * size + entered % block, n * size + at)
    place = row[:, None] * x_row + channel[None, :].to(tl.int64) * x_channel
    value = tl.load(x + place, mask=inside & in_x[:, None], other=0.0).to(tl.float32)
    if state is not None:
        cell = (sequence * channels + channel[None, :]) * PAST + PAST + number[:, None]
        value += tl.load(state + cell, mask=inside & (in_x == 0)[:, None], other=0.0).to(tl.float32)
    return value


@jit
def _forward(
    x,
    weight,
    bias,
    state,
    reset,
    y,
    last,
    x_row,
    x_channel,
    channels,
    blocks,
    size,
    block,
    W: tl.constexpr,
    PAST: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """Compute a tile of rows of a block and of channels.

    `size` is L; x_row and x_channel are strides. PAST is a power of 2, at least W - 1. The first tile of the last block
    also writes `last` (B, C, W - 1), the new state.
    """
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(0).to(tl.int64) * size + at
    channel = tl.program_id(2) * C + tl.arange(0, C)
    wide = channel < channels
    total = tl.zeros((ROWS, C), tl.float32) + tl.load(bias + channel, mask=wide, other=0.0).to(tl.float32)[None, :]
    visible = at < size
    inside = visible[:, None] & wide[None, :]
    for back in tl.static_range(W):
        if reset is not None and back > 0:
            visible = visible & (_flags(reset, row - back + 1, visible & (at >= back - 1)) == 0)
        met = visible[:, None] & wide[None, :]
        met_value = _inputs(
            x, state, x_row, x_channel, sequence, n, at - back, channel, channels, blocks, size, block, met, W - 1
        )
        tap = tl.load(weight + channel * W + W - 1 - back, mask=wide, other=0.0).to(tl.float32)
        total += tap[None, :] * met_value
    tl.store(y + row[:, None] * channels + channel[None, :], total, mask=inside)
    if (n == blocks - 1) & (tl.program_id(1) == 0):
        # The state holds the elements before the next block, if there were one.
        slot = tl.arange(0, PAST)
        exists = slot < W - 1
        alive = exists
        for ahead in tl.static_range(1, W - 1):
            if reset is not None:
                later = size - (W - 1) + slot + ahead
                there = exists & (later >= 0) & (later < size)
                alive = alive & (_flags(reset, sequence * size + later, there) == 0)
        read = alive[:, None] & wide[None, :]
        place = slot - (W - 1)
        value = _inputs(
            x, state, x_row, x_channel, sequence, blocks, place, channel, channels, blocks, size, block, read, W - 1
        )
        cell = (sequence * channels + channel[None, :]) * (W - 1) + slot[:, None]
        tl.store(last + cell, value, mask=exists[:, None] & wide[None, :])


@jit
def _backward(
    x,
    weight,
    state,
    reset,
    grad_y,
    grad_last,
    grad_x,
    grad_state,
    parts,
    x_row,
    x_channel,
    channels,
    blocks,
    size,
    block,
    REACH: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """Compute gradients for a tile of channels and of rows; the first block also handles the state's W - 1 elements.

    Filters of the own block and of the next REACH blocks reach an element. `parts` (tiles of rows, W + 1, C) sum up to
    the gradients of the weight and, last, of the bias.
    """
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS) - (W - 1)
    row = tl.program_id(0).to(tl.int64) * size + at
    channel = tl.program_id(2) * C + tl.arange(0, C)
    wide = channel < channels
    exists = (at >= tl.where(n == 0, 1 - W, 0)) & (at < size)
    inside = exists[:, None] & wide[None, :]
    value = _inputs(x, state, x_row, x_channel, sequence, n, at, channel, channels, blocks, size, block, inside, W - 1)
    grad = tl.zeros((ROWS, C), tl.float32)
    parts += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (W + 1) * channels + channel
    visible = exists
    for ahead in tl.static_range(W):
        if reset is not None and ahead > 0:
            visible = visible & (_flags(reset, row + ahead, exists & (at + ahead >= 0) & (at + ahead < size)) == 0)
        tap = tl.load(weight + channel * W + W - 1 - ahead, mask=wide, other=0.0).to(tl.float32)
        part = tl.zeros((C,), tl.float32)
        for behind in tl.static_range(REACH + 1):
            place = at + ahead - behind * block  # of the filter in its block
            read = visible & (place >= 0) & (place < size)
            if behind > 0:
                read = read & (at < tl.where(n + behind < blocks, block, 1 - W))
            out = (row + ahead + behind * (size - block))[:, None] * channels + channel[None, :]
            g = tl.load(grad_y + out, mask=read[:, None] & wide[None, :], other=0.0).to(tl.float32)
            grad += tap[None, :] * g
            part += tl.sum(g * value, 0)
            if ahead == 0 and behind == 0:
                tl.store(parts + W * channels, tl.sum(g, 0), mask=wide)
        tl.store(parts + (W - 1 - ahead) * channels, part, mask=wide)
    slot = at + (n - blocks) * block + W - 1  # in the new state
    cell = (sequence * channels + channel[None, :]) * (W - 1) + slot[:, None]
    alive = visible & (at < block) & (slot >= 0)
    grad += tl.load(grad_last + cell, mask=alive[:, None] & wide[None, :], other=0.0).to(tl.float32)
    tl.store(grad_x + row[:, None] * channels + channel[None, :], grad, mask=inside & (at >= 0)[:, None])
    if state is not None:
        cell = (sequence * channels + channel[None, :]) * (W - 1) + at[:, None] + W - 1
        tl.store(grad_state + cell, grad, mask=inside & (at < 0)[:, None])


class _TritonConv(torch.autograd.Function):
    """`causal_conv_fork` in Triton, with reset (B, L) where N is 1."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        state: Tensor | None,
        reset: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        batch, blocks, size, channels = x.shape
        taps = weight.shape[1]
        rows, weight = x.flatten(0, 2), weight.contiguous()
        state = None if state is None else state.contiguous()
        reset = None if reset is None else reset.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        last = x.new_empty(batch, channels, taps - 1, dtype=torch.float32)
        tile, grid = _tiles(x, size)
        _forward[grid](
            *(rows, weight, bias, state, reset, y, last),
            *(*rows.stride(), channels, blocks, size, block),
            W=taps,
            PAST=triton.next_power_of_2(taps - 1),
            **tile,
        )
        ctx.save_for_backward(x, weight, state, reset)
        ctx.block, ctx.bias = block, bias.dtype
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state, reset = ctx.saved_tensors
        _, blocks, size, channels = x.shape
        past = weight.shape[1] - 1
        rows = x.flatten(0, 2)
        tile, grid = _tiles(x, past + size)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_state = None if state is None else torch.empty_like(state)
        parts = x.new_empty(grid[0] * grid[1], past + 2, channels, dtype=torch.float32)
        _backward[grid](
            *(rows, weight, state, reset, grad_y.contiguous(), grad_last.contiguous()),
            *(grad_x, grad_state, parts),
            *(*rows.stride(), channels, blocks, size, ctx.block),
            REACH=min(blocks - 1, -(-past // ctx.block)),
            W=past + 1,
            **tile,
        )
        parts = parts.sum(0)
        grad_weight, grad_bias = parts[:-1].mT.to(weight.dtype), parts[-1].to(ctx.bias)
        return grad_x, grad_weight, grad_bias, grad_state, None, None


def _tiles(x: Tensor, rows: int) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Return the tile of a program and the grid, given the rows of a block."""
    tile = {"ROWS": min(ROWS, triton.next_power_of_2(rows)), "C": min(CHANNELS, triton.next_power_of_2(x.shape[3]))}
    return tile, (x.shape[0] * x.shape[1], -(-rows // tile["ROWS"]), -(-x.shape[3] // tile["C"]))
