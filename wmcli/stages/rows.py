"""What world models are trained on row by row, those over latents on windows, whole episodes, or streams with the state
carried over; and the choice of weights by episodes that nobody learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wmcli.artifacts import Artifact
from wmcli.backbones import map_state
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError
from wmcli.experience import Memory, StreamSampler, WindowSampler
from wmcli.settings import Settings
from wmcli.stages.context import Context
from wmcli.stages.latents import gather
from wmcli.stages.sampling import Sampler, build_sampler
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.training.loop import Resumable, Trainee
from wmcli.training.optim import decay_rates, schedule_rates
from wmcli.world_models.base import Batch, WorldModel
from wmcli.world_models.latent import Carry, LatentWorldModel, LatentWorldModelSettings


class Rows:
    """How a world model goes through its experience: what a batch is and how its loss is found, at which rate an update
    learns, and which weights are kept."""

    sampler: Sampler | StreamSampler
    loss: Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
    parts: dict[str, Resumable]
    """What changes while training, the sampler included."""

    def __init__(self, context: Context, memory: Memory, model: WorldModel, rng: np.random.Generator) -> None:
        settings = context.settings
        self.sampler = build_sampler(
            settings,
            memory,
            rng,
            length=model.segment,
            minimum=1 if settings.dynamics.encoder == "itself" else settings.dynamics.context + 1,
            pad="right",
            history=model.history,
            across_ends=model.across_ends,
        )
        self.loss, self.parts = model.loss, {"sampler": self.sampler}
        self._decay_after = getattr(settings.dynamics, "decay_after", ())

    def set_rates(self, optimizer: torch.optim.Optimizer, trainee: Trainee) -> None:
        """Before an update."""
        decay_rates(optimizer, self._decay_after, trainee.trained + trainee.update)

    def look(self, done: int, trained: int) -> None:
        """After `done` updates of this stage, behind `trained` of those before it."""

    def told(self) -> dict[str, Any]:
        """For the log."""
        return {}

    def choose(self) -> None:
        """Put the weights to publish into the model."""


class LatentRows(Rows):
    """That of a latent world model, as its settings have it.

    Raises UsageError when a row is an episode and one is longer, or when the backbone cannot read a validation episode,
    ArtifactError when there are none of these to look at.
    """

    def __init__(
        self, context: Context, frames: Artifact, memory: Memory, model: LatentWorldModel, rng: np.random.Generator
    ) -> None:
        settings = self._settings = model.settings
        self.sampler = build_row_sampler(context.settings, memory, rng, model)
        self.loss, self.parts = model.loss, {"sampler": self.sampler}
        if settings.rows == "streams":
            carried = self.parts["carried"] = Carried(model, settings.batch)
            self.loss = carried.loss
        self._best: Best | None = None
        if settings.validate_every:
            self._best = self.parts["best"] = Best(model, validation_loss(context, frames, model))

    def set_rates(self, optimizer: torch.optim.Optimizer, trainee: Trainee) -> None:
        settings = self._settings
        warmup = 0 if settings.optimizer == "laprop" else settings.warmup  # that one warms up by itself
        schedule_rates(optimizer, trainee.update, warmup=warmup, schedule=settings.schedule, updates=settings.updates)

    def look(self, done: int, trained: int) -> None:
        every = self._settings.validate_every
        if self._best is not None and (done % every == 0 or done == self._settings.updates):
            self._best.look(trained + done)

    def told(self) -> dict[str, Any]:
        return {} if self._best is None else self._best.told()

    def choose(self) -> None:
        if self._best is not None:
            self._best.take()


def check_rows(settings: Settings) -> None:
    """Raises UsageError where a latent world model would not get what it needs of experience that is still to be
    collected: episodes that fit into its rows, and validation episodes."""
    dynamics, task = settings.dynamics, TASKS.get(settings.environment.id)
    if not isinstance(dynamics, LatentWorldModelSettings):
        return
    if dynamics.validate_every:
        check_held_back(settings, "validation", "dynamics.validate_every", none="0")
    if dynamics.rows == "episodes" and task is not None and settings.collect.policy != "learned":
        _check_length(task.context + task.query, dynamics.sequence_length)


def check_held_back(settings: Settings, part: Literal["validation", "test"], key: str, *, none: str) -> None:
    """Raises UsageError where collecting holds back no episodes of a `part` that the setting `key` needs unless it is
    `none`."""
    policy = settings.collect.policy
    if policy == "learned":
        lacking = "collect.policy = learned holds none back: set collect.policy=scripted"
    elif not getattr(settings.collect, part):
        lacking = f"collect.{part} = 0: set collect.{part}=100"
    else:
        return
    raise UsageError(f"{key} needs {part} episodes, and {lacking}, or {key}={none}.")


def _check_length(longest: int, horizon: int) -> None:
    if longest > horizon:
        raise UsageError(
            f"dynamics.sequence_length = {horizon}: a row is a whole episode (dynamics.rows = episodes), and one has"
            f" {longest} frames; set dynamics.sequence_length={longest}, or rows to windows or streams."
        )


def check_reads(model: LatentWorldModel, frames: int) -> None:
    """Raises UsageError for a backbone that cannot read so many frames in a row."""
    limit = model.backbone.max_length
    if limit is not None and frames > limit:
        raise UsageError(
            f"dynamics.sequence_length = {limit}: this backbone has learned as many positions, and {frames} frames in a"
            f" row are to be read; train with dynamics.sequence_length={frames}, or with another backbone.kind."
        )


def build_row_sampler(
    settings: Settings, memory: Memory, rng: np.random.Generator, model: LatentWorldModel
) -> Sampler | StreamSampler:
    """What draws the rows that `dynamics.rows` names. Raises UsageError when an episode is longer than a row."""
    if model.settings.rows == "windows":
        across_ends = model.across_ends
        return build_sampler(
            settings, memory, rng, length=model.segment, minimum=2, pad="right", across_ends=across_ends
        )
    runs, order = memory.runs(across_ends=False)
    if model.settings.rows == "streams":
        return StreamSampler(runs, order, length=model.segment, rng=rng)
    longest = int(runs.length.max(initial=0))
    _check_length(longest, model.segment)
    return WindowSampler(runs, order, length=longest, minimum=2, pad="right", whole=True, sampling="windows", rng=rng)


class Carried:
    """The state that each stream's next chunk begins with: a part of what a checkpoint holds."""

    def __init__(self, model: LatentWorldModel, rows: int) -> None:
        self._model = model
        self._carry = model.no_carry(rows)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """As the model's own, of the frames behind those of the call before."""
        total, log, after = self._model.carried_loss(batch, self._carry)
        assert after is not None
        self._carry = after
        return total, log

    def state(self) -> dict[str, Any]:
        """The tensors of the carry, numbered in its order."""
        return {str(index): tensor.float().cpu().numpy() for index, tensor in enumerate(_tensors(self._carry))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        numbers = iter(range(len(state)))

        def saved(like: Tensor) -> Tensor:
            return torch.from_numpy(np.array(state[str(next(numbers))])).to(like.device, like.dtype)

        self._carry = map_state(saved, self._carry)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Training goes on with new streams."""


def _tensors(carry: Carry) -> list[Tensor]:
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_state(take, carry)
    return found


class Best:
    """The weights with the lowest loss on validation episodes so far: a part of what a checkpoint holds."""

    def __init__(self, module: nn.Module, measure: Callable[[], float]) -> None:
        self._module, self._measure = module, measure
        self._weights: dict[str, Tensor] = {}
        self._lowest = self._newest = float("inf")
        self._update = 0

    def look(self, update: int) -> None:
        """Measure, and keep the weights as they are after `update` updates if they are the best."""
        self._newest = self._measure()
        if self._newest < self._lowest:
            self._lowest, self._update = self._newest, update
            self._weights = {name: tensor.clone() for name, tensor in self._module.state_dict().items()}

    def take(self) -> None:
        """Put the best weights into the model."""
        if self._weights:
            self._module.load_state_dict(self._weights)

    def told(self) -> dict[str, Any]:
        """For the log: nothing before the first look."""
        if not self._weights:
            return {}
        return {"validation_loss": self._newest, "best_validation_loss": self._lowest, "best_update": self._update}

    def state(self) -> dict[str, Any]:
        """Weights and numbers."""
        weights = {f"weight.{name}": tensor.cpu().numpy() for name, tensor in self._weights.items()}
        losses = np.array([self._lowest, self._newest])  # an array, since they may be infinite
        return {"losses": losses, "update": self._update} | weights

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._lowest, self._newest = state["losses"].tolist()
        self._update = state["update"]
        device = next(self._module.parameters()).device
        self._weights = {
            name.removeprefix("weight."): torch.from_numpy(np.array(array)).to(device)
            for name, array in state.items()
            if name.startswith("weight.")
        }

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Training further looks anew: the experience may have grown, and losses are compared on what it holds now."""


def validation_loss(context: Context, frames: Artifact, model: LatentWorldModel) -> Callable[[], float]:
    """The mean loss on the validation episodes of `frames`, each whole, with the same draws in every call.

    Raises ArtifactError when there are none, UsageError for a backbone that cannot read one.
    """
    memory = context.held_out(frames, "validation")
    runs, order = memory.runs(across_ends=False)
    size, longest = context.settings.dynamics.batch, int(runs.length.max())
    check_reads(model, longest)
    sampler = WindowSampler(
        runs,
        order,
        length=longest,
        minimum=1,
        pad="right",
        whole=True,
        sampling="windows",
        rng=np.random.default_rng(0),
    )
    rows = [sampler.batch(min(size, sampler.windows - begin)) for begin in range(0, sampler.windows, size)]
    seed = derived_seed(context.settings.seed, "validation")

    @torch.no_grad()
    def measure() -> float:
        model.eval()
        with isolated_randomness(seed, context.machine.device), context.machine.autocast():
            batches = (gather(memory, memory.frames, windows, across_ends=model.across_ends) for windows in rows)
            losses = [model.loss(batch)[0] * len(batch.action) for batch in batches]
        model.train()
        return float(torch.stack(losses).sum()) / sampler.windows

    return measure
