"""A world model's own losses on episodes that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from wmcli.errors import UsageError
from wmcli.experience import Replay, SearchTargets, Windows, WindowTable
from wmcli.trainers.batches import gather
from wmcli.training.checkpoint import stack_metrics
from wmcli.training.device import Machine, isolated_randomness
from wmcli.world_models.base import Batch, WorldModel

PREFIX = "held_out_"
"""Of the names of these losses."""


class HeldOutLosses:
    """Measures the losses of `WorldModel.loss` on one fixed batch of held-out windows. Training does not notice.

    Windows are those of training: segments, or whole episodes. They are spread evenly over all there are.

    Args:
        world_model: Measured in eval mode, that is without dropout.
        load: Returns the held-out episodes. It is called when the losses are first measured.
        rows: Most windows B.
        machine: Device and precision.
        seed: Of all samples, which are the same at every measurement.
    """

    def __init__(
        self, world_model: WorldModel, load: Callable[[], Replay], *, rows: int, machine: Machine, seed: int
    ) -> None:
        self._world_model = world_model
        self._load = load
        self._rows = rows
        self._machine = machine
        self._seed = seed
        self._batch: Batch | None = None

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return the loss and its parts, each under its own name behind `PREFIX`.

        Raises:
            UsageError: The episodes are too short, or too long for the backbone.
        """
        world_model = self._world_model
        world_model.eval()
        with isolated_randomness(self._seed, self._machine.device), self._machine.autocast():
            if self._batch is None:
                self._batch = self._gather(self._load())
            total, parts = world_model.loss(self._batch)
            values = {"loss": total, **parts}
            numbers = stack_metrics([values])[0].tolist()
        world_model.train()
        return {f"{PREFIX}{name}": number for name, number in zip(values, numbers, strict=True)}

    def _gather(self, replay: Replay) -> Batch:
        world_model = self._world_model
        targets = SearchTargets(replay, world_model.action_space) if world_model.learns_from_search else None
        windows = fixed_windows(world_model, replay, self._rows)
        batch = gather(replay, replay.observation, windows, targets, across_ends=world_model.across_ends)
        return batch._replace(inputs=world_model.encode(batch.inputs)) if world_model.frozen_encoder else batch


def fixed_windows(world_model: WorldModel, replay: Replay, most: int) -> Windows:
    """Return up to `most` windows of the kind that a world model learns from, at equal distances.

    Raises:
        UsageError: No episode, or stream, is long enough, or one is too long for the backbone.
    """
    whole = world_model.rows != "windows"
    across_ends = world_model.across_ends and not whole
    runs, order = replay.runs(across_ends)
    if whole:
        length, minimum, history = int(runs.length.max()), world_model.min_segment, 0
        world_model.check_reads(length)
    else:
        length, history = world_model.segment, world_model.history
        minimum = length - history if across_ends else world_model.min_segment
    if int(runs.length.max()) < minimum:
        raise UsageError(
            f"training.held_out_every: the longest held-out sequence has {int(runs.length.max())} frames, and the"
            f" dynamics model learns from {minimum}: hold out more, or set training.held_out_every=0."
        )
    table = WindowTable(runs, order, length=length, minimum=minimum, pad="right", history=history, whole=whole)
    return table.windows(np.linspace(0, len(table) - 1, min(most, len(table))).round().astype(np.int64))
