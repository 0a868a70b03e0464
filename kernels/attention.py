"""Causal softmax attention with a bias by distance, a window and resets.

    y_i = sum_j softmax_j(q_i k_j / sqrt(K) + bias[p_i - j]) v_j     over the visible positions j; query i is at p_i

The T queries are at the last T of S positions. Each attends to its own position and to earlier ones, down to the last
reset and within the length of the table of biases. Attention priors (Gaussian, span) are such tables. The gradient of a
table is exact and deterministic.

`reference` is the definition. The PyTorch form is `scaled_dot_product_attention` with a mask, or plain products for a
single query on a CPU. The Triton form never stores all T S scores. It skips positions that a window or a reset hides.
Scores, weights and sums are float32; products of bfloat16 operands are bfloat16.

Axes: B batch, H heads, T queries, S positions, K head width, R distances in the table of biases.

Source: FlashAttention (Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from wmcli.kernels.dispatch import INTERPRETED, jit, on_triton, tl
from wmcli.kernels.tiles import Tile, choose

LOG2E = math.log2(math.e)


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, reset: Tensor | None = None) -> Tensor:
    """Compute `attention` by its definition, with all scores in memory."""
    queries, places = q.shape[2], k.shape[2]
    place = torch.arange(places, device=q.device)
    distance = place[-queries:, None] - place  # (T, S)
    visible = distance >= 0
    score = q @ k.mT / math.sqrt(q.shape[3])
    if bias is not None:
        reach = bias.shape[1]
        visible = visible & (distance < reach)
        score = score + bias[:, distance.clamp(0, reach - 1)]
    if reset is not None:
        resets = reset.cumsum(1)  # (B, S), so far
        visible = visible & (resets[:, None, -queries:, None] == resets[:, None, None, :])
    return score.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, reset: Tensor | None = None) -> Tensor:
    """Attend from all queries at once.

    The Triton form has first derivatives only. The PyTorch form rounds the bias to the dtype of q.

    Args:
        q: (B, H, T, K).
        k: (B, H, S, K), S >= T.
        v: (B, H, S, K).
        bias: (H, R), added to the scores: bias[h, d] for the position d before the query. Positions R or more before it
            are hidden; -inf hides a distance. Each query needs a visible position. None: no bias, and no window.
        reset: (B, S) bool. True hides all earlier positions from this one and all later ones.

    Returns:
        (B, H, T, K) in the dtype of q.
    """
    if on_triton(q, k, v):
        return _Attention.apply(q, k, v, bias, reset)
    queries, places = q.shape[2], k.shape[2]
    if bias is None and reset is None and queries == places:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return masked_attention(q, k, v, _mask(q, places, bias, reset))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend under a mask.

    On a CPU a single query runs as plain products: PyTorch's kernel takes up to six times as long.

    Args:
        q: (B, H, T, K).
        k: (B, H, S, K).
        v: (B, H, S, K).
        mask: (..., T, S): bool, True where visible, or float, added to the scores. None: all positions are visible.

    Returns:
        (B, H, T, K).
    """
    if q.shape[2] > 1 or q.device.type != "cpu":
        if mask is not None and mask.requires_grad and not any(x.requires_grad for x in (q, k, v)):
            q = q.detach().requires_grad_()  # github.com/pytorch/pytorch/issues/148476: else CUDA reads out of bounds
        return F.scaled_dot_product_attention(q, k, v, mask)
    with torch.autocast("cpu", enabled=False):
        # A slice of a cache is copied first: torch would copy its transpose, which takes far longer.
        score = (q @ k.contiguous().mT).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[3])
        if mask is not None:
            score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask
        return score.softmax(-1).to(v.dtype) @ v


def _mask(q: Tensor, places: int, bias: Tensor | None, reset: Tensor | None) -> Tensor | None:
    """Return the mask of `attention`: biases (1 or B, H, T, S), visibility (T, S) or (B, 1, T, S), or None."""
    queries = q.shape[2]
    visible = None
    if reset is not None:
        resets = reset.cumsum(1)
        visible = resets[:, None, -queries:, None] == resets[:, None, None, :]
    if bias is not None:
        # Distances from S - 1 down to 1 - T; each query's row is a slice, one further left than the row before.
        line = F.pad(bias.flip(1), (places - bias.shape[1], queries - 1), value=float("-inf"))
        table = line.unfold(1, places, 1).flip(1)[None]  # of four axes: with three torch takes a slow path
        table = table.to(q.dtype)  # converted last, so that the gradient of a bias is not summed in bfloat16
        return table if visible is None else table.masked_fill(~visible, float("-inf"))
    if queries == 1:
        return visible
    causal = torch.ones(queries, places, dtype=torch.bool, device=q.device).tril(places - queries)
    return causal if visible is None else visible & causal


