"""Lambda-returns, computed from the last step back.

`reference` is the definition and the PyTorch form. Rollouts are short and have many rows, so a loop over time is cheap.
The Triton form runs that loop in one launch.

Axes: B batch, n policy evaluations. Time: `value[:, t]` is the value of the observation at t. `reward[:, t]` and
`terminated[:, t]` follow from the action taken there, which leads to t + 1.

Source: Sutton and Barto 2018, section 12.1.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wmcli.kernels.dispatch import jit, on_triton, tl

Bootstrap = Literal["next", "own"]
TILE = 32  # rows of a program: one warp


def reference(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    discount: float,
    trace_decay: float,
    bootstrap: Bootstrap = "next",
) -> Tensor:
    """Compute `lambda_returns` by its definition, one step after the other."""
    narrow = torch.promote_types(reward.dtype, value.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    reward, value = reward.to(wide), value.to(wide)
    mixed_return = value[:, -1]
    returns = [mixed_return]
    for t in reversed(range(value.shape[1] - 1)):
        trusted = value[:, t + 1] if bootstrap == "next" else value[:, t]
        future = (1 - trace_decay) * trusted + trace_decay * mixed_return
        mixed_return = reward[:, t] + discount * future.masked_fill(terminated[:, t], 0)
        returns.append(mixed_return)
    return torch.stack(returns[::-1], dim=1).to(narrow)


def lambda_returns(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    discount: float,
    trace_decay: float,
    bootstrap: Bootstrap = "next",
) -> Tensor:
    """Return lambda-returns G, the mixture of all multi-step returns.

        G[n-1] = V[n-1],   G[t] = r[t] + gamma (1 - d[t]) ((1 - lambda) V[t+1] + lambda G[t+1])

    With `bootstrap` "own", V[t] replaces V[t+1]. Published code differs: DreamerV3 uses "next"; STORM and Drama use
    "own". Drama's r[t] and d[t] belong to the step that led to t, so its G[t] counts from one step earlier.

    It has gradients with respect to `reward` and `value`, in Triton first derivatives only. Sums are float32 for
    operands of any dtype.

    Args:
        reward: r, (B, n - 1) or (B, n). An n-th entry is ignored, because the last value includes it.
        value: V, (B, n).
        terminated: d, bool, of the shape of `reward`.
        discount: gamma.
        trace_decay: lambda. 0 gives the one-step return, 1 the discounted sum of rewards plus the last value.
        bootstrap: "next" or "own".

    Returns:
        (B, n) in the common dtype of `reward` and `value`.

    Source: DreamerV3 (arXiv 2301.04104), STORM (arXiv 2310.09615), Drama (arXiv 2410.08893).
    """
    if on_triton(value, reward):
        return _LambdaReturns.apply(reward, value, terminated, discount, trace_decay, bootstrap == "own")
    return reference(reward, value, terminated, discount, trace_decay, bootstrap)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _forward(
    reward,
    value,
    terminated,
    returns,
    rows,
    steps,
    reward_row,
    reward_step,
    value_row,
    value_step,
    end_row,
    end_step,
    discount,
    trace_decay,
    OWN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute a tile of rows, from the last step back. `x_row`, `x_step`: strides; returns (B, n) are contiguous."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = row < rows
    reward += row * reward_row
    value += row * value_row
    terminated += row * end_row
    returns += row * steps
    reward_step, value_step = tl.cast(reward_step, tl.int64), tl.cast(value_step, tl.int64)
    end_step = tl.cast(end_step, tl.int64)
    total = tl.load(value + (steps - 1) * value_step, mask=inside, other=0.0).to(tl.float32)
    tl.store(returns + steps - 1, total, mask=inside)
    for back in range(1, steps):
        t = steps - 1 - back
        trusted = tl.load(value + (t if OWN else t + 1) * value_step, mask=inside, other=0.0).to(tl.float32)
        earned = tl.load(reward + t * reward_step, mask=inside, other=0.0).to(tl.float32)
        ended = tl.load(terminated + t * end_step, mask=inside, other=0)
        future = (1 - trace_decay) * trusted + trace_decay * total
        total = earned + tl.where(ended != 0, 0.0, discount * future)  # chosen, not multiplied: 0 * NaN would be NaN
        tl.store(returns + t, total, mask=inside)


@jit
def _backward(
    gradient,
    terminated,
    grad_reward,
    grad_value,
    rows,
    steps,
    rewards,
    gradient_row,
    gradient_step,
    end_row,
    end_step,
    discount,
    trace_decay,
    OWN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the gradients of a tile of rows, from the first step on.

    grad_reward (B, `rewards`) and grad_value (B, n) are contiguous. A return passes its whole gradient to its reward,
    and a share each to the bootstrap value and to the next return.
    """
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = row < rows
    gradient += row * gradient_row
    terminated += row * end_row
    grad_reward += row * rewards
    grad_value += row * steps
    gradient_step, end_step = tl.cast(gradient_step, tl.int64), tl.cast(end_step, tl.int64)
    total = tl.load(gradient, mask=inside, other=0.0).to(tl.float32)  # of the return at t
    before = tl.zeros((TILE,), tl.float32)  # the part of the return at t - 1 in the value at t
    for t in range(steps - 1):
        ended = tl.load(terminated + t * end_step, mask=inside, other=0)
        own = tl.load(gradient + (t + 1) * gradient_step, mask=inside, other=0.0).to(tl.float32)
        onward = tl.where(ended != 0, 0.0, discount * total)
        share = (1 - trace_decay) * onward
        tl.store(grad_reward + t, total, mask=inside)
        tl.store(grad_value + t, share if OWN else before, mask=inside)
        before = share
        total = own + trace_decay * onward
    tl.store(grad_value + steps - 1, total if OWN else total + before, mask=inside)
    if rewards == steps:
        tl.store(grad_reward + steps - 1, tl.zeros((TILE,), tl.float32), mask=inside)


class _LambdaReturns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reward: Tensor,
        value: Tensor,
        terminated: Tensor,
        discount: float,
        trace_decay: float,
        own: bool,
    ) -> Tensor:
        rows, steps = value.shape
        assert reward.shape[1] in (steps - 1, steps) and terminated.shape[1] in (steps - 1, steps)
        returns = value.new_empty(value.shape, dtype=torch.promote_types(reward.dtype, value.dtype))
        _forward[(-(-rows // TILE),)](
            reward,
            value,
            terminated,
            returns,
            rows,
            steps,
            *reward.stride(),
            *value.stride(),
            *terminated.stride(),
            discount,
            trace_decay,
            OWN=own,
            TILE=TILE,
            num_warps=1,
        )
        ctx.save_for_backward(terminated)
        ctx.constants = discount, trace_decay, own
        ctx.operands = reward.shape[1], reward.dtype, value.dtype
        return returns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (terminated,) = ctx.saved_tensors
        discount, trace_decay, own = ctx.constants
        rewards, reward_dtype, value_dtype = ctx.operands
        rows, steps = gradient.shape
        grad_reward = gradient.new_empty(rows, rewards, dtype=reward_dtype)
        grad_value = gradient.new_empty(rows, steps, dtype=value_dtype)
        _backward[(-(-rows // TILE),)](
            gradient,
            terminated,
            grad_reward,
            grad_value,
            rows,
            steps,
            rewards,
            *gradient.stride(),
            *terminated.stride(),
            discount,
            trace_decay,
            OWN=own,
            TILE=TILE,
            num_warps=1,
        )
        return grad_reward, grad_value, None, None, None, None
