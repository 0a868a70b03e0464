"""Optimisers as the papers name them, and one guarded update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimiserName = Literal["adamw", "adam"]


def build_optimiser(
    name: OptimiserName,
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """AdamW (decoupled decay) or Adam without decay, betas (0.9, 0.999), eps 1e-8, fused into one kernel a step."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, fused=True)
    optimiser = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    for group in optimiser.param_groups:
        group["weight_decay"] = 0.0  # groups bring decays of their own, which Adam would add to the gradient
    return optimiser


def update(optimiser: torch.optim.Optimizer, loss: Tensor, clip: float) -> Tensor:
    """Backward pass, gradient norm clipped to `clip`, one optimiser step. Returns the norm before clipping, on the
    device."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
    optimiser.step()
    return norm
