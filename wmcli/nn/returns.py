"""Returns: what a decision was worth, as pure functions of rewards and values.

B batch, n policy evaluations. Time: `value[:, t]` is the value of what was seen at t; `reward[:, t]` and
`terminated[:, t]` came of the action taken there, which led to t + 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def lambda_returns(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    discount: float,
    trace_decay: float,
    bootstrap: Literal["next", "own"] = "next",
) -> Tensor:
    """Lambda-returns G (B, n), the mixture of all multi-step returns (Sutton & Barto 2018, section 12.1):

        G[n-1] = V[n-1],   G[t] = r[t] + gamma (1 - d[t]) ((1 - lambda) V[t+1] + lambda G[t+1])

    with V = `value` (B, n), r = `reward` and d = `terminated` (bool), each (B, n - 1) or (B, n): the last value already
    stands for what its decision brings, so an n-th entry is ignored. gamma = `discount`, lambda = `trace_decay`: 0
    gives the one-step return, 1 the discounted sum of rewards and the last value.

    `bootstrap` "own" puts V[t] in the place of V[t+1]. Three forms are published: DreamerV3's code has "next" (arXiv
    2301.04104); STORM has "own" (arXiv 2310.09615); Drama has "own" and gives as r[t] and d[t] what came on the way to
    t, so that its G[t] is counted from one step before (arXiv 2410.08893).
    """
    mixed_return = value[:, -1]
    returns = [mixed_return]
    for t in reversed(range(value.shape[1] - 1)):
        trusted = value[:, t + 1] if bootstrap == "next" else value[:, t]
        future = (1 - trace_decay) * trusted + trace_decay * mixed_return
        mixed_return = reward[:, t] + discount * future.masked_fill(terminated[:, t], 0)
        returns.append(mixed_return)
    return torch.stack(returns[::-1], dim=1)
