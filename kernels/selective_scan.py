"""The selective scan of Mamba (Gu and Dao 2023, arXiv 2312.00752): a state of S numbers per channel, each with a decay
of its own, driven by step sizes, input and output weights that depend on the data.

    h_t[c, s] = exp(dt_t[c] a[c, s]) h_{t-1}[c, s] + dt_t[c] b_t[s] x_t[c]        y_t[c] = sum_s c_t[s] h_t[c, s]

`reference` says what the operation means, one element at a time. `selective_scan` runs the same loop, but keeps only
every `CHUNK`-th state for the backward pass, which runs each chunk once more: no tensor (B, T, C, S) exists as a whole.
It can be differentiated once.

States and all that is computed are float32 (float64 for float64 operands) also under autocast.

Axes: B batch, T time, C channels, S numbers of a channel's state, N blocks, L elements of a block with what is asked
behind it. The letters a, b and c as in the paper; the skip connection (its D) is left to the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16  # elements: a short chunk stays in the processor's cache, a long one keeps fewer states


def reference(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, one element after the other. Arguments and results as in `selective_scan`."""
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
    """All elements at once.

    x, dt (B, T, C), dt at least 0; a (C, S), at most 0; b, c (B, T, S); state (B, C, S) or None for zeros; reset (B, T)
    bool, True clears the state before that element. Returns y (B, T, C) in the dtype of x, and the state after the last
    element.
    """
    y, states = _scan(x, dt, a, b, c, state, reset, CHUNK)
    return y, states[:, -1]


def selective_scan_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One element: x, dt (B, C); a (C, S); b, c (B, S); state (B, C, S); reset (B,) bool.

    Returns y (B, C) in the dtype of x, and the new state.
    """
    with torch.autocast(x.device.type, enabled=False):
        if reset is not None:
            state = state.masked_fill(reset[:, None, None], 0.0)
        dt, a, b, c = (operand.to(state.dtype) for operand in (dt, a, b, c))
        decay = (dt[..., None] * a).exp()
        state = torch.addcmul(decay * state, (dt * x)[..., None], b[:, None])
        return (state @ c[..., None]).squeeze(-1).to(x.dtype), state


def selective_scan_fork(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, block: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """N blocks whose first `block` elements enter the state and whose other elements do not.

    x, dt (B, N, L, C); a (C, S); b, c (B, N, L, S); state (B, C, S) or None for zeros; 1 <= block <= L. The elements
    from `block` on see everything up to their block's end and themselves, causally, and leave no trace. Returns y
    (B, N, L, C) in the dtype of x, and the state after the last block.
    """
    blocks, size = x.shape[1:3]
    x_, dt_, b_, c_ = (operand[:, :, :block].flatten(1, 2) for operand in (x, dt, b, c))
    y, states = _scan(x_, dt_, a, b_, c_, state, None, block)  # states (B, N, C, S), one at each block's end
    y = y.unflatten(1, (blocks, block))
    if block < size:
        x_, dt_, b_, c_ = (operand[:, :, block:].flatten(0, 1) for operand in (x, dt, b, c))
        asked, _ = selective_scan(x_, dt_, a, b_, c_, states.flatten(0, 1))
        y = torch.cat((y, asked.unflatten(0, (-1, blocks))), 2)
    return y, states[:, -1]


# -- the loop ----------------------------------------------------------------------------------------------------------


def _scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, reset: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """As `selective_scan`, with the states after every `chunk` elements and after the last: (B, N, C, S)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    state = x.new_zeros(len(x), *a.shape, dtype=wide) if state is None else state
    with torch.autocast(x.device.type, enabled=False):
        y, states = _Scan.apply(*(operand.to(wide) for operand in (x, dt, a, b, c, state)), reset, chunk)
    return y.to(x.dtype), states


class _Scan(torch.autograd.Function):
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
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        outputs, ends, start = [], [], state
        for part in _parts(x.shape[1], chunk):
            clear = None if reset is None else reset[:, part]
            _, states = _unroll(x[:, part], dt[:, part], a, b[:, part], start, clear)
            outputs.append((states @ c[:, part, :, None]).squeeze(-1))
            start = states[:, -1].clone()  # a view would keep the whole chunk
            ends.append(start)
        y, states = torch.cat(outputs, 1), torch.stack(ends, 1)
        ctx.save_for_backward(x, dt, a, b, c, state, reset, states)
        ctx.chunk = chunk
        return y, states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, state, reset, states = ctx.saved_tensors
        grad_x, grad_dt, grad_b, grad_c = (torch.empty_like(operand) for operand in (x, dt, b, c))
        grad_a, grad_start = torch.zeros_like(a), torch.zeros_like(state)
        with torch.autocast(x.device.type, enabled=False):
            for index, part in reversed(list(enumerate(_parts(x.shape[1], ctx.chunk)))):
                start = states[:, index - 1] if index else state
                x_, dt_, b_, c_, grad_y_ = x[:, part], dt[:, part], b[:, part], c[:, part], grad_y[:, part]
                clear = None if reset is None else reset[:, part]
                decay, h = _unroll(x_, dt_, a, b_, start, clear)
                # The gradient of each state: through its own output, and through the state after it.
                grad_h = grad_y_[..., None] * c_[:, :, None]
                grad_h[:, -1] += grad_start + grad_states[:, index]
                for t in range(x_.shape[1] - 1, 0, -1):
                    grad_h[:, t - 1].addcmul_(decay[:, t], grad_h[:, t])
                grad_start = decay[:, 0] * grad_h[:, 0]

                grad_c[:, part] = (grad_y_[:, :, None] @ h).squeeze(2)
                grad_b[:, part] = ((dt_ * x_)[:, :, None] @ grad_h).squeeze(2)
                grad_input = (grad_h @ b_[..., None]).squeeze(-1)  # of dt * x
                grad_x[:, part] = grad_input * dt_
                # The gradient of dt * a is that of the state times what the state before leaves in it.
                grad_exponent = grad_h.mul_(decay)
                grad_exponent[:, 1:] *= h[:, :-1]
                grad_exponent[:, 0] *= start
                grad_dt[:, part] = torch.addcmul((grad_exponent * a).sum(-1), grad_input, x_)
                grad_a += grad_exponent.mul_(dt_[..., None]).sum((0, 1))
        return grad_x, grad_dt, grad_a, grad_b, grad_c, grad_start, None, None


def _parts(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _unroll(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is left of the state before each element, and the state after it: (B, T, C, S) both."""
    decay = (dt[..., None] * a).exp_()
    if reset is not None:
        decay.masked_fill_(reset[:, :, None, None], 0.0)
    states = (dt * x)[..., None] * b[:, :, None]
    for t in range(x.shape[1]):
        states[:, t].addcmul_(decay[:, t], state)
        state = states[:, t]
    return decay, states
