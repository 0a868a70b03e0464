"""Training of a controller on imagined rollouts: REINFORCE and actor-critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli.controllers.base import Learner
from wmcli.experience import Replay
from wmcli.trainers.batches import build_sampler, encode_frames, gather
from wmcli.training.checkpoint import TrainState
from wmcli.training.device import Machine
from wmcli.training.loop import Trainer
from wmcli.training.optim import optimizer_for, update
from wmcli.training.settings import TrainingSettings
from wmcli.world_models.base import Batch, WorldModel


class ImaginationTrainer(Trainer):
    """Trains a controller on rollouts that a frozen world model imagines from the experience.

    Args:
        world_model: Frozen, in eval mode (`Machine.freeze`).
        controller: On the machine's device.
        replay: The experience.
        settings: The section of the controller.
        training: Determines the sampling of windows.
        machine: Device and precision.
        rng: Belongs to the sampler from here on.
        latents: Latents (N, ...) of all frames; None encodes them.
        counts: For dynamic frequency sampling: number of the world model's training segments that start at each row
            (N,).
        ratio: For the same: the world model's batch size divided by the controller's.

    Raises:
        UsageError: No episode is long enough to imagine from.
    """

    def __init__(
        self,
        world_model: WorldModel,
        controller: Learner,
        replay: Replay,
        settings: Any,
        training: TrainingSettings,
        *,
        machine: Machine,
        rng: np.random.Generator,
        latents: Tensor | None = None,
        counts: np.ndarray | None = None,
        ratio: float = 1.0,
    ) -> None:
        self.world_model = world_model
        self.controller = controller
        self.replay = replay
        self.settings = settings
        self.machine = machine
        self.latents = encode_frames(world_model, replay.frames, machine) if latents is None else latents
        if training.sampling == "dfs" and counts is None:
            counts = np.zeros(0, np.int64)
        self._sampler = build_sampler(
            training,
            replay,
            rng,
            length=controller.window,
            minimum=min(world_model.min_context, controller.window),
            pad="left",
            across_ends=world_model.across_ends,
            counts=counts,
            ratio=ratio,
        )
        self._optimizer = optimizer_for(settings, controller.parameter_groups())
        self._rollout = machine.wrap_repeated(partial(controller.imagine, world_model))
        self.calibration: dict[str, float] = {}
        """Returns of the version that is trained further, if it was calibrated."""
        self.state = TrainState({"controller": controller}, self._optimizer, rng, {"sampler": self._sampler})

    def update(self) -> Mapping[str, Tensor]:
        """Learn from a batch of rollouts."""
        windows = self._sampler.batch(self.settings.batch)
        batch = gather(self.replay, self.latents, windows, across_ends=self.world_model.across_ends)
        return update_controller(
            self.machine, self.world_model, self.controller, self._optimizer, batch, self.settings.clip, self._rollout
        )

    def status(self) -> dict[str, float]:
        """Return the calibration."""
        return self.calibration


def update_controller(
    machine: Machine,
    world_model: WorldModel,
    controller: Learner,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    clip: float,
    rollout: Callable[..., Any],
) -> dict[str, Tensor]:
    """Imagine rollouts from a batch of windows and do one update on them.

    Args:
        machine: Determines the precision.
        world_model: Frozen, in eval mode.
        controller: In training mode.
        optimizer: Holds its parameters.
        batch: Windows of latents to imagine from.
        clip: Largest norm of the gradient.
        rollout: The controller's `imagine` in this world model, from batch and uniforms; possibly a recorded graph.

    Returns:
        The loss, its parts and the gradient norm before clipping, scalars on the device.
    """
    imagined = rollout(batch, controller.draw_uniforms(world_model, batch))
    with machine.autocast():
        loss, metrics = controller.loss(imagined)
    norm = update(optimizer, loss, clip)
    controller.after_update()
    return {"loss": loss, **metrics, "gradient_norm": norm}
