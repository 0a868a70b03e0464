"""Best-checkpoint selection on held-out episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wmcli.errors import DivergedError
from wmcli.experience import Replay, WindowSampler
from wmcli.trainers.batches import gather
from wmcli.training.device import Machine, isolated_randomness
from wmcli.training.loop import LOWER
from wmcli.world_models.base import WorldModel


class BestWeights:
    """The weights with the lowest validation loss so far. A checkpoint holds them (`Resumable`)."""

    def __init__(self, module: nn.Module, measure: Callable[[], float]) -> None:
        self._module, self._measure = module, measure
        self._weights: dict[str, Tensor] = {}
        self._lowest = self._newest = math.inf  # the newest is NaN if it was measured and is not finite
        self._update = 0

    def validate(self, update: int) -> None:
        """Measure the loss after `update` updates, and keep the weights if it is the lowest."""
        loss = self._measure()
        self._newest = loss if math.isfinite(loss) else math.nan
        if self._newest < self._lowest:
            self._lowest, self._update = self._newest, update
            self._weights = {name: tensor.clone() for name, tensor in self._module.state_dict().items()}

    def restore(self) -> None:
        """Load the best weights into the module, if any were measured.

        Raises:
            DivergedError: No measured loss was finite, so nothing tells which weights are the best.
        """
        if not self._weights and math.isnan(self._newest):
            raise DivergedError(
                "validation diverged: no validation loss was finite, so no weights can be selected; publish the last"
                f" ones with dynamics.validate_every=0, or {LOWER}"
            )
        if self._weights:
            self._module.load_state_dict(self._weights)

    def metrics(self) -> dict[str, Any]:
        """Return the newest and the lowest loss and the update of the latter; nothing before the first validation."""
        if not self._weights:
            return {}
        return {"validation_loss": self._newest, "best_validation_loss": self._lowest, "best_update": self._update}

    def state(self) -> dict[str, Any]:
        """Return weights, losses and the update."""
        weights = {f"weight.{name}": tensor.cpu().numpy() for name, tensor in self._weights.items()}
        losses = np.array([self._lowest, self._newest])  # an array, since they may not be finite
        return {"losses": losses, "update": self._update} | weights

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `state`."""
        self._lowest, self._newest = state["losses"].tolist()
        self._update = state["update"]
        device = next(self._module.parameters()).device
        self._weights = {
            name.removeprefix("weight."): torch.from_numpy(np.array(array)).to(device)
            for name, array in state.items()
            if name.startswith("weight.")
        }

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Start anew: the experience may have grown, and losses are compared on its current episodes."""


def validation_loss(
    world_model: WorldModel, held_out: Replay, *, rows: int, machine: Machine, seed: int
) -> Callable[[], float]:
    """Build a function that returns the mean loss of whole held-out episodes, with the same samples in every call.

    Args:
        world_model: Measured in eval mode.
        held_out: Episodes that are not trained on.
        rows: Episodes per batch.
        machine: Device and precision.
        seed: Seed of all samples.

    Raises:
        UsageError: The backbone cannot read the longest of them.
    """
    runs, order = held_out.runs(across_ends=False)
    longest = int(runs.length.max())
    world_model.check_reads(longest)
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
    batches = [sampler.batch(min(rows, sampler.windows - begin)) for begin in range(0, sampler.windows, rows)]

    @torch.no_grad()
    def measure() -> float:
        world_model.eval()
        with isolated_randomness(seed, machine.device), machine.autocast():
            losses = []
            for windows in batches:
                batch = gather(held_out, held_out.observation, windows, across_ends=world_model.across_ends)
                losses.append(world_model.loss(batch)[0] * len(batch.action))
        world_model.train()
        return float(torch.stack(losses).sum()) / sampler.windows

    return measure
