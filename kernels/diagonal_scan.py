"""A linear recurrence with a complex diagonal that is constant over time, as in S5.

    x_t = a x_{t-1} + b_t         with x_{t-1} = 0 at a reset

`reference` is the definition, one element at a time. PyTorch cuts time into chunks and runs all chunks at once from 0.
The states between chunks follow the same recurrence, and powers of `a` carry them through their chunks. In Triton a
program processes one row, with a few components of the state in registers. The gradient is the same recurrence in
reverse; only the states are stored for it.

A complex number is a pair (real, imaginary) on a separate last axis. All arithmetic is float32 (float64 for float64
operands), also under autocast. `diagonal_scan` has first derivatives only.

Axes: B batch, T time, P state components, H channels, M components per channel, J chunks, C elements of a chunk.

Source: S5 (Smith et al. 2023, arXiv 2208.04933).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from wmcli.kernels.dispatch import jit, on_triton, tl, triton
from wmcli.kernels.s4 import _numbers, _powers

CHUNK = 16  # elements of a chunk in torch
TRITON_CHUNK = 8  # elements that a program loads at a time
LANES = 32  # state components per program


def reference(a: Tensor, b: Tensor, state: Tensor | None = None, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `diagonal_scan` by its definition, one element after the other."""
    x = torch.zeros_like(b[:, 0]) if state is None else state
    states = []
    for t in range(b.shape[1]):
        if reset is not None:
            x = x.masked_fill(reset[:, t, None, None], 0.0)
        re, im = a[:, 0] * x[..., 0] - a[:, 1] * x[..., 1], a[:, 0] * x[..., 1] + a[:, 1] * x[..., 0]
        x = torch.stack((re, im), -1) + b[:, t]
        states.append(x)
    return torch.stack(states, 1), x