# -- Triton ------------------------------------------------------------------------------------------------------------
#
# A program has one head of one batch row (a "pair") and a tile of M queries or N places, and iterates over tiles of the
# other. Scores and the logarithms of their sums are in units of log 2: the GPU's exponential has base 2. `since` (B, S)
# int32 is the place of the last reset at or before each place. Strides are numbers of elements, (batch, head, row);
# channels have stride 1. Outputs of the kernels are (B, T or S, H, K), the order of the next product of a layer.


@jit
def _rows(x, stride, row, rows, width, W: tl.constexpr, DOT: tl.constexpr):
    """Load rows of x as a tile (rows, W) of type DOT, with zeros beyond its edges."""
    channel = tl.arange(0, W)
    inside = (row[:, None] < rows) & (channel[None, :] < width)
    place = row[:, None].to(tl.int64) * stride + channel[None, :]
    return tl.load(x + place, mask=inside, other=0.0).to(DOT)


@jit
def _store_rows(x, stride, row, rows, width, tile, W: tl.constexpr):
    channel = tl.arange(0, W)
    inside = (row[:, None] < rows) & (channel[None, :] < width)
    tl.store(x + row[:, None].to(tl.int64) * stride + channel[None, :], tile, mask=inside)


@jit
def _first_visible(since, row, queries, places, reach, HAS_RESET: tl.constexpr):
    """Return the first visible position of each query; for rows beyond the last query the position after their own."""
    place = row + (places - queries)
    begin = place - reach + 1
    if HAS_RESET:
        begin = tl.maximum(begin, tl.load(since + place, mask=row < queries, other=0))
    return tl.where(row < queries, begin, place + 1)


@jit
def _scores(product, scale, bias, distance, visible, HAS_BIAS: tl.constexpr):
    """Return scores from products of queries and keys, -inf where hidden."""
    score = product * scale
    if HAS_BIAS:
        score += tl.load(bias + distance, mask=visible, other=0.0).to(tl.float32) * 1.4426950408889634  # log2 e
    return tl.where(visible, score, float("-inf"))


