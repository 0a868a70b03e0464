"""Lambda-returns: what a decision was worth (Sutton and Barto 2018, section 12.1), worked out from the last step back.

`reference` says what the operation means and is the form in torch: rollouts are short and their rows many, so that a
loop over time costs little. The Triton form runs that loop inside one launch.

B batch, n policy evaluations. Time: `value[:, t]` is the value of what was seen at t; `reward[:, t]` and
`terminated[:, t]` came of the action taken there, which led to t + 1.
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
    """The definition, one step after the other. Arguments and result as in `lambda_returns`."""
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
    """Lambda-returns G (B, n), the mixture of all multi-step returns:

        G[n-1] = V[n-1],   G[t] = r[t] + gamma (1 - d[t]) ((1 - lambda) V[t+1] + lambda G[t+1])

    with V = `value` (B, n), r = `reward` and d = `terminated` (bool), each (B, n - 1) or (B, n): the last value already
    stands for what its decision brings, so an n-th entry is ignored. gamma = `discount`, lambda = `trace_decay`: 0
    gives the one-step return, 1 the discounted sum of rewards and the last value.

    `bootstrap` "own" puts V[t] in the place of V[t+1]. Three forms are published: DreamerV3's code has "next" (arXiv
    2301.04104); STORM has "own" (arXiv 2310.09615); Drama has "own" and gives as r[t] and d[t] what came on the way to
    t, so that its G[t] is counted from one step before (arXiv 2410.08893).

    Differentiable in `reward` and `value`, in Triton once. Sums are float32 whatever the operands are.
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
    """A tile of rows, from the last step back. `x_row`, `x_step`: strides; returns (B, n) contiguous."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = row < rows
    reward += row * reward_row
    value += row * value_row
    terminated += row * end_row
    returns += row * steps
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
    """A tile of rows, from the first step on. grad_reward (B, `rewards`) and grad_value (B, n) contiguous.

    What a return passes on: to its reward the whole, to the value it trusts and to the next return a part each.
    """
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = row < rows
    gradient += row * gradient_row
    terminated += row * end_row
    grad_reward += row * rewards
    grad_value += row * steps
    total = tl.load(gradient, mask=inside, other=0.0).to(tl.float32)  # of the return at t
    before = tl.zeros((TILE,), tl.float32)  # what the return at t - 1 gives to the value at t
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
