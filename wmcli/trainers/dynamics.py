"""Training of a world model on segments of experience."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli import ranks
from wmcli.experience import PrioritySampler, Replay, SearchTargets
from wmcli.nn import attention_prior
from wmcli.trainers.batches import build_segment_sampler, encode_frames, gather
from wmcli.trainers.best_weights import BestWeights, validation_loss
from wmcli.trainers.held_out import HeldOutLosses
from wmcli.trainers.streams import StreamState
from wmcli.training.checkpoint import Resumable, TrainState
from wmcli.training.device import Machine, Metrics
from wmcli.training.loop import Trainer
from wmcli.training.optim import GradientGuard, Schedule, optimizer_for, update
from wmcli.training.settings import TrainingSettings
from wmcli.world_models.base import Batch, WorldModel


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
        losses: Measures losses on held-out episodes every `training.held_out_every` updates; None measures none.

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
        latents: Any = None,
        targets: SearchTargets | None = None,
        held_out: Replay | None = None,
        validation_seed: int = 0,
        losses: HeldOutLosses | None = None,
    ) -> None:
        self.world_model = world_model
        self.replay = replay
        self.settings = settings
        self.machine = machine
        self._losses, self._losses_every = losses, training.held_out_every
        rows = ranks.own_count(settings.batch, "dynamics.batch")
        self._sampler = build_segment_sampler(training, replay, world_model, rng)
        parts: dict[str, Resumable] = {"sampler": self._sampler}
        streams: StreamState | None = None
        if world_model.rows == "streams":
            streams = parts["carried"] = StreamState(world_model, rows)
        self._best: BestWeights | None = None
        if held_out is not None:
            measure = validation_loss(world_model, held_out, rows=settings.batch, machine=machine, seed=validation_seed)
            self._best = parts["best"] = BestWeights(world_model, measure)
        if latents is None and world_model.frozen_encoder:
            latents = encode_frames(world_model, replay.observation, machine)
        self._frames = replay.observation if latents is None else latents
        if targets is None and world_model.learns_from_search:
            targets = SearchTargets(replay, world_model.action_space)
        self._targets = targets
        self._optimizer = optimizer_for(settings, world_model.parameter_groups())
        self._schedule = Schedule.of(settings)
        self.guard = GradientGuard.of(settings, machine.device)
        if self.guard is not None:
            parts["guard"] = self.guard
        self._update = world_model_update(
            machine,
            world_model,
            self._optimizer,
            settings.clip,
            self.guard,
            streams=streams,
            learn_rows=self._sampler.learn if isinstance(self._sampler, PrioritySampler) else None,
        )
        self.state = TrainState({"dynamics": world_model}, self._optimizer, rng, parts)

    def update(self) -> Metrics:
        """Learn from a batch of segments; validate every `validate_every` updates and after the last."""
        done, trained = self.state.update, self.state.trained
        self._schedule.apply(self._optimizer, done, trained)
        with ranks.sharing_rows():
            windows = ranks.own_rows(self._sampler.batch(self.settings.batch))
            metrics = self._update(
                gather(self.replay, self._frames, windows, self._targets, across_ends=self.world_model.across_ends)
            )
        done += 1
        if self._best is not None and (done % self.settings.validate_every == 0 or done == self.settings.updates):
            self._best.validate(trained + done)
        return metrics

    def status(self) -> dict[str, Any]:
        """Return learned attention priors and validation losses."""
        values = attention_prior.prior_values(self.world_model)
        priors = {"priors": {name: value.tolist() for name, value in values.items()}} if values else {}
        return priors | ({} if self._best is None else self._best.metrics())

    def measure_held_out(self, since: int) -> dict[str, float]:
        """Return the losses on held-out episodes if a multiple of `training.held_out_every` lies after `since`.

        Updates count on from version to version.
        """
        if self._losses is None:
            return {}
        before, now = ((self.state.trained + update) // self._losses_every for update in (since, self.state.update))
        return self._losses() if now > before else {}

    def select_weights(self) -> None:
        """Load the weights with the lowest validation loss."""
        if self._best is not None:
            self._best.restore()


def world_model_update(
    machine: Machine,
    world_model: WorldModel,
    optimizer: torch.optim.Optimizer,
    clip: float,
    guard: GradientGuard | None = None,
    *,
    streams: StreamState | None = None,
    learn_rows: Callable[[np.ndarray], None] | None = None,
) -> Callable[[Batch], Metrics]:
    """Build the update of a world model on a batch of segments.

    Attention priors are penalized and projected. Quantities that follow the weights, such as a target network, are
    updated. With `training.cuda_graph` the whole update but the last is one graph.

    Args:
        machine: Determines the precision.
        world_model: In training mode.
        optimizer: Holds its parameters.
        clip: Largest norm of the gradient.
        guard: Skips updates, see `update`.
        streams: State to carry from batch to batch; None where each batch stands alone.
        learn_rows: Takes what each row contributed to the loss, float32 (B,), after every update, which waits for it.

    Returns:
        From a batch to the loss, its parts and the gradient norm before clipping.
    """

    def learn(batch: Batch, carried: list[Tensor]) -> tuple[Metrics, tuple[Tensor | None, list[Tensor]]]:
        weight: Tensor | None = None
        if learn_rows is not None:  # the gradient of the weights tells the rows' losses
            weight = torch.ones(len(batch.valid), 1, device=batch.valid.device, requires_grad=True)
            batch = batch._replace(weight=weight.expand_as(batch.valid))
        with machine.autocast():
            if streams is None:
                total, metrics = world_model.loss(batch)
            else:
                total, metrics, carried = streams.loss(batch, carried)
        if (penalty := attention_prior.penalty(world_model)) is not None:
            total, metrics = total + penalty, metrics | {"prior_penalty": penalty.detach()}
        norm = update(optimizer, total, clip, guard)
        attention_prior.project(world_model)
        rows = None if weight is None or weight.grad is None else weight.grad[:, 0]
        return {"loss": total.detach(), **metrics, "gradient_norm": norm}, (rows, carried)

    learn_or_replay = machine.wrap_update(learn)

    def learn_from(batch: Batch) -> Metrics:
        metrics, (rows, carried) = learn_or_replay(batch, [] if streams is None else streams.tensors)
        if streams is not None:
            streams.tensors = carried
        if learn_rows is not None and rows is not None:
            learn_rows((ranks.gather_rows(rows) / ranks.size()).cpu().numpy())
        world_model.after_update()
        return metrics

    return learn_from