@jit
def _forward(
    q,
    k,
    v,
    bias,
    since,
    out,
    log_sum,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    queries,
    places,
    width,
    reach,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute the outputs (B, T, H, K) of a tile of queries, and the logs of their sums of weights (B, H, T)."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    if HAS_BIAS:
        bias += head * reach
    if HAS_RESET:
        since += batch * places
    out += (batch * queries * heads + head) * width
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # rows with the most visible positions start first
    row = tile * M + tl.arange(0, M)
    place = row + (places - queries)
    begin = _first_visible(since, row, queries, places, reach, HAS_RESET)
    x = _rows(q, q_row, row, queries, width, W, DOT)

    highest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    y = tl.zeros((M, W), tl.float32)
    for start in range(tl.maximum(tl.min(begin), 0), tl.minimum(tl.max(place) + 1, places), N):
        column = start + tl.arange(0, N)
        keys = _rows(k, k_row, column, places, width, W, DOT)
        distance = place[:, None] - column[None, :]
        visible = (distance >= 0) & (column[None, :] >= begin[:, None])
        score = _scores(tl.dot(x, tl.trans(keys), input_precision="tf32x3"), scale, bias, distance, visible, HAS_BIAS)
        higher = tl.maximum(highest, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing visible yet: -inf - -inf would be NaN
        weight = tl.exp2(score - level[:, None])
        shrink = tl.exp2(highest - level)
        values = _rows(v, v_row, column, places, width, W, DOT)
        y = tl.dot(weight.to(DOT), values, y * shrink[:, None], input_precision="tf32x3")
        total = total * shrink + tl.sum(weight, 1)
        highest = higher
    total = tl.where(row < queries, total, 1.0)
    _store_rows(out, heads * width, row, queries, width, y / total[:, None], W)
    tl.store(log_sum + pair * queries + row, highest + tl.log2(total), mask=row < queries)


@jit
def _backward_queries(
    q,
    k,
    v,
    bias,
    since,
    out,
    log_sum,
    gradient,
    grad_q,
    delta,
    partial,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    queries,
    places,
    width,
    reach,
    scale,
    grad_scale,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute the gradients of a tile of queries, and their parts of the gradient of the biases.

    `delta` (B, H, T) is the inner product of each output with its gradient. The parts (B, H, tiles, R) must be zeros
    initially.

    A part is a sum along the diagonals of each tile of score gradients. Row m is rotated by m, so column c has the
    entry m - c (mod N). Each column then has two diagonals. At or below the tile's main diagonal it is distance
    first - start + c, above it N less. The second one continues at or below the diagonal of the next tile, so it is
    carried over.
    """
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    if HAS_BIAS:
        bias += head * reach
    if HAS_RESET:
        since += batch * places
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    if BIAS_GRAD:
        partial += (pair * tl.num_programs(1) + tile) * reach
    offset = (batch * queries * heads + head) * width
    row = tile * M + tl.arange(0, M)
    place = row + (places - queries)
    begin = _first_visible(since, row, queries, places, reach, HAS_RESET)
    x = _rows(q, q_row, row, queries, width, W, DOT)
    y = _rows(out + offset, heads * width, row, queries, width, W, DOT)
    grad_y = _rows(gradient + offset, heads * width, row, queries, width, W, DOT)
    inner = tl.sum(y.to(tl.float32) * grad_y.to(tl.float32), 1)
    tl.store(delta + pair * queries + row, inner, mask=row < queries)
    level = tl.load(log_sum + pair * queries + row, mask=row < queries, other=0.0)

    m, c = tl.arange(0, M)[:, None], tl.arange(0, N)
    carried = tl.zeros((N,), tl.float32)
    grad_x = tl.zeros((M, W), tl.float32)
    first = tl.min(place)
    lowest = tl.maximum(tl.min(begin), 0)
    stop = lowest + tl.cdiv(tl.minimum(first + M, places) - lowest, N) * N
    for start in range(lowest, stop, N):
        column = start + tl.arange(0, N)
        keys = _rows(k, k_row, column, places, width, W, DOT)
        values = _rows(v, v_row, column, places, width, W, DOT)
        distance = place[:, None] - column[None, :]
        visible = (distance >= 0) & (column[None, :] >= begin[:, None])
        score = _scores(tl.dot(x, tl.trans(keys), input_precision="tf32x3"), scale, bias, distance, visible, HAS_BIAS)
        weight = tl.exp2(score - level[:, None])
        grad_score = weight * (tl.dot(grad_y, tl.trans(values), input_precision="tf32x3") - inner[:, None])
        grad_x = tl.dot(grad_score.to(DOT), keys, grad_x, input_precision="tf32x3")
        if BIAS_GRAD:
            turned = tl.gather(grad_score, (m - c[None, :]) & (N - 1), 1)
            bin = first - start + c
            carried += tl.sum(tl.where(c[None, :] <= m, turned, 0.0), 0)
            tl.store(partial + bin, carried, mask=(bin >= 0) & (bin < reach))
            carried = tl.sum(tl.where(c[None, :] > m, turned, 0.0), 0)
    _store_rows(grad_q + offset, heads * width, row, queries, width, grad_x * grad_scale, W)
    if BIAS_GRAD:
        bin = first - stop + c
        tl.store(partial + bin, carried, mask=(bin >= 0) & (bin < reach))


@jit
def _backward_places(
    q,
    k,
    v,
    bias,
    since,
    log_sum,
    gradient,
    delta,
    grad_k,
    grad_v,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    queries,
    places,
    width,
    reach,
    scale,
    grad_scale,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute the gradients of a tile of keys and values (B, S, H, K). All tiles here are (positions, queries)."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    if HAS_BIAS:
        bias += head * reach
    if HAS_RESET:
        since += batch * places
    gradient += (batch * queries * heads + head) * width
    log_sum += pair * queries
    delta += pair * queries
    first = tl.program_id(1) * N
    column = first + tl.arange(0, N)
    keys = _rows(k, k_row, column, places, width, W, DOT)
    values = _rows(v, v_row, column, places, width, W, DOT)

    grad_keys = tl.zeros((N, W), tl.float32)
    grad_values = tl.zeros((N, W), tl.float32)
    before = places - queries
    for start in range(tl.maximum(first - before, 0), tl.minimum(first + N - 1 + reach - before, queries), M):
        row = start + tl.arange(0, M)
        begin = _first_visible(since, row, queries, places, reach, HAS_RESET)
        x = _rows(q, q_row, row, queries, width, W, DOT)
        grad_y = _rows(gradient, heads * width, row, queries, width, W, DOT)
        level = tl.load(log_sum + row, mask=row < queries, other=0.0)
        inner = tl.load(delta + row, mask=row < queries, other=0.0)
        distance = (row + before)[None, :] - column[:, None]
        visible = (distance >= 0) & (column[:, None] >= begin[None, :])
        score = _scores(tl.dot(keys, tl.trans(x), input_precision="tf32x3"), scale, bias, distance, visible, HAS_BIAS)
        weight = tl.exp2(score - level[None, :])
        grad_values = tl.dot(weight.to(DOT), grad_y, grad_values, input_precision="tf32x3")
        grad_score = weight * (tl.dot(values, tl.trans(grad_y), input_precision="tf32x3") - inner[None, :])
        grad_keys = tl.dot(grad_score.to(DOT), x, grad_keys, input_precision="tf32x3")
    offset = (batch * places * heads + head) * width
    _store_rows(grad_k + offset, heads * width, column, places, width, grad_keys * grad_scale, W)
    _store_rows(grad_v + offset, heads * width, column, places, width, grad_values, W)


def _forward_tiles(queries: int, width: int, dtype: torch.dtype) -> list[Tile]:
    """Return tiles of M queries and N positions, M <= N, the default first; more would not fit the registers."""
    if dtype == torch.bfloat16:
        n = 64 if width <= 128 else 32
        return [_tile(queries, n, n, 4, 3), _tile(queries, n, n, 8, 2)]
    if width <= 64:
        return [_tile(queries, 32, 32, 4, 3), _tile(queries, 32, 32, 8, 2)]
    return [_tile(queries, 16, 32 if width <= 128 else 16, 4, 2)]


def _backward_tiles(queries: int, width: int, dtype: torch.dtype) -> list[Tile]:
    """Return tiles as `_forward_tiles`."""
    if dtype == torch.bfloat16:
        n = 64 if width <= 128 else 32
        return [_tile(queries, n, n, 8, 2), _tile(queries, 32, 32, 4, 2)]
    n = 32 if width <= 64 else 16
    return [_tile(queries, n, n, 8, 2)]


def _tile(queries: int, m: int, n: int, warps: int, stages: int) -> Tile:
    m = min(m, max(16, 1 << (queries - 1).bit_length()))
    return {"M": m, "N": n, "num_warps": warps, "num_stages": stages}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, reset: Tensor | None) -> Tensor:
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        batch, heads, queries, width = q.shape
        places = k.shape[2]
        bias = None if bias is None else bias.contiguous()
        since = None
        if reset is not None:
            place = torch.arange(places, device=q.device, dtype=torch.int32)
            since = torch.where(reset, place, 0).cummax(1).values
        out = q.new_empty(batch, queries, heads, width)
        log_sum = q.new_empty(batch, heads, queries, dtype=torch.float32)
        ctx.sizes = (heads, queries, places, width, places if bias is None else bias.shape[1])
        ctx.constants = {"HAS_BIAS": bias is not None, "HAS_RESET": reset is not None}
        ctx.constants["W"] = max(16, 1 << (width - 1).bit_length())
        ctx.constants["DOT"] = tl.bfloat16 if q.dtype == torch.bfloat16 and not INTERPRETED else tl.float32
        shape = batch, *ctx.sizes, q.dtype
        tile = choose("attention", q.device, shape, _forward_tiles(queries, width, q.dtype))
        ctx.tile = choose("attention, backward", q.device, shape, _backward_tiles(queries, width, q.dtype))
        _forward[(batch * heads, -(-queries // tile["M"]))](
            *(q, k, v, bias, since, out, log_sum),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            *ctx.sizes,
            LOG2E / math.sqrt(width),
            **ctx.constants,
            **tile,
        )
        ctx.save_for_backward(q, k, v, bias, since, out, log_sum)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, since, out, log_sum = ctx.saved_tensors
        heads, queries, places, width, reach = ctx.sizes
        gradient = gradient.transpose(1, 2).contiguous()
        grad_q, grad_k, grad_v = (x.new_empty(len(x), x.shape[2], heads, width) for x in (q, k, v))
        delta = torch.empty_like(log_sum)
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        scales = (LOG2E / math.sqrt(width), 1 / math.sqrt(width))
        cut = -(-queries // ctx.tile["M"])
        partial = None
        if ctx.needs_input_grad[3]:
            partial = log_sum.new_zeros(len(q), heads, cut, reach)
        _backward_queries[(len(q) * heads, cut)](
            *(q, k, v, bias, since, out, log_sum, gradient, grad_q, delta, partial),
            *strides,
            *ctx.sizes,
            *scales,
            BIAS_GRAD=partial is not None,
            **ctx.constants,
            **ctx.tile,
        )
        _backward_places[(len(q) * heads, -(-places // ctx.tile["N"]))](
            *(q, k, v, bias, since, log_sum, gradient, delta, grad_k, grad_v),
            *strides,
            *ctx.sizes,
            *scales,
            **ctx.constants,
            **ctx.tile,
        )
        grad_bias = None if partial is None else partial.sum((0, 2)).to(bias.dtype)
        return *(x.transpose(1, 2) for x in (grad_q, grad_k, grad_v)), grad_bias, None
