"""Training of a world model on segments of experience."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli.experience import PrioritySampler, Replay, SearchTargets
from wmcli.nn import attention_prior
from wmcli.trainers.batches import build_segment_sampler, encode_frames, gather
from wmcli.trainers.best_weights import BestWeights, validation_loss
from wmcli.trainers.streams import StreamState
from wmcli.training.checkpoint import Resumable, TrainState
from wmcli.training.device import Machine
from wmcli.training.loop import Trainer
from wmcli.training.optim import Schedule, optimizer_for, update
from wmcli.training.settings import TrainingSettings
from wmcli.world_models.base import Batch, WorldModel

Loss = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
"""Maps a batch to the loss, a scalar, and detached metrics."""


class DynamicsTrainer(Trainer):
    """Trains a world model on segments of the experience.

    Args:
        world_model: On the machine's device, in training mode.
        replay: The experience.
        settings: The section of the dynamics.
        training: Determines the sampling of segments.
        machine: Device and precision.
        rng: Belongs to the sampler from here on.
        latents: Latents (N, ...) of all frames, for a model with a frozen encoder; None encodes them.
        targets: Search results, for a model that learns from them; None takes those of the experience.
        held_out: Validation episodes that select the best weights; None keeps the last weights.
        validation_seed: Seed of the samples in validation.

    Raises:
        UsageError: The experience or the held-out episodes do not fit the settings.
    """

    def __init__(
        self,
        world_model: WorldModel,
        replay: Replay,
        settings: Any,
        training: TrainingSettings,
        *,
        machine: Machine,
        rng: np.random.Generator,
        latents: Tensor | None = None,
        targets: SearchTargets | None = None,
        held_out: Replay | None = None,
        validation_seed: int = 0,
    ) -> None:
        self.world_model = world_model
        self.replay = replay
        self.settings = settings
        self.machine = machine
        self._sampler = build_segment_sampler(training, replay, world_model, rng)
        parts: dict[str, Resumable] = {"sampler": self._sampler}
        self._loss: Loss = world_model.loss
        if world_model.rows == "streams":
            stream_state = parts["carried"] = StreamState(world_model, settings.batch)
            self._loss = stream_state.loss
        self._best: BestWeights | None = None
        if held_out is not None:
            measure = validation_loss(world_model, held_out, rows=settings.batch, machine=machine, seed=validation_seed)
            self._best = parts["best"] = BestWeights(world_model, measure)
        if latents is None and world_model.frozen_encoder:
            latents = encode_frames(world_model, replay.frames, machine)
        self._frames = replay.frames if latents is None else latents
        if targets is None and world_model.learns_from_search:
            targets = SearchTargets(replay, world_model.actions)
        self._targets = targets
        self._optimizer = optimizer_for(settings, world_model.parameter_groups())
        self._schedule = Schedule.of(settings)
        self.state = TrainState({"dynamics": world_model}, self._optimizer, rng, parts)

    def update(self) -> Mapping[str, Tensor]:
        """Learn from a batch of segments; validate every `validate_every` updates and after the last."""
        done, trained = self.state.update, self.state.trained
        self._schedule.apply(self._optimizer, done, trained)
        windows = self._sampler.batch(self.settings.batch)
        batch = gather(self.replay, self._frames, windows, self._targets, across_ends=self.world_model.across_ends)
        prioritized = self._sampler if isinstance(self._sampler, PrioritySampler) else None
        weight: Tensor | None = None
        if prioritized is not None:  # the gradient of the weights tells the rows' losses
            weight = torch.ones(len(batch.valid), 1, device=batch.valid.device, requires_grad=True)
            batch = batch._replace(weight=weight.expand_as(batch.valid))
        metrics = update_world_model(
            self.machine, self.world_model, self._optimizer, batch, self.settings.clip, loss=self._loss
        )
        if prioritized is not None:
            assert weight is not None and weight.grad is not None
            prioritized.learn(weight.grad[:, 0].cpu().numpy())
        done += 1
        if self._best is not None and (done % self.settings.validate_every == 0 or done == self.settings.updates):
            self._best.validate(trained + done)
        return metrics

    def status(self) -> dict[str, Any]:
        """Return learned attention priors and validation losses."""
        values = attention_prior.prior_values(self.world_model)
        priors = {"priors": {name: value.tolist() for name, value in values.items()}} if values else {}
        return priors | ({} if self._best is None else self._best.metrics())

    def select_weights(self) -> None:
        """Load the weights with the lowest validation loss."""
        if self._best is not None:
            self._best.restore()


def update_world_model(
    machine: Machine,
    world_model: WorldModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    clip: float,
    loss: Loss | None = None,
) -> dict[str, Tensor]:
    """Do one update on a batch of segments.

    Attention priors are penalized and projected. Quantities that follow the weights, such as a target network, are
    updated.

    Args:
        machine: Determines the precision.
        world_model: In training mode.
        optimizer: Holds its parameters.
        batch: Segments to learn from.
        clip: Largest norm of the gradient.
        loss: Replaces the model's own, where state is carried from batch to batch.

    Returns:
        The loss, its parts and the gradient norm before clipping, scalars on the device.
    """
    with machine.autocast():
        total, metrics = (loss or world_model.loss)(batch)
    if (penalty := attention_prior.penalty(world_model)) is not None:
        total, metrics = total + penalty, metrics | {"prior_penalty": penalty.detach()}
    norm = update(optimizer, total, clip)
    attention_prior.project(world_model)
    world_model.after_update()
    return {"loss": total, **metrics, "gradient_norm": norm}
