"""The selective scan of Mamba: S state components per channel, each with its own decay.

    h_t[c, s] = exp(dt_t[c] a[c, s]) h_{t-1}[c, s] + dt_t[c] b_t[s] x_t[c]        y_t[c] = sum_s c_t[s] h_t[c, s]

Step sizes and the weights of input and output depend on the data. `reference` is the definition, one element at a time.
The other forms run the same loop but store only some states. The backward pass recomputes each chunk from the state
before it. No tensor (B, T, C, S) ever exists. They have first derivatives only.

The PyTorch form works on tiles that stay in the processor's cache. Its loop takes one operation per element. That is
faster than scans in log(chunk) operations, which do more work. In Triton a program handles a sequence and a few
channels, with their states in registers.

States and arithmetic are float32 (float64 for float64 operands), also under autocast.

Axes: B batch, T time, C channels, S state components per channel, N blocks, L elements of a block including its
queries, P pieces between two stored states. The letters a, b and c follow the paper. The skip connection (its D) is
left to the caller.

Source: Mamba (Gu and Dao 2023, arXiv 2312.00752).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wmcli.kernels.dispatch import jit, on_triton, tl, triton
from wmcli.kernels.tiles import Tile, choose

CHUNK = 16  # elements between two states that the form in torch stores
CACHED = 2**19  # numbers in each of the two or three arrays it works on, for every thread: two megabytes
LOG2E = 1 / math.log(2)

TILES = ((8, 16, 64), (8, 16, 128), (4, 16, 64))
"""Elements between two stored states, as many of which a program has in registers in the backward pass; channels of a
program; state components per warp. The first is the default."""


def reference(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` by its definition, one element after the other."""
    state = x.new_zeros(len(x), *a.shape) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        if reset is not None:
            state = state.masked_fill(reset[:, t, None, None], 0.0)
        decay = (dt[:, t, :, None] * a).exp()
        state = decay * state + (dt[:, t] * x[:, t])[:, :, None] * b[:, t, None, :]
        outputs.append(torch.einsum("bs,bcs->bc", c[:, t], state))
    return torch.stack(outputs, 1), state


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scan all elements at once.

    Args:
        x: (B, T, C).
        dt: (B, T, C), at least 0.
        a: (C, S), at most 0.
        b: (B, T, S).
        c: (B, T, S).
        state: (B, C, S), or None for zeros.
        reset: (B, T) bool. True clears the state before that element.

    Returns:
        y (B, T, C) in the dtype of x, and the state after the last element.
    """
    if on_triton(x, dt, a, b, c):
        x, dt, b, c = (operand[:, None] for operand in (x, dt, b, c))
        y, state = _TritonScan.apply(x, dt, a, b, c, state, reset, x.shape[2])
        return y[:, 0], state
    y, ends = _scan(x, dt, a, b, c, _inner(state), reset, x.shape[1])
    return y, _outer(ends[:, -1])


def selective_scan_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scan one element.

    Args:
        x: (B, C).
        dt: (B, C).
        a: (C, S).
        b: (B, S).
        c: (B, S).
        state: (B, C, S).
        reset: (B,) bool. True clears the state before the element.

    Returns:
        y (B, C) in the dtype of x, and the new state.
    """
    if on_triton(x, dt, a, b, c):
        x, dt, b, c = (operand[:, None, None] for operand in (x, dt, b, c))
        y, state = _TritonScan.apply(x, dt, a, b, c, state, reset, 1)
        return y[:, 0, 0], state
    with torch.autocast(x.device.type, enabled=False):
        if reset is not None:
            state = state.masked_fill(reset[:, None, None], 0.0)
        dt, a, b, c = (operand.to(state.dtype) for operand in (dt, a, b, c))
        decay = (dt[..., None] * (a * LOG2E)).exp2_()
        state = ((dt * x)[..., None] * b[:, None]).addcmul_(decay, state)
        return (c[:, None] @ state.mT).squeeze(1).to(x.dtype), state


