"""Returns: what a decision was worth, as pure functions of rewards and values.

B batch, n policy evaluations. Time: `value[:, t]` is the value of what was seen at t; `reward[:, t]` and
`terminated[:, t]` came of the action taken there, which led to t + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lambda_returns(reward: Tensor, value: Tensor, terminated: Tensor, discount: float, trace_decay: float) -> Tensor:
    """Lambda-returns G (B, n), the mixture of all multi-step returns (Sutton & Barto 2018, section 12.1):

        G[n-1] = V[n-1],   G[t] = r[t] + gamma (1 - d[t]) ((1 - lambda) V[t+1] + lambda G[t+1])

    with V = `value` (B, n), r = `reward` and d = `terminated` (bool), each (B, n - 1) or (B, n): the last value already
    stands for what its decision brings, so an n-th entry is ignored. gamma = `discount`, lambda = `trace_decay`: 0
    gives the one-step return, 1 the discounted sum of rewards and the last value.
    """
    mixed_return = value[:, -1]
    returns = [mixed_return]
    for t in reversed(range(value.shape[1] - 1)):
        future = (1 - trace_decay) * value[:, t + 1] + trace_decay * mixed_return
        mixed_return = reward[:, t] + discount * future.masked_fill(terminated[:, t], 0)
        returns.append(mixed_return)
    return torch.stack(returns[::-1], dim=1)
