"""Training of a controller on imagined rollouts: REINFORCE and actor-critic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from wmcli import ranks
from wmcli.controllers.base import Learner
from wmcli.experience import Replay
from wmcli.trainers.batches import build_sampler, encode_frames, gather
from wmcli.training.checkpoint import Resumable, TrainState
from wmcli.training.device import Machine, Metrics
from wmcli.training.loop import Trainer
from wmcli.training.optim import GradientGuard, optimizer_for, update
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
        latents: Any = None,
        counts: np.ndarray | None = None,
        ratio: float = 1.0,
    ) -> None:
        self.world_model = world_model
        self.controller = controller
        self.replay = replay
        self.settings = settings
        self.machine = machine
        self.latents = encode_frames(world_model, replay.observation, machine) if latents is None else latents
        ranks.own_count(settings.batch, "controller.batch")
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
        self.guard = GradientGuard.of(settings, machine.device)
        self._update = controller_update(machine, world_model, controller, self._optimizer, settings.clip, self.guard)
        self.calibration: dict[str, float] = {}
        """Returns of the version that is trained further, if it was calibrated."""
        parts: dict[str, Resumable] = {"sampler": self._sampler}
        if self.guard is not None:
            parts["guard"] = self.guard
        self.state = TrainState({"controller": controller}, self._optimizer, rng, parts)

    def update(self) -> Metrics:
        """Learn from a batch of rollouts."""
        with ranks.sharing_rows():
            windows = ranks.own_rows(self._sampler.batch(self.settings.batch))
            return self._update(gather(self.replay, self.latents, windows, across_ends=self.world_model.across_ends))

    def status(self) -> dict[str, float]:
        """Return the calibration."""
        return self.calibration


def controller_update(
    machine: Machine,
    world_model: WorldModel,
    controller: Learner,
    optimizer: torch.optim.Optimizer,
    clip: float,
    guard: GradientGuard | None = None,
) -> Callable[[Batch], Metrics]:
    """Build the update of a controller on rollouts imagined from a batch of windows.

    With `training.cuda_graph` the whole update is one graph, rollouts included.

    Args:
        machine: Determines the precision.
        world_model: Frozen, in eval mode.
        controller: In training mode.
        optimizer: Holds its parameters.
        clip: Largest norm of the gradient.
        guard: Skips updates, see `update`.

    Returns:
        From windows of latents to the loss, its parts and the gradient norm before clipping.
    """

    def learn(batch: Batch, uniforms: Any) -> tuple[Metrics, None]:
        with machine.autocast(), torch.set_grad_enabled(controller.differentiates):
            imagined = controller.imagine(world_model, batch, uniforms)
        with machine.autocast():  # anew: the first kept copies of the weights that know no gradient
            loss, metrics = controller.loss(imagined)
        norm = update(optimizer, loss, clip, guard)
        return {"loss": loss.detach(), **metrics, "gradient_norm": norm}, None

    learn_or_replay = machine.wrap_update(learn)

    def learn_from(batch: Batch) -> Metrics:
        metrics, _ = learn_or_replay(batch, controller.draw_uniforms(world_model, batch))
        controller.after_update()
        return metrics

    return learn_from
