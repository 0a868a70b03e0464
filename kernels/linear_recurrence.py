"""A linear recurrence over matrices whose state decays by one scalar per head and element.

    S_n = exp(log_decay_n) S_{n-1} + k_n^T v_n        y_n = q_n S_n

With a constant decay this is retention (Sun et al. 2023, arXiv 2307.08621, without its normalisers), with a decay that
depends on the data it is the state-space duality of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). `reference` says what
the operation means, one element at a time. The other functions compute the same in chunks: inside a chunk as masked
attention, between chunks through the states, which are found for all chunks at once because the recurrence over chunks
is again a product with a decay matrix.

Queries and keys may have one head that all value heads share (Mamba-2's single group): then q k^T is computed once.

Operands keep their dtype inside a chunk; decays, states and what is accumulated in them are float32 (float64 for
float64 operands) also under autocast.

Axes: B batch, H heads, G heads of queries and keys (H, or 1 for all to share), T time, N chunks or blocks, C elements
of a chunk, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, one element after the other. Arguments and results as in `linear_recurrence`."""
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
    """All elements at once.

    q, k (B, G, T, K); v (B, H, T, V); log_decay (H,) or (B, H, T), at most 0; state (B, H, K, V) or None for zeros;
    reset (B, T) bool, True clears the state before that element. Results do not depend on `chunk` (elements, None: all
    in one chunk), only cost does. Returns y (B, H, T, V) in the dtype of v, and the state after the last element.
    """
    length = q.shape[2]
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
    """One element: q, k (B, G, K); v (B, H, V); log_decay (H,) or (B, H); state (B, H, K, V); reset (B,) bool.

    Returns y (B, H, V) in the dtype of v, and the new state.
    """
    with torch.autocast(q.device.type, enabled=False):
        if reset is not None:
            state = state.masked_fill(reset[:, None, None, None], 0.0)
        decay = log_decay.to(state.dtype).exp()[..., None, None]
        # (B, G, K, 1) * (B, H, 1, V)
        state = torch.addcmul(decay * state, k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :])
        y = (q.to(state.dtype)[..., None, :] @ state).squeeze(-2)
        return y.to(v.dtype), state


def linear_recurrence_fork(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, block: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """N blocks whose first `block` elements enter the state and whose other elements do not.

    q, k (B, G, N, C, K); v (B, H, N, C, V); log_decay (H,) or (B, H, N, C); state (B, H, K, V) or None for zeros;
    1 <= block <= C. The elements from `block` on see everything up to their block's end and themselves, causally, and
    leave no trace. Returns y (B, H, N, C, V) in the dtype of v, and the state after the last block.
    """
    return _blocks(q, k, v, log_decay, block, state, None)


# -- the chunked form --------------------------------------------------------------------------------------------------


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, block: int, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `linear_recurrence_fork`, with reset (B, 1, N, C); resets are only meant where block == C."""
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
        scores = (q @ k.mT) * _decay_matrix(cumulative, segment)
        y = scores.to(v.dtype) @ v
        if before is not None:
            reach = cumulative.exp()
            if segment is not None:
                reach = reach.masked_fill(segment > 0, 0.0)
            y = torch.addcmul(y.to(wide), q.to(wide) @ before, reach[..., None]).to(v.dtype)
        return y, after


def _states(
    k: Tensor, v: Tensor, cumulative: Tensor, segment: Tensor | None, state: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The states before each block (B, H, N, K, V), None if that is one block with nothing before it, and the last."""
    total = cumulative[..., -1:]
    weight = (total - cumulative).exp()
    if segment is not None:
        weight = weight.masked_fill(segment != segment[..., -1:], 0.0)
    added = (k * weight[..., None]).mT @ v  # (B, H, N, K, V): what each block adds to the state
    count = added.shape[2]
    if state is None and count == 1:
        return None, added[:, :, 0]
    state = torch.zeros_like(added[:, :, 0]) if state is None else state.to(added.dtype)
    if count == 1 and segment is None:
        return state[:, :, None], torch.addcmul(added[:, :, 0], total.exp()[:, :, 0, :, None], state)
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
    """(..., C) -> (..., C, C): exp(cumulative_i - cumulative_j) where j <= i stands in the same segment, else 0."""
    size = cumulative.shape[-1]
    seen = torch.ones(size, size, dtype=torch.bool, device=cumulative.device).tril()
    if segment is not None:
        seen = seen & (segment[..., :, None] == segment[..., None, :])
    # Masked before the exponential: above the diagonal it could overflow, and 0 * inf is NaN in the gradient.
    return (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(~seen, float("-inf")).exp()
