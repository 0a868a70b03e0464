"""A linear recurrence over matrices whose state decays by one scalar per head and element.

    S_n = exp(log_decay_n) S_{n-1} + k_n^T v_n        y_n = q_n S_n

With a constant decay this is retention, without its normalizers. With a decay that depends on the data it is the
state-space duality of Mamba-2. `reference` is the definition, one element at a time.

The other functions compute in chunks: inside a chunk as masked attention, between chunks through the states. PyTorch
computes the states of all chunks at once, as a product with a decay matrix. Triton computes the states one after the
other in one launch and all chunks in parallel in a second one. A single chunk takes one launch. All value heads may
share one head of queries and keys (Mamba-2's single group). Then q k^T is computed once.

Inside a chunk operands are not converted. Decays, states and their sums are float32 (float64 for float64 operands),
also under autocast. The Triton form has first derivatives only.

Axes: B batch, H heads, G heads of queries and keys (H, or 1 shared by all), T time, N chunks or blocks, C elements of a
chunk, K key width, V value width.

Source: RetNet (Sun et al. 2023, arXiv 2307.08621), Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wmcli.kernels.dispatch import INTERPRETED, jit, on_triton, tl, triton
from wmcli.kernels.tiles import Tile, choose

NUMBERS = 1 << 19  # state numbers that a step updates and reads at a time, while they are in the processor's cache


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `linear_recurrence` by its definition, one element after the other."""
    if log_decay.dim() == 1:
        log_decay = log_decay[:, None].expand(v.shape[:3])
    state = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(q.shape[2]):
        if reset is not None:
            state = state.masked_fill(reset[:, t, None, None, None], 0.0)
        state = log_decay[:, :, t, None, None].exp() * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, 2), state


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run over all elements at once.

    Args:
        q: (B, G, T, K).
        k: (B, G, T, K).
        v: (B, H, T, V).
        log_decay: (H,) or (B, H, T), at most 0.
        state: (B, H, K, V), or None for zeros.
        reset: (B, T) bool. True clears the state before that element.
        chunk: Elements of a chunk, None for a single chunk. It changes the cost, not the results.

    Returns:
        y (B, H, T, V) in the dtype of v, and the state after the last element.
    """
    length = q.shape[2]
    if on_triton(q, k, v, log_decay):
        size = min(chunk or length, length)
        return _recurrence(q, k, v, log_decay, state, reset, size, size)
    size = -(-length // -(-length // chunk)) if chunk else length  # equal chunks, not full ones and a short rest
    whole = length - length % size
    outputs = []
    for start, stop in ((0, whole), (whole, length)):
        if start == stop:
            continue
        q_, k_, v_ = (x[:, :, start:stop].unflatten(2, (-1, min(size, stop - start))) for x in (q, k, v))
        shape = q_.shape[2:4]
        decay = log_decay if log_decay.dim() == 1 else log_decay[:, :, start:stop].unflatten(2, shape)
        clear = None if reset is None else reset[:, None, start:stop].unflatten(2, shape)
        y, state = _blocks(q_, k_, v_, decay, shape[1], state, clear)
        outputs.append(y.flatten(2, 3))
    assert state is not None
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), state


def linear_recurrence_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run over one element.

    Args:
        q: (B, G, K).
        k: (B, G, K).
        v: (B, H, V).
        log_decay: (H,) or (B, H).
        state: (B, H, K, V).
        reset: (B,) bool. True clears the state before the element.

    Returns:
        y (B, H, V) in the dtype of v, and the new state.
    """
    if on_triton(q, k, v, log_decay, state):
        decay = log_decay if log_decay.dim() == 1 else log_decay[..., None]
        clear = None if reset is None else reset[:, None]
        q, k, v = (x[:, :, None] for x in (q, k, v))
        y, state = _recurrence(q, k, v, decay, state, clear, 1, 1)
        return y[:, :, 0], state
    with torch.autocast(q.device.type, enabled=False):
        decay = log_decay.to(state.dtype).exp()
        if reset is not None:
            decay = decay.masked_fill(reset[:, None], 0.0)
        decay = decay.expand(v.shape[:2])[..., None, None]
        # (B, G, 1, K), (B, G, K, 1), (B, H, 1, V)
        q, k, values = q.to(state.dtype)[..., None, :], k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :]
        if torch.is_grad_enabled() or state.device.type != "cpu":
            state = (decay * state).addcmul_(k, values)
            y = q @ state
        else:
            before, state, y = state, torch.empty_like(state), torch.empty_like(values)
            rows = max(1, NUMBERS // state[0].numel())
            parts = zip(*(x.split(rows) for x in (q, k, values, decay, before, state, y)), strict=True)
            for q_, k_, v_, decay_, before_, state_, y_ in parts:
                torch.mul(decay_, before_, out=state_).addcmul_(k_, v_)
                torch.matmul(q_, state_, out=y_)
        return y.squeeze(-2).to(v.dtype), state


def linear_recurrence_fork(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, block: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run over N blocks of which only the first `block` elements enter the state.

    The other elements (queries) depend on everything up to the end of their block's first part, and on one another
    causally. They do not enter the state.

    Args:
        q: (B, G, N, C, K).
        k: (B, G, N, C, K).
        v: (B, H, N, C, V).
        log_decay: (H,) or (B, H, N, C).
        block: Elements that enter the state, 1 <= block <= C.
        state: (B, H, K, V), or None for zeros.

    Returns:
        y (B, H, N, C, V) in the dtype of v, and the state after the last block.
    """
    if on_triton(q, k, v, log_decay):
        blocks, size = q.shape[2:4]
        decay = log_decay if log_decay.dim() == 1 else log_decay.flatten(2)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        y, state = _recurrence(q, k, v, decay, state, None, size, block)
        return y.unflatten(2, (blocks, size)), state
    return _blocks(q, k, v, log_decay, block, state, None)


# -- the chunked form in torch -----------------------------------------------------------------------------------------


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, block: int, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `linear_recurrence_fork` with reset (B, 1, N, C), which is allowed only where block == C."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        log_decay = log_decay.to(wide)
        # The log decay from before the block's first element through each element: (1, H, 1, C) or (B, H, N, C). A
        # constant is multiplied, not summed up, so that its rounding does not grow with the length.
        if log_decay.dim() == 1:
            cumulative = log_decay[None, :, None, None] * torch.arange(1, q.shape[3] + 1, device=q.device, dtype=wide)
        else:
            cumulative = log_decay.cumsum(-1)
        segment = None if reset is None else reset.long().cumsum(-1)  # (B, 1, N, C): resets so far inside the block
        before, after = _states(
            k[..., :block, :].to(wide), v[..., :block, :].to(wide), cumulative[..., :block], segment, state
        )
        # One constant matrix for all rows is rounded like the scores; others would only be converted one by one.
        decay = _decay_matrix(cumulative, segment)
        scores = (q @ k.mT) * (decay.to(q.dtype) if decay.shape[0] == decay.shape[2] == 1 else decay)
        y = scores.to(v.dtype) @ v
        if before is not None:
            reach = cumulative.exp()
            if segment is not None:
                reach = reach.masked_fill(segment > 0, 0.0)
            y = torch.addcmul(y, (q @ before.to(q.dtype)).to(y.dtype), reach[..., None].to(y.dtype))
        return y, after


def _states(
    k: Tensor, v: Tensor, cumulative: Tensor, segment: Tensor | None, state: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the states before each block (B, H, N, K, V) and the last one.

    The former is None for a single block without a state before it.
    """
    total = cumulative[..., -1:]
    weight = (total - cumulative).exp()
    if segment is not None:
        weight = weight.masked_fill(segment != segment[..., -1:], 0.0)
    added = (k * weight[..., None]).mT @ v  # (B, H, N, K, V): each block's contribution to the state
    count = added.shape[2]
    if state is None and count == 1:
        return None, added[:, :, 0]
    state = torch.zeros_like(added[:, :, 0]) if state is None else state.to(added.dtype)
    if count == 1:
        remainder = total.exp() if segment is None else total.exp().masked_fill(segment[..., -1:] > 0, 0.0)
        return state[:, :, None], torch.addcmul(added[:, :, 0], remainder[:, :, 0, :, None], state)
    # The states at the N + 1 borders are one decay matrix times (incoming state, added_1, ..., added_N).
    total = total.squeeze(-1).expand(-1, -1, count)
    border = torch.nn.functional.pad(total.cumsum(-1), (1, 0))  # (1 or B, H, N + 1)
    epoch = None
    if segment is not None:
        epoch = torch.nn.functional.pad((segment[..., -1] > 0).long().cumsum(-1), (1, 0))  # (B, 1, N + 1)
    sources = torch.cat((state[:, :, None], added), 2)
    borders = (_decay_matrix(border, epoch) @ sources.flatten(3)).view_as(sources)
    return borders[:, :, :-1], borders[:, :, -1]


def _decay_matrix(cumulative: Tensor, segment: Tensor | None) -> Tensor:
    """Return (..., C, C) from (..., C): exp(cumulative_i - cumulative_j) for j <= i in the same segment, else 0."""
    size = cumulative.shape[-1]
    visible = torch.ones(size, size, dtype=torch.bool, device=cumulative.device).tril()
    if segment is not None:
        visible = visible & (segment[..., :, None] == segment[..., None, :])
    # Masked before the exponential: above the diagonal it could overflow, and 0 * inf is NaN in the gradient.
    return (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(~visible, float("-inf")).exp()


# -- Triton ------------------------------------------------------------------------------------------------------------
#
# Time is one axis here: chunk n holds the elements n C ... n C + C - 1, of which the first `block` enter the state, and
# is computed in tiles of BLOCK_T. Widths are cut into tiles, too, so that no program grows with them. Kernels write
# (B, T, H, width), and states as (B, H, ..., K, V).


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    reset: Tensor | None,
    size: int,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Compute `linear_recurrence` in chunks of `size` elements, of which the first `block` enter the state."""
    assert q.shape[1] in (1, v.shape[1]) and (reset is None or block == size)
    if state is not None:
        state = state.float().contiguous()
    if reset is not None:
        reset = reset.contiguous().view(torch.uint8)
    return _Recurrence.apply(q, k, v, log_decay, state, reset, size, block)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        state: Tensor | None,
        reset: Tensor | None,
        size: int,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if q.stride() != k.stride():
            q, k = q.contiguous(), k.contiguous()
        batch, heads, length, value_width = v.shape
        key_width, count = q.shape[3], -(-length // size)
        y = v.new_empty(batch, length, heads, value_width)
        after = v.new_empty(batch, heads, key_width, value_width, dtype=torch.float32)
        strides, widths = _strides(q, v, log_decay), _widths(q, v)
        across = triton.cdiv(value_width, widths["BLOCK_V"])
        before = state
        if length == 1 and state is not None:
            _step_kernel[(batch * heads * across,)](
                q, k, v, log_decay, reset, state, y, after, *strides, heads, **widths, num_warps=4
            )
        else:
            products = _products(q, k, v)
            tile = choose("linear_recurrence", q.device, _shape(q, v, size), _forward_tiles(q, k, v, size))
            scans = triton.cdiv(key_width, widths["BLOCK_K"]) * across
            outputs = count * triton.cdiv(size, tile["BLOCK_T"]) * across
            launches = [(0, scans + outputs)]
            if count > 1:
                before = after.new_empty(batch, heads, count, key_width, value_width)
                launches = [(0, scans), (scans, outputs)]
            for first, parts in launches:
                _forward_kernel[(batch * heads * parts,)](
                    q, k, v, log_decay, reset, state, before, y, after, *strides,
                    heads, length, count, size, block, first, parts, **widths, **products, **tile, MANY=count > 1,
                )  # fmt: skip
        ctx.save_for_backward(q, k, v, log_decay, reset, before)
        ctx.size, ctx.block = size, block
        ctx.set_materialize_grads(False)
        return y.transpose(1, 2), after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_after: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, reset, before = ctx.saved_tensors
        size, block = ctx.size, ctx.block
        batch, heads, length, value_width = v.shape
        key_width, count = q.shape[3], -(-length // size)
        needs_q = grad_y is not None
        if grad_y is None:
            grad_y = torch.zeros_like(v)
        grad_y = grad_y.transpose(1, 2).contiguous()
        if grad_after is not None:
            grad_after = grad_after.contiguous()
        shared = q.shape[1] < heads  # each head's gradient of the queries and keys by itself, then their sum
        grad_q, grad_k = (
            x.new_empty(batch, length, heads, key_width, dtype=torch.float32 if shared else None) for x in (q, k)
        )
        grad_v = v.new_empty(batch, length, heads, value_width)
        widths, products = _widths(q, v), _products(q, k, v)
        shape = _shape(q, v, size)
        tile = choose("linear_recurrence, backward", q.device, shape, _backward_tiles(q, k, v, size))
        down, across = triton.cdiv(key_width, widths["BLOCK_K"]), triton.cdiv(value_width, widths["BLOCK_V"])
        wide = max(down, across)
        grad_state = grad_decay = sums = None
        if ctx.needs_input_grad[4]:
            grad_state = v.new_empty(batch, heads, key_width, value_width, dtype=torch.float32)
        if ctx.needs_input_grad[3]:
            sums = v.new_empty(batch * heads, wide, 2, length, dtype=torch.float32)
        scans, inner = down * across, count * triton.cdiv(size, tile["BLOCK_T"]) * wide
        if count > 1:  # the gradient of the state after each chunk
            grad_states = v.new_empty(batch, heads, count, key_width, value_width, dtype=torch.float32)
            launches = [(0, scans), (scans, inner)]
        else:
            grad_states = grad_after
            launches = [(scans, inner)] if grad_state is None else [(0, scans + inner)]
        for first, parts in launches:
            _backward_kernel[(batch * heads * parts,)](
                q, k, v, log_decay, reset, before, grad_y, grad_after, grad_states,
                grad_q, grad_k, grad_v, grad_state, sums, *_strides(q, v, log_decay),
                heads, length, count, size, block, first, parts, **widths, **products, **tile,
                MANY=count > 1, WIDE=wide,
            )  # fmt: skip
        if sums is not None:
            grad_decay = v.new_empty(batch, heads, length, dtype=torch.float32)
            _decay_kernel[(batch * heads * count,)](
                sums, grad_decay, length, count, size, block,
                WIDE=wide, BLOCK=triton.next_power_of_2(size), num_warps=4,
            )  # fmt: skip
            if log_decay.dim() == 1:
                grad_decay = grad_decay.sum((0, 2))
            grad_decay = grad_decay.to(log_decay.dtype)
        if shared:
            grad_q, grad_k = grad_q.sum(2, keepdim=True).to(q.dtype), grad_k.sum(2, keepdim=True).to(k.dtype)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in (grad_q, grad_k, grad_v))
        return grad_q if needs_q else None, grad_k, grad_v, grad_decay, grad_state, None, None, None


def _strides(q: Tensor, v: Tensor, log_decay: Tensor) -> tuple[int, ...]:
    """Return strides of queries and keys, of values and of decays: by row, head and element."""
    q_b, q_h, q_t, _ = q.stride()
    decay = (0, log_decay.stride(0), 0) if log_decay.dim() == 1 else log_decay.stride()
    return q_b, q_h if q.shape[1] == v.shape[1] else 0, q_t, *v.stride()[:3], *decay


def _widths(q: Tensor, v: Tensor) -> dict[str, int]:
    """Return the widths of keys and values, and of their tiles."""
    k_width, v_width = q.shape[3], v.shape[3]
    block_k, block_v = (min(64, max(16, triton.next_power_of_2(width))) for width in (k_width, v_width))
    return {"K": k_width, "V": v_width, "BLOCK_K": block_k, "BLOCK_V": block_v}


def _products(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return the operands' dtype in products, and the precision of float32 products."""
    low = _low(q, k, v)
    return {
        "DOT": tl.bfloat16 if low and not INTERPRETED else tl.float32,
        "PRECISION": "tf32" if low else "tf32x3",  # tf32 has more digits than bfloat16, tf32x3 nearly those of float32
    }


def _low(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 for x in (q, k, v))


def _shape(q: Tensor, v: Tensor, size: int) -> tuple[object, ...]:
    """Return what the time of a launch depends on."""
    return *v.shape, q.shape[1], q.shape[3], size, q.dtype


def _forward_tiles(q: Tensor, k: Tensor, v: Tensor, size: int) -> list[Tile]:
    """Return tiles of elements of a chunk, the default first."""
    if size <= 16:
        return [_tile_of(16, 4)]
    # In float32 larger ones would not fit the registers. 64 pad some chunks more than 32 do.
    larger = _low(q, k, v) and not 1 <= size % 64 <= 32
    return [_tile_of(32, 4), *([_tile_of(64, 4), _tile_of(64, 8)] if larger else [])]


def _backward_tiles(q: Tensor, k: Tensor, v: Tensor, size: int) -> list[Tile]:
    """Return tiles of elements of a chunk, the default first."""
    if size <= 16:
        return [_tile_of(16, 4)]
    if not _low(q, k, v):
        return [_tile_of(16, 8)]
    # More stages take half again as many registers at REM's widths, so that half as many programs run at a time.
    return [_tile_of(32, 8, stages=1), _tile_of(32, 8), _tile_of(16, 4)]


def _tile_of(rows: int, warps: int, stages: int = 2) -> Tile:
    return {"BLOCK_T": rows, "num_warps": warps, "num_stages": stages}


@jit
def _tile(x, stride, at, valid, column, WIDTH: tl.constexpr):
    """Load the elements `at` of x and some of their columns, with zeros elsewhere."""
    mask = valid[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + at[:, None].to(tl.int64) * stride + column[None, :], mask=mask, other=0.0)


@jit
def _product(
    x, x_t, row, y, y_t, column, end,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply the elements `row` of x with the elements `column` of y, all before `end`: (rows, columns)."""
    panel: tl.constexpr = 32 if BLOCK > 32 else BLOCK  # wider ones fill the registers
    products = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for start in range(0, WIDTH, panel):
        width = start + tl.arange(0, panel)
        rows = _tile(x, x_t, row, row < end, width, WIDTH).to(DOT)
        columns = _tile(y, y_t, column, column < end, width, WIDTH).to(DOT)
        products = tl.dot(rows, tl.trans(columns), products, input_precision=PRECISION)
    return products


@jit
def _passed(log_decay, d_t, reset, at, valid):
    """Return log decays and resets since the beginning of a tile: through each element, and of the whole tile."""
    place = at.to(tl.int64)
    decay = tl.load(log_decay + place * d_t, mask=valid, other=0.0).to(tl.float32)
    if reset is None:
        resets = tl.zeros_like(at)
    else:
        resets = tl.load(reset + place, mask=valid, other=0).to(tl.int32)
    return tl.cumsum(decay), tl.sum(decay), tl.cumsum(resets), tl.sum(resets)


@jit
def _left(decay, column_decay, resets, column_resets, row, column, reset):
    """Return the share of each column's element that remains at each row's: (rows, columns), 0 above the diagonal."""
    visible = row[:, None] >= column[None, :]
    if reset is not None:
        visible = visible & (resets[:, None] == column_resets[None, :])
    return tl.exp(tl.where(visible, decay[:, None] - column_decay[None, :], float("-inf")))


@jit
def _step_kernel(
    q, k, v, log_decay, reset, state, y, after, q_b, q_h, q_t, v_b, v_h, v_t, d_b, d_h, d_t, heads,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the only element of one head; the state is read once and written once."""
    across: tl.constexpr = tl.cdiv(V, BLOCK_V)
    row, part = (tl.program_id(0) // across).to(tl.int64), tl.program_id(0) % across
    b, h = row // heads, row % heads
    keep = tl.exp(tl.load(log_decay + b * d_b + h * d_h).to(tl.float32))
    if reset is not None:
        keep = tl.where(tl.load(reset + b) == 0, keep, 0.0)
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    values = tl.load(v + b * v_b + h * v_h + value, mask=value < V, other=0.0).to(tl.float32)
    out = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        queries = tl.load(q + b * q_b + h * q_h + key, mask=key < K, other=0.0).to(tl.float32)
        keys = tl.load(k + b * q_b + h * q_h + key, mask=key < K, other=0.0).to(tl.float32)
        inside = (key < K)[:, None] & (value < V)[None, :]
        place = row * K * V + key[:, None] * V + value[None, :]
        now = keep * tl.load(state + place, mask=inside, other=0.0) + keys[:, None] * values[None, :]
        tl.store(after + place, now, mask=inside)
        out += tl.sum(queries[:, None] * now, 0)
    tl.store(y + row * V + value, out.to(y.dtype.element_ty), mask=value < V)


@jit
def _forward_kernel(
    q, k, v, log_decay, reset, state, before, y, after, q_b, q_h, q_t, v_b, v_h, v_t, d_b, d_h, d_t,
    heads, length, count, size, block, first, parts,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Compute `parts` parts of each row's head, from `first` on: tiles of the state, then those of the output."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), first + tl.program_id(0) % parts
    b, h = row // heads, row % heads
    q, k = q + b * q_b + h * q_h, k + b * q_b + h * q_h
    v, log_decay = v + b * v_b + h * v_h, log_decay + b * d_b + h * d_h
    y += (b * length * heads + h) * V
    if reset is not None:
        reset += b * length
    across: tl.constexpr = tl.cdiv(V, BLOCK_V)
    scans: tl.constexpr = tl.cdiv(K, BLOCK_K) * across
    value = part % across * BLOCK_V + tl.arange(0, BLOCK_V)
    if part < scans:
        key = part // across * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (key < K)[:, None] & (value < V)[None, :]
        place = row * K * V + key[:, None] * V + value[None, :]
        if state is None:
            now = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        else:
            now = tl.load(state + place, mask=inside, other=0.0)
        tiles = tl.cdiv(block, BLOCK_T)
        for step in range(count * tiles):
            chunk, tile = step // tiles, step % tiles
            if MANY:  # decided while compiling, unlike the next  # noqa: SIM102
                if tile == 0:
                    border = (row * count + chunk) * K * V + key[:, None] * V + value[None, :]
                    tl.store(before + border, now, mask=inside)
            offset = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            at = chunk * size + offset
            valid = (offset < block) & (at < length)
            decay, total, resets, cleared = _passed(log_decay, d_t, reset, at, valid)
            weight, keep = tl.exp(total - decay), tl.exp(total)
            if reset is not None:
                weight = tl.where(resets == cleared, weight, 0.0)
                keep = tl.where(cleared == 0, keep, 0.0)
            keys = _tile(k, q_t, at, valid, key, K).to(tl.float32) * weight[:, None]
            values = _tile(v, v_t, at, valid, value, V).to(tl.float32)
            now = tl.dot(tl.trans(keys), values, keep * now, input_precision=PRECISION)
        tl.store(after + place, now, mask=inside)
    else:
        part -= scans
        tiles = tl.cdiv(size, BLOCK_T)
        chunk, tile = part // (tiles * across), part // across % tiles
        end = tl.minimum(chunk * size + size, length)
        at = chunk * size + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        valid = at < end
        decay, _, resets, _ = _passed(log_decay, d_t, reset, at, valid)
        out = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for back in range(tile + 1):  # from the tile itself to the chunk's first
            source = at - back * BLOCK_T
            decay_, total, resets_, cleared = _passed(log_decay, d_t, reset, source, source < end)
            if back > 0:
                decay += total
                resets += cleared
            scores = _product(q, q_t, at, k, q_t, source, end, K, BLOCK_K, BLOCK_T, DOT, PRECISION)
            scores *= _left(decay, decay_, resets, resets_, at, source, reset)
            values = _tile(v, v_t, source, source < end, value, V)
            out = tl.dot(scores.to(DOT), values.to(DOT), out, input_precision=PRECISION)
        if before is not None:
            reach = tl.exp(decay)
            if reset is not None:
                reach = tl.where(resets == 0, reach, 0.0)
            border = (row * count + chunk) * K * V
            for first_key in range(0, K, BLOCK_K):
                key = first_key + tl.arange(0, BLOCK_K)
                states = _tile(before + border, V, key, key < K, value, V)
                queries = _tile(q, q_t, at, valid, key, K).to(tl.float32) * reach[:, None]
                out = tl.dot(queries, states, out, input_precision=PRECISION)
        mask = valid[:, None] & (value < V)[None, :]
        element = at[:, None].to(tl.int64) * heads * V
        tl.store(y + element + value[None, :], out.to(y.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    q, k, v, log_decay, reset, before, grad_y, grad_after, grad_states, grad_q, grad_k, grad_v, grad_state, sums,
    q_b, q_h, q_t, v_b, v_h, v_t, d_b, d_h, d_t, heads, length, count, size, block, first, parts,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, MANY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute as `_forward_kernel`: first the tiles of the state's gradient, then the gradients of the elements."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), first + tl.program_id(0) % parts
    b, h = row // heads, row % heads
    q, k = q + b * q_b + h * q_h, k + b * q_b + h * q_h
    v, log_decay = v + b * v_b + h * v_h, log_decay + b * d_b + h * d_h
    grad_y, grad_v = grad_y + (b * length * heads + h) * V, grad_v + (b * length * heads + h) * V
    y_t = heads * V
    if reset is not None:
        reset += b * length
    across: tl.constexpr = tl.cdiv(V, BLOCK_V)
    scans: tl.constexpr = tl.cdiv(K, BLOCK_K) * across
    tiles = tl.cdiv(size, BLOCK_T)
    if part < scans:
        key, value = part // across * BLOCK_K + tl.arange(0, BLOCK_K), part % across * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (key < K)[:, None] & (value < V)[None, :]
        place = row * K * V + key[:, None] * V + value[None, :]
        if grad_after is None:
            now = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        else:
            now = tl.load(grad_after + place, mask=inside, other=0.0)
        # Of the chunk up to the tile: the elements' contributions, the log decay, that of entering elements, resets.
        added = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        gap, entered, cleared = 0.0, 0.0, 0
        for step in range(count * tiles):
            chunk, tile = count - 1 - step // tiles, step % tiles
            if MANY:  # decided while compiling, unlike the next  # noqa: SIM102
                if tile == 0:
                    border = (row * count + chunk) * K * V + key[:, None] * V + value[None, :]
                    tl.store(grad_states + border, now, mask=inside)
            end = tl.minimum(chunk * size + size, length)
            at = chunk * size + tile * BLOCK_T + tl.arange(0, BLOCK_T)
            decay, total, resets, cleared_ = _passed(log_decay, d_t, reset, at, at < end)
            _, entered_, _, _ = _passed(log_decay, d_t, None, at, at < tl.minimum(chunk * size + block, end))
            reach = tl.exp(gap + decay)
            if reset is not None:
                reach = tl.where(cleared + resets == 0, reach, 0.0)
            queries = _tile(q, q_t, at, at < end, key, K).to(tl.float32) * reach[:, None]
            grads = _tile(grad_y, y_t, at, at < end, value, V).to(tl.float32)
            added = tl.dot(tl.trans(queries), grads, added, input_precision=PRECISION)
            gap, entered, cleared = gap + total, entered + entered_, cleared + cleared_
            if tile == tiles - 1:
                now = tl.where(cleared == 0, tl.exp(entered), 0.0) * now + added
                added = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
                gap, entered, cleared = 0.0, 0.0, 0
        if grad_state is not None:
            tl.store(grad_state + place, now, mask=inside)
    else:
        part -= scans
        chunk, tile, slice_ = part // (tiles * WIDE), part // WIDE % tiles, part % WIDE
        key, value = slice_ * BLOCK_K + tl.arange(0, BLOCK_K), slice_ * BLOCK_V + tl.arange(0, BLOCK_V)
        end = tl.minimum(chunk * size + size, length)
        enters = tl.minimum(chunk * size + block, end)
        at = chunk * size + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        valid = at < end
        border = (row * count + chunk) * K * V
        own, _, own_resets, _ = _passed(log_decay, d_t, reset, at, valid)
        grad_queries = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        grad_keys = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        grad_values = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        # The gradient of the log decay before each element, and of each element's contribution to the state.
        passing = tl.zeros((BLOCK_T,), tl.float32)
        entering = tl.zeros((BLOCK_T,), tl.float32)
        crossing = 0.0

        # As rows, from the tile itself to the chunk's first.
        decay, resets = own, own_resets
        for back in range(tile + 1):
            source = at - back * BLOCK_T
            decay_, total, resets_, cleared = _passed(log_decay, d_t, reset, source, source < end)
            if back > 0:
                decay += total
                resets += cleared
            pulls = _product(grad_y, y_t, at, v, v_t, source, end, V, BLOCK_V, BLOCK_T, DOT, PRECISION)
            pulls *= _left(decay, decay_, resets, resets_, at, source, reset)
            keys = _tile(k, q_t, source, source < end, key, K)
            grad_queries = tl.dot(pulls.to(DOT), keys.to(DOT), grad_queries, input_precision=PRECISION)
            if sums is not None:
                scores = _product(q, q_t, at, k, q_t, source, end, K, BLOCK_K, BLOCK_T, DOT, PRECISION)
                passing += tl.sum(tl.where(at[:, None] > source[None, :], scores * pulls, 0.0), 1)

        # As columns, from the tile itself to the chunk's last.
        gap, entered, cleared = 0.0, 0.0, 0
        for ahead in range(tiles - tile):
            asks = at + ahead * BLOCK_T
            decay_, total, resets_, cleared_ = _passed(log_decay, d_t, reset, asks, asks < end)
            left = _left(gap + decay_, own, cleared + resets_, own_resets, asks, at, reset)
            _, entered_, _, _ = _passed(log_decay, d_t, None, asks, asks < enters)
            gap, entered, cleared = gap + total, entered + entered_, cleared + cleared_
            scores = _product(q, q_t, asks, k, q_t, at, end, K, BLOCK_K, BLOCK_T, DOT, PRECISION) * left
            pulls = _product(grad_y, y_t, asks, v, v_t, at, end, V, BLOCK_V, BLOCK_T, DOT, PRECISION)
            if sums is not None:
                passing -= tl.sum(tl.where(asks[:, None] > at[None, :], scores * pulls, 0.0), 0)
            pulls *= left
            queries = _tile(q, q_t, asks, asks < end, key, K)
            grads = _tile(grad_y, y_t, asks, asks < end, value, V)
            grad_keys = tl.dot(tl.trans(pulls.to(DOT)), queries.to(DOT), grad_keys, input_precision=PRECISION)
            grad_values = tl.dot(tl.trans(scores.to(DOT)), grads.to(DOT), grad_values, input_precision=PRECISION)
        passing = tl.where(slice_ == 0, passing, 0.0)  # the same in every slice

        if before is not None:
            reach = tl.exp(decay)
            if reset is not None:
                reach = tl.where(resets == 0, reach, 0.0)
            pulled = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
            for start in range(0, V, BLOCK_V):
                column = start + tl.arange(0, BLOCK_V)
                grads = _tile(grad_y, y_t, at, valid, column, V).to(tl.float32) * reach[:, None]
                states = _tile(before + border, V, key, key < K, column, V)
                pulled = tl.dot(grads, tl.trans(states), pulled, input_precision=PRECISION)
            grad_queries += pulled
            if sums is not None:
                passing += tl.sum(_tile(q, q_t, at, valid, key, K).to(tl.float32) * pulled, 1)

        if grad_states is not None:
            weight = tl.exp(tl.where(at < enters, entered - own, float("-inf")))
            if reset is not None:
                weight = tl.where(own_resets == cleared, weight, 0.0)
            pushed = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
            for start in range(0, V, BLOCK_V):
                column = start + tl.arange(0, BLOCK_V)
                values = _tile(v, v_t, at, valid, column, V).to(tl.float32) * weight[:, None]
                states = _tile(grad_states + border, V, key, key < K, column, V)
                pushed = tl.dot(values, tl.trans(states), pushed, input_precision=PRECISION)
                if before is not None and sums is not None:
                    crossing += tl.sum(states * _tile(before + border, V, key, key < K, column, V))
            grad_keys += pushed
            if sums is not None:
                entering = tl.sum(_tile(k, q_t, at, valid, key, K).to(tl.float32) * pushed, 1)
                crossing *= tl.where(cleared == 0, tl.exp(entered), 0.0)
            for start in range(0, K, BLOCK_K):
                column = start + tl.arange(0, BLOCK_K)
                keys = _tile(k, q_t, at, valid, column, K).to(tl.float32) * weight[:, None]
                states = _tile(grad_states + border, V, column, column < K, value, V)
                grad_values = tl.dot(keys, states, grad_values, input_precision=PRECISION)

        element = at[:, None].to(tl.int64) * heads
        out_k = (b * length * heads + h + element) * K + key[None, :]
        out_v = element * V + value[None, :]
        valid_k, valid_v = valid[:, None] & (key < K)[None, :], valid[:, None] & (value < V)[None, :]
        tl.store(grad_q + out_k, grad_queries.to(grad_q.dtype.element_ty), mask=valid_k)
        tl.store(grad_k + out_k, grad_keys.to(grad_k.dtype.element_ty), mask=valid_k)
        tl.store(grad_v + out_v, grad_values.to(grad_v.dtype.element_ty), mask=valid_v)
        if sums is not None:
            line = (row * WIDE + slice_) * 2 * length
            tl.store(sums + (line + at), passing, mask=valid)
            # An element contributes to the decays after it, the state before the chunk to all.
            tl.store(sums + (line + length + at + 1), entering, mask=at + 1 < enters)
            if tile == 0:
                tl.store(sums + (line + length + chunk.to(tl.int64) * size), crossing)


@jit
def _decay_kernel(sums, grad_decay, length, count, size, block, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient of one chunk's log decays: sums over the elements from each on, and over those before it."""
    row, chunk = (tl.program_id(0) // count).to(tl.int64), (tl.program_id(0) % count).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    at = chunk * size + offset
    valid = (offset < size) & (at < length)
    enters = valid & (offset < block)
    passing, entering = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for slice_ in range(WIDE):
        place = sums + (row * WIDE + slice_) * 2 * length + at
        passing += tl.load(place, mask=valid, other=0.0)
        entering += tl.load(place + length, mask=enters, other=0.0)
    grad = tl.cumsum(passing, reverse=True) + tl.where(enters, tl.cumsum(entering), 0.0)
    tl.store(grad_decay + row * length + at, grad, mask=valid)
