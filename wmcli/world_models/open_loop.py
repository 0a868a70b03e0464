"""Open-loop rollouts: a world model observes real frames, then imagines under given actions.

B batch, C context frames, T frames in total. Time: see base.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wmcli.world_models.base import ImaginedStep, WorldModel


@torch.no_grad()
def open_loop(
    world_model: WorldModel, latent: Tensor, action: Tensor, **options: Any
) -> tuple[Tensor, list[ImaginedStep]]:
    """Observe C frames of each episode from its beginning, then imagine the T - C that follow.

    Samples come from torch's global generator: first those of the observed frames, then those of each step.

    Args:
        world_model: In eval mode.
        latent: (B, C, ...), the context frames as given by `encode`.
        action: (B, T) int64, T at least C. The last one is not used: nothing follows it.
        options: Further arguments of this model's `observe` and `imagine`, such as `likeliest=True`.

    Returns:
        Features (B, T, *feature_shape) of all frames, and the T - C imagined steps.
    """
    context = latent.shape[1]
    reset = torch.zeros(latent.shape[:2], dtype=torch.bool, device=action.device)
    reset[:, 0] = True
    features, state = world_model.observe(latent, action[:, :context], reset, **options)
    feature_parts, steps = [features], []
    for step_action in action[:, context - 1 : -1].unbind(1):
        imagined, state = world_model.imagine(state, step_action, **options)
        feature_parts.append(world_model.features(state)[:, None])
        steps.append(imagined)
    return torch.cat(feature_parts, 1), steps