def diagonal_scan(
    a: Tensor, b: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scan all elements at once.

    Args:
        a: (P, 2).
        b: (B, T, P, 2).
        state: (B, P, 2), or None for zeros.
        reset: (B, T) bool. True clears the state before that element.

    Returns:
        The states after each element (B, T, P, 2), and the last of them.
    """
    wide = torch.promote_types(b.dtype, torch.float32)
    if state is None:
        state = b.new_zeros(len(b), *b.shape[2:], dtype=wide)
    return _DiagonalScan.apply(*(each.to(wide).contiguous() for each in (a, b, state)), reset)


def diagonal_scan_step(a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None = None) -> Tensor:
    """Return the state after one element: a (P, 2); b, state (B, P, 2); reset (B,) bool."""
    if on_triton(state):
        return diagonal_scan(a, b[:, None], state, None if reset is None else reset[:, None])[1]
    with torch.autocast(b.device.type, enabled=False):
        if reset is not None:
            state = state.masked_fill(reset[:, None, None], 0.0)
        a, b, state = (torch.view_as_complex(each.to(state.dtype).contiguous()) for each in (a, b, state))
        return torch.view_as_real(torch.addcmul(b, a, state))


def vandermonde(a: Tensor, weights: Tensor, length: int) -> Tensor:
    """Return the kernel of diagonal systems, 2 Re sum_m weights_m a_m^l for l < length.

    For l = j C + c a power is a product of powers of a^C and of a. So one matrix product suffices, and no tensor (...,
    M, length) exists.

    Args:
        a: (..., M, 2). Powers are taken in its dtype.
        weights: (..., M, 2).
        length: Elements of the kernel.

    Returns:
        (..., length) in the dtype of `weights`.
    """
    size = 1 << math.isqrt(length - 1).bit_length()
    with torch.autocast(a.device.type, enabled=False):
        near, step = _powers(torch.view_as_complex(a), size)  # (..., C, M)
        far, _ = _powers(step, -(-length // size))  # (..., J, M)
        near, far = (each.to(weights.dtype.to_complex()) for each in (near, far))
        far = 2 * torch.view_as_complex(weights)[..., None, :] * far
        return (_numbers(far.conj()) @ _numbers(near).mT).flatten(-2)[..., :length]


class _DiagonalScan(torch.autograd.Function):
    """The scan of a (P, 2), b (B, T, P, 2) and state (B, P, 2), contiguous, of one dtype."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        if on_triton(b):
            states = torch.empty_like(b)
            _launch(_forward, b, a, b, state, _flags(reset), states)
        else:
            a_, b_, state_ = (torch.view_as_complex(each) for each in (a, b, state))
            states = torch.view_as_real(_scan(a_, b_, state_, reset))
        ctx.save_for_backward(a, states, state, reset)
        return states, states[:, -1].clone()  # a view would keep all of them alive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_states: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        a, states, state, reset = ctx.saved_tensors
        if on_triton(states):
            grad_b, grad_a, grad_state = (torch.empty_like(each) for each in (states, state, state))
            gradients = grad_states.contiguous(), grad_last.contiguous()
            _launch(_backward, states, a, states, state, _flags(reset), *gradients, grad_b, grad_a, grad_state)
            return grad_a.sum(0), grad_b, grad_state, None
        # The gradient of a product with a is one with its conjugate, where no reset stands between the two.
        back = grad_states.flip(1)
        back[:, 0] += grad_last
        clear = None if reset is None else F.pad(reset.flip(1)[:, :-1], (1, 0))
        a, back, states, state = (torch.view_as_complex(each) for each in (a, back, states, state))
        grad_b = _scan(a.conj().resolve_conj(), back, torch.zeros_like(state), clear).flip(1)
        before = torch.cat((state[:, None], states[:, :-1]), 1)
        grad_state = a.conj() * grad_b[:, 0]
        if reset is not None:
            before = before.masked_fill_(reset[..., None], 0.0)
            grad_state = grad_state.masked_fill(reset[:, :1], 0.0)
        grad_a = (grad_b * before.conj_physical_()).sum((0, 1))
        return *(torch.view_as_real(each.contiguous()) for each in (grad_a, grad_b, grad_state)), None


# -- torch -------------------------------------------------------------------------------------------------------------


def _scan(a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """Return the states (B, T, P) from complex a (P,), b (B, T, P), state (B, P); a may have a wider dtype."""
    batch, time, _ = b.shape
    if time <= CHUNK:
        return _unroll(a, b, state, reset)
    count = -(-time // CHUNK)
    size = -(-time // count)
    padding = count * size - time
    rows = (F.pad(b, (0, 0, 0, padding)) if padding else b).view(-1, size, b.shape[2])  # (B J, C, P)
    clear = fresh = None
    if reset is not None:
        clear = F.pad(reset, (0, padding)).view(-1, size)
        fresh = (clear.cumsum(1) > 0).view(batch, count, size, 1)  # a reset stands before the element, or at it
    states = _unroll(a, rows, torch.zeros_like(rows[:, 0]), clear).view(batch, count, size, -1)
    # In float64: over a long distance rounding errors would multiply.
    powers = torch.cumprod(a.to(torch.complex128).expand(size, -1), 0)
    ends = _scan(powers[-1], states[:, :, -1], state, None if fresh is None else fresh[:, :, -1, 0])
    before, powers = torch.cat((state[:, None], ends[:, :-1]), 1)[:, :, None], powers.to(b.dtype)
    if fresh is None:
        states.addcmul_(powers, before)
    else:
        states += (powers * before).masked_fill_(fresh, 0.0)
    return states.flatten(1, 2)[:, :time].contiguous()


def _unroll(a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """Compute `_scan` one element after the other."""
    a, states = a.to(b.dtype), torch.empty_like(b)
    for t, (own, after) in enumerate(zip(b.unbind(1), states.unbind(1), strict=True)):
        if reset is not None:
            state = state.masked_fill(reset[:, t, None], 0.0)
        state = torch.addcmul(own, a, state, out=after)
    return states


# -- Triton ------------------------------------------------------------------------------------------------------------


def _flags(reset: Tensor | None) -> Tensor | None:
    return None if reset is None else reset.contiguous().view(torch.uint8)


def _launch(kernel: Any, b: Tensor, *operands: Tensor | None) -> None:
    """Start a program for each row and each tile of the components of b (B, T, P, 2)."""
    rows, length, width, _ = b.shape
    lanes = min(LANES, triton.next_power_of_2(width))
    chunk = min(TRITON_CHUNK, length)
    kernel[(rows, triton.cdiv(width, lanes))](*operands, length, width, CHUNK=chunk, LANES=lanes, num_warps=1)


@jit
def _read(operand, place, first, count, stride, mask, CHUNK: tl.constexpr):
    """Load the elements first ... first + CHUNK - 1 at `place`, with zeros outside 0 ... count - 1."""
    values = ()  # type: tuple[Any, ...]
    for i in tl.static_range(CHUNK):
        t = first + i
        inside = tl.where((t >= 0) & (t < count), mask, False)
        values = values + (tl.load(operand + place + t * stride, mask=inside, other=0.0),)
    return values


@jit
def _read_flags(reset, first, count, CHUNK: tl.constexpr):
    """Load one flag per element, as `_read`; 0 outside."""
    values = ()  # type: tuple[Any, ...]
    for i in tl.static_range(CHUNK):
        if reset is None:
            values = values + (0,)
        else:
            values = values + (tl.load(reset + first + i, mask=first + i < count, other=0),)
    return values


@jit
def _forward(a, b, start, reset, states, length, width, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Scan a row and a tile of its state, chunk by chunk; a whole chunk is loaded before any of it is used."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < width
    a_re, a_im = tl.load(a + 2 * lane, mask=inside, other=0.0), tl.load(a + 2 * lane + 1, mask=inside, other=0.0)
    x_re = tl.load(start + 2 * (row * width + lane), mask=inside, other=0.0)
    x_im = tl.load(start + 2 * (row * width + lane) + 1, mask=inside, other=0.0)
    place, stride = 2 * (row * length * width + lane), 2 * tl.cast(width, tl.int64)
    if reset is not None:
        reset += row * length
    for first in range(0, length, CHUNK):
        b_re = _read(b, place, first, length, stride, inside, CHUNK)
        b_im = _read(b, place + 1, first, length, stride, inside, CHUNK)
        clear = _read_flags(reset, first, length, CHUNK)
        for i in tl.static_range(CHUNK):
            # Chosen, not multiplied: 0 * inf would be NaN.
            x_re, x_im = tl.where(clear[i] != 0, 0.0, x_re), tl.where(clear[i] != 0, 0.0, x_im)
            x_re, x_im = a_re * x_re - a_im * x_im + b_re[i], a_re * x_im + a_im * x_re + b_im[i]
            written = tl.where(first + i < length, inside, False)
            tl.store(states + place + (first + i) * stride, x_re, mask=written)
            tl.store(states + place + (first + i) * stride + 1, x_im, mask=written)


@jit
def _backward(
    a, states, start, reset, grad_states, grad_last, grad_b, grad_a, grad_start, length, width,
    CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scan as `_forward` from the last chunk to the first. The parts grad_a (B, P, 2) are summed up afterwards."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < width
    a_re, a_im = tl.load(a + 2 * lane, mask=inside, other=0.0), tl.load(a + 2 * lane + 1, mask=inside, other=0.0)
    border = 2 * (row * width + lane)
    start_re = tl.load(start + border, mask=inside, other=0.0)
    start_im = tl.load(start + border + 1, mask=inside, other=0.0)
    # The part of the state's gradient that comes from later elements.
    g_re = tl.load(grad_last + border, mask=inside, other=0.0)
    g_im = tl.load(grad_last + border + 1, mask=inside, other=0.0)
    of_a_re, of_a_im = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    place, stride = 2 * (row * length * width + lane), 2 * tl.cast(width, tl.int64)
    if reset is not None:
        reset += row * length
    chunks = tl.cdiv(length, CHUNK)
    for back in range(chunks):
        first = (chunks - 1 - back) * CHUNK
        own_re = _read(grad_states, place, first, length, stride, inside, CHUNK)
        own_im = _read(grad_states, place + 1, first, length, stride, inside, CHUNK)
        before_re = _read(states, place, first - 1, length, stride, inside, CHUNK)
        before_im = _read(states, place + 1, first - 1, length, stride, inside, CHUNK)
        clear = _read_flags(reset, first, length, CHUNK)
        for i in tl.static_range(CHUNK - 1, -1, -1):
            there = first + i < length
            x_re = tl.where(first + i == 0, start_re, before_re[i])
            x_im = tl.where(first + i == 0, start_im, before_im[i])
            passes = there & (clear[i] == 0)
            own = tl.where(there, inside, False)
            all_re, all_im = g_re + own_re[i], g_im + own_im[i]
            tl.store(grad_b + place + (first + i) * stride, all_re, mask=own)
            tl.store(grad_b + place + (first + i) * stride + 1, all_im, mask=own)
            of_a_re += tl.where(passes, all_re * x_re + all_im * x_im, 0.0)
            of_a_im += tl.where(passes, all_im * x_re - all_re * x_im, 0.0)
            # The gradient is 0 after the end and does not pass a reset.
            g_re = tl.where(there, tl.where(passes, a_re * all_re + a_im * all_im, 0.0), g_re)
            g_im = tl.where(there, tl.where(passes, a_re * all_im - a_im * all_re, 0.0), g_im)
    tl.store(grad_start + border, g_re, mask=inside)
    tl.store(grad_start + border + 1, g_im, mask=inside)
    tl.store(grad_a + border, of_a_re, mask=inside)
    tl.store(grad_a + border + 1, of_a_im, mask=inside)
