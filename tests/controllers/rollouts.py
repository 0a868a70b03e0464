"""What a controller imagines and makes of it, with random numbers of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wmcli.controllers.base import Controller
from wmcli.world_models.base import Batch, WorldModel


def imagine(controller: Controller, world_model: WorldModel, batch: Batch) -> Any:
    return controller.imagine(world_model, batch, controller.draw_uniforms(world_model, batch))


def learn(controller: Controller, world_model: WorldModel, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one update."""
    return controller.loss(imagine(controller, world_model, batch))