def selective_scan_fork(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, block: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scan N blocks of which only the first `block` elements enter the state.

    The other elements (queries) depend on everything up to the end of their block's first part, and on one another
    causally. They do not enter the state.

    Args:
        x: (B, N, L, C).
        dt: (B, N, L, C).
        a: (C, S).
        b: (B, N, L, S).
        c: (B, N, L, S).
        block: Elements that enter the state, 1 <= block <= L.
        state: (B, C, S), or None for zeros.

    Returns:
        y (B, N, L, C) in the dtype of x, and the state after the last block.
    """
    if on_triton(x, dt, a, b, c):
        return _TritonScan.apply(x, dt, a, b, c, state, None, block)
    blocks, size = x.shape[1:3]
    x_, dt_, b_, c_ = (operand[:, :, :block].flatten(1, 2) for operand in (x, dt, b, c))
    y, ends = _scan(x_, dt_, a, b_, c_, _inner(state), None, block)
    y = y.unflatten(1, (blocks, block))
    if block < size:
        x_, dt_, b_, c_ = (operand[:, :, block:].flatten(0, 1) for operand in (x, dt, b, c))
        answers, _ = _scan(x_, dt_, a, b_, c_, ends.flatten(0, 1), None, size - block)
        y = torch.cat((y, answers.unflatten(0, (-1, blocks))), 2)
    return y, _outer(ends[:, -1])


# -- torch -------------------------------------------------------------------------------------------------------------
#
# Here states are (..., S, C), so that the innermost loop of every operation runs over the many channels. On a CPU new
# memory costs more than the arithmetic on it, so the arrays of a tile are reused. torch's exp2 can be several times as
# fast as its exp.


def _inner(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.mT


def _outer(state: Tensor) -> Tensor:
    """Copy states (B, S, C) to (B, C, S). A view would keep alive all states stored beside it."""
    return state.mT.contiguous()


def _scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, reset: Tensor | None, block: int
) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` with state (B, S, C), and the states after every `block` elements: (B, N, S, C)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    state = x.new_zeros(len(x), *a.mT.shape, dtype=wide) if state is None else state
    with torch.autocast(x.device.type, enabled=False):
        y, ends = _SelectiveScan.apply(*(operand.to(wide) for operand in (x, dt, a, b, c, state)), reset, block)
    return y.to(x.dtype), ends


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor,
        reset: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        y, rates, pieces = torch.empty_like(x), _rates(a), _pieces(x.shape[1], block)
        borders = x.new_empty(len(x), len(pieces) + 1, *rates.shape)  # the states between the pieces
        borders[:, 0] = state
        tiles, room = _tiles(x, rates, pieces, 2)
        for rows in tiles:
            for index, piece in enumerate(pieces):
                at = rows, piece
                h, decay = _arrays(room, dt[at], rates)
                clear = None if reset is None else reset[at]
                _unroll(h, decay, x[at], dt[at], rates, b[at], borders[rows, index], clear)
                borders[rows, index + 1] = h[:, -1]
                y[at] = (c[at][:, :, None] @ h).squeeze(2)
        ctx.save_for_backward(x, dt, a, b, c, reset, borders)
        ctx.block = block
        every = len(_pieces(block, block))
        return y, borders[:, every::every]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_ends: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, reset, borders = ctx.saved_tensors
        rates, pieces = _rates(a), _pieces(x.shape[1], ctx.block)
        every = len(_pieces(ctx.block, ctx.block))
        grad_x, grad_dt, grad_b, grad_c = (torch.empty_like(operand) for operand in (x, dt, b, c))
        grad_a, grad_state = torch.zeros_like(rates), torch.zeros_like(borders[:, 0])
        a = a.mT.contiguous()
        tiles, room = _tiles(x, rates, pieces, 3)
        with torch.autocast(x.device.type, enabled=False):
            for rows in tiles:
                carried = grad_state[rows]  # becomes the gradient of the state before each piece, finally of the first
                for index, piece in reversed(list(enumerate(pieces))):
                    if (index + 1) % every == 0:
                        carried += grad_ends[rows, index // every]
                    at, start = (rows, piece), borders[rows, index]
                    x_, dt_, b_, grad_y_ = x[at], dt[at], b[at], grad_y[at]
                    h, decay, grad_h = _arrays(room, dt_, rates)
                    clear = None if reset is None else reset[at]
                    _unroll(h, decay, x_, dt_, rates, b_, start, clear)
                    # The gradient of each state: through its own output, and through the state after it.
                    torch.mul(grad_y_[:, :, None], c[at][..., None], out=grad_h)
                    grad_h[:, -1] += carried
                    decays, grads = decay.unbind(1), grad_h.unbind(1)
                    for t in range(len(grads) - 1, 0, -1):
                        grads[t - 1].addcmul_(decays[t], grads[t])
                    torch.mul(decays[0], grads[0], out=carried)

                    # Rows times matrices: as matrices times columns the same products take ten times as long.
                    grad_c[at] = (grad_y_[:, :, None] @ h.mT).squeeze(2)
                    grad_b[at] = ((dt_ * x_)[:, :, None] @ grad_h.mT).squeeze(2)
                    grad_input = (b_[:, :, None] @ grad_h).squeeze(2)  # of dt * x
                    grad_x[at] = grad_input * dt_
                    # The gradient of dt * a is that of the state times the remainder of the state before.
                    grad_exponent = grad_h.mul_(decay)
                    grad_exponent[:, 1:].mul_(h[:, :-1])
                    grad_exponent[:, 0].mul_(start)
                    grad_dt[at] = torch.addcmul(torch.mul(grad_exponent, a, out=h).sum(2), grad_input, x_)
                    grad_a += grad_exponent.mul_(dt_[:, :, None]).sum((0, 1))
        return grad_x, grad_dt, grad_a.mT, grad_b, grad_c, grad_state, None, None


def _rates(a: Tensor) -> Tensor:
    """Return a as exponents of 2: (S, C)."""
    return (a.mT * LOG2E).contiguous()


def _pieces(length: int, block: int) -> list[slice]:
    """Cut every block into pieces of at most `CHUNK` elements, as equal as possible."""
    count = -(-block // CHUNK)
    cuts = [first + block * n // count for first in range(0, length, block) for n in range(count)]
    return [slice(*ends) for ends in zip(cuts, [*cuts[1:], length], strict=True)]


def _tiles(x: Tensor, rates: Tensor, pieces: list[slice], arrays: int) -> tuple[list[slice], Tensor]:
    """Return the batch rows to work on together, and buffers for arrays of their states."""
    row = max(piece.stop - piece.start for piece in pieces) * rates.numel()
    count = min(len(x), max(1, CACHED * torch.get_num_threads() // row)) if x.device.type == "cpu" else len(x)
    return [slice(first, first + count) for first in range(0, len(x), count)], x.new_empty(arrays, count * row)


def _arrays(room: Tensor, dt: Tensor, rates: Tensor) -> tuple[Tensor, ...]:
    """Return in such a buffer one array of states for each element of a piece, each (B, T, S, C)."""
    shape = *dt.shape[:2], *rates.shape
    return room[:, : math.prod(shape)].view(-1, *shape).unbind(0)


def _unroll(
    h: Tensor,
    decay: Tensor,
    x: Tensor,
    dt: Tensor,
    rates: Tensor,
    b: Tensor,
    state: Tensor,
    reset: Tensor | None,
) -> None:
    """Fill h with the state after each element, and decay with the remaining share of the state before it."""
    dt_ = dt[:, :, None]
    if reset is None:
        torch.mul(dt_, rates, out=decay)
    else:
        clear = torch.zeros_like(dt[:, :, :1]).masked_fill_(reset[..., None], -math.inf)
        torch.addcmul(clear[..., None], dt_, rates, out=decay)
    decay.exp2_()
    torch.mul((dt * x)[:, :, None], b[..., None], out=h)
    for share, after in zip(decay.unbind(1), h.unbind(1), strict=True):
        state = after.addcmul_(share, state)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _read(operand, row, stride, lane, mask, count, CHUNK: tl.constexpr):
    """Load a vector of each of the next CHUNK rows, zeros from the `count`-th on; all loads start before any use."""
    values = ()  # type: tuple[Any, ...]
    for i in tl.static_range(CHUNK):
        inside = tl.where(i < count, mask, False)  # `&` with a scalar: not in Triton 3.9's interpreter
        values = values + (tl.load(operand + (row + i) * stride + lane, mask=inside, other=0.0).to(tl.float32),)
    return values


@jit
def _read_flags(operand, row, count, CHUNK: tl.constexpr):
    """Load one flag per row, as `_read`; 0 where there are none."""
    values = ()  # type: tuple[Any, ...]
    for i in tl.static_range(CHUNK):
        if operand is None:
            values = values + (0,)
        else:
            values = values + (tl.load(operand + row + i, mask=i < count, other=0),)
    return values


@jit
def _decay(dt, rate, reset):
    """Return the remaining share of the state before an element: (C, S)."""
    return tl.where(reset != 0, 0.0, tl.exp(dt[:, None] * rate))


@jit
def _forward(
    x,
    dt,
    a,
    b,
    c,
    start,
    reset,
    y,
    stored,
    x_row,
    dt_row,
    b_row,
    c_row,
    channels,
    width,
    blocks,
    size,
    offset,
    length,
    step,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """Scan a sequence and a tile of channels.

    The sequence is `length` elements, from the `offset`-th on, of each of `blocks` blocks of `size` rows. x_row and the
    like are strides of rows. `start` (rows, C, S) or None: sequence n starts with row (n + 1) step - 1. `stored`
    (sequences, P, C, S) receives the state after every piece of at most CHUNK elements.
    """
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    unit = tl.arange(0, S)
    inside, narrow = channel < channels, unit < width
    cell = channel[:, None].to(tl.int64) * width + unit[None, :]
    cells = inside[:, None] & narrow[None, :]
    rate = tl.load(a + cell, mask=cells, other=0.0).to(tl.float32)
    h = tl.zeros((C, S), tl.float32)
    if start is not None:
        h += tl.load(start + ((sequence + 1) * step - 1) * channels * width + cell, mask=cells, other=0.0)
    pieces = tl.cdiv(length, CHUNK)
    for piece in range(blocks * pieces):
        first = piece % pieces * CHUNK
        row = (sequence * blocks + piece // pieces) * size + offset + first
        count = length - first
        x_ = _read(x, row, x_row, channel, inside, count, CHUNK)
        dt_ = _read(dt, row, dt_row, channel, inside, count, CHUNK)
        b_ = _read(b, row, b_row, unit, narrow, count, CHUNK)
        c_ = _read(c, row, c_row, unit, narrow, count, CHUNK)
        reset_ = _read_flags(reset, row, count, CHUNK)
        for i in tl.static_range(CHUNK):
            h = _decay(dt_[i], rate, reset_[i]) * h + (dt_[i] * x_[i])[:, None] * b_[i][None, :]
            written = tl.where(i < count, inside, False)
            tl.store(y + (row + i) * channels + channel, tl.sum(h * c_[i][None, :], 1), mask=written)
        tl.store(stored + (sequence * blocks * pieces + piece) * channels * width + cell, h, mask=cells)


@jit
def _backward(
    x,
    dt,
    a,
    b,
    c,
    start,
    reset,
    stored,
    grad_y,
    grad_ends,
    grad_last,
    grad_x,
    grad_dt,
    grad_a,
    grad_b,
    grad_c,
    grad_start,
    x_row,
    dt_row,
    b_row,
    c_row,
    channels,
    width,
    blocks,
    size,
    offset,
    length,
    step,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """Scan as `_forward` from the last piece to the first, each of which runs again from the state before it.

    grad_ends (sequences, `blocks`, C, S) belongs to the states after the blocks, grad_last (sequences, C, S) to the
    state after the sequence; both may be None. Parts that are summed up afterwards: grad_a and grad_start (sequences,
    C, S), grad_b and grad_c (tiles of channels, rows, S).
    """
    sequence = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    unit = tl.arange(0, S)
    inside, narrow = channel < channels, unit < width
    cell = channel[:, None].to(tl.int64) * width + unit[None, :]
    cells = inside[:, None] & narrow[None, :]
    states = channels * width
    rows = tl.num_programs(0).to(tl.int64) * blocks * size
    rate = tl.load(a + cell, mask=cells, other=0.0).to(tl.float32)
    g = tl.zeros((C, S), tl.float32)  # the gradient of the state
    if grad_last is not None:
        g += tl.load(grad_last + sequence * states + cell, mask=cells, other=0.0)
    g_rate = tl.zeros((C, S), tl.float32)
    pieces = tl.cdiv(length, CHUNK)
    for back in range(blocks * pieces):
        piece = blocks * pieces - 1 - back
        block = sequence * blocks + piece // pieces
        first = piece % pieces * CHUNK
        row = block * size + offset + first
        count = length - first
        if grad_ends is not None:
            g += tl.load(
                grad_ends + block * states + cell, mask=tl.where(first + CHUNK >= length, cells, False), other=0.0
            )
        border = stored + (sequence * blocks * pieces + piece - 1) * states
        h = tl.load(border + cell, mask=tl.where(piece > 0, cells, False), other=0.0)
        if start is not None:
            border = start + ((sequence + 1) * step - 1) * states
            h += tl.load(border + cell, mask=tl.where(piece == 0, cells, False), other=0.0)
        x_ = _read(x, row, x_row, channel, inside, count, CHUNK)
        dt_ = _read(dt, row, dt_row, channel, inside, count, CHUNK)
        b_ = _read(b, row, b_row, unit, narrow, count, CHUNK)
        c_ = _read(c, row, c_row, unit, narrow, count, CHUNK)
        g_y = _read(grad_y, row, channels, channel, inside, count, CHUNK)
        reset_ = _read_flags(reset, row, count, CHUNK)
        before = ()  # type: tuple[Any, ...]
        for i in tl.static_range(CHUNK):
            before = before + (h,)
            h = _decay(dt_[i], rate, reset_[i]) * h + (dt_[i] * x_[i])[:, None] * b_[i][None, :]
        for i in tl.static_range(CHUNK - 1, -1, -1):
            left = _decay(dt_[i], rate, reset_[i])
            driven = dt_[i] * x_[i]
            h = left * before[i] + driven[:, None] * b_[i][None, :]
            g += g_y[i][:, None] * c_[i][None, :]
            out = (tile * rows + row + i) * width + unit
            written = tl.where(i < count, narrow, False)
            tl.store(grad_c + out, tl.sum(g_y[i][:, None] * h, 0), mask=written)
            tl.store(grad_b + out, tl.sum(driven[:, None] * g, 0), mask=written)
            g_driven = tl.sum(g * b_[i][None, :], 1)
            g *= left
            g_exponent = g * before[i]  # of dt * a
            g_rate += g_exponent * dt_[i][:, None]
            out = (row + i) * channels + channel
            written = tl.where(i < count, inside, False)
            tl.store(grad_x + out, g_driven * dt_[i], mask=written)
            tl.store(grad_dt + out, g_driven * x_[i] + tl.sum(g_exponent * rate, 1), mask=written)
    tl.store(grad_start + sequence * states + cell, g, mask=cells)
    tl.store(grad_a + sequence * states + cell, g_rate, mask=cells)


class _Launch(NamedTuple):
    """The elements of one launch: the first ones of all blocks, or the queries behind each of them."""

    sequences: int
    blocks: int  # of a sequence
    size: int  # rows of a block
    offset: int  # of its first element
    length: int  # elements of a block
    step: int  # between the rows of `start` that sequences start from
    tile: Tile

    @property
    def chunk(self) -> int:
        return min(self.tile["CHUNK"], self.length)

    @property
    def pieces(self) -> int:
        """Pieces of a block."""
        return -(-self.length // self.chunk)

    def run(self, kernel: Any, operands: list[Tensor], others: list[Tensor | None]) -> None:
        x, dt, a, b, c = operands
        channels, width = a.shape
        kernel[(self.sequences, -(-channels // self.tile["C"]))](
            *operands,
            *others,
            *(operand.stride(0) for operand in (x, dt, b, c)),
            channels,
            width,
            self.blocks,
            self.size,
            self.offset,
            self.length,
            self.step,
            **self.tile | {"CHUNK": self.chunk},
        )


def _launches(x: Tensor, block: int, tile: Tile) -> list[_Launch]:
    batch, blocks, size, _ = x.shape
    first = _Launch(batch, blocks, size, 0, block, 1, tile)
    # The queries of a block start from the last state stored for the block.
    queries = _Launch(batch * blocks, 1, size, block, size - block, first.pieces, tile)
    return [first, queries] if block < size else [first]


def _tile(x: Tensor, a: Tensor, block: int) -> Tile:
    """Return the elements of a piece, the channels of a program and the state components of each: powers of two."""
    channels, width = (triton.next_power_of_2(size) for size in a.shape)
    tiles: list[Tile] = []
    for chunk, most, cells in TILES:
        c = min(channels, most)
        tiles.append({"CHUNK": chunk, "C": c, "S": width, "num_warps": min(16, max(1, c * width // cells))})
    return choose("selective_scan", x.device, (*x.shape, width, block, x.dtype), tiles)


def _rows(operand: Tensor) -> Tensor:
    """Flatten (B, N, L, ...) to (B N L, ...), with a copy only where rows are not evenly spaced."""
    return (operand if operand.stride(-1) == 1 else operand.contiguous()).flatten(0, 2)


class _TritonScan(torch.autograd.Function):
    """`selective_scan_fork` in Triton, with reset (B, 1, L) where N is 1."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor | None,
        reset: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        operands = [_rows(x), _rows(dt), a.contiguous(), _rows(b), _rows(c)]
        start = None if state is None else state.contiguous()
        reset = None if reset is None else reset.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        stored: list[Tensor] = []
        ctx.tile = _tile(x, a, block)
        for launch in _launches(x, block, ctx.tile):
            states = a.new_empty(launch.sequences, launch.blocks * launch.pieces, *a.shape, dtype=torch.float32)
            launch.run(_forward, operands, [stored[0] if stored else start, reset, y, states])
            stored.append(states)
        ctx.save_for_backward(x, dt, a, b, c, start, reset, *stored)
        ctx.block = block
        last = stored[0][:, -1]
        return y, last if stored[0].shape[1] == 1 else last.clone()  # a view would keep all states alive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, start, reset, *stored = ctx.saved_tensors
        operands = [_rows(x), _rows(dt), a.contiguous(), _rows(b), _rows(c)]
        launches = _launches(x, ctx.block, ctx.tile)
        grad_y, grad_last = grad_y.contiguous(), grad_last.contiguous()
        grad_x, grad_dt = (torch.empty_like(operand, memory_format=torch.contiguous_format) for operand in (x, dt))
        tiles = -(-len(a) // ctx.tile["C"])
        room = partial(torch.empty, dtype=torch.float32, device=x.device)
        grad_b, grad_c = room(tiles, *b.shape), room(tiles, *c.shape)
        grad_a = room(sum(launch.sequences for launch in launches), *a.shape)
        parts = grad_a.split([launch.sequences for launch in launches])
        grad_ends = None
        for index, launch in reversed(list(enumerate(launches))):
            grad_start = room(launch.sequences, *a.shape)
            launch.run(
                _backward,
                operands,
                [
                    *(stored[0] if index else start, reset, stored[index]),
                    *(grad_y, grad_ends, None if index else grad_last),
                    *(grad_x, grad_dt, parts[index], grad_b, grad_c, grad_start),
                ],
            )
            grad_ends = grad_start  # queries pass their gradient to the state at their block's end
        return (
            grad_x,
            grad_dt,
            grad_a.sum(0).to(a.dtype),
            grad_b.sum(0).to(b.dtype),
            grad_c.sum(0).to(c.dtype),
            None if start is None else grad_start.to(start.dtype),
            None,
            None,
        )
