"""The training loop: update, log, checkpoint, stop, resume.

Training has diverged when a metric or a weight is not finite, or so large that float32 cannot square it. Both are
checked before a checkpoint is written, so that one is always a place to go on from.

A loss is a spike if its size is above `SPIKE` times the median of those of the last `WINDOW` updates. Spikes are
counted and do not end training.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli import ranks
from wmcli.artifacts.failpoint import failpoint
from wmcli.errors import DivergedError, Stopped
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.training.checkpoint import CHECKPOINT, TrainState, find_checkpoint, stack_metrics
from wmcli.training.device import Machine
from wmcli.training.optim import GradientGuard
from wmcli.training.settings import TrainingSettings

SPIKE = 10.0
WINDOW = 100  # updates
FEWEST = 20  # updates before the first spike: a median of fewer says little
LARGEST = float(np.sqrt(np.finfo(np.float32).max))
LOWER = "lower the learning rate: the same training would diverge again."


class Trainer(ABC):
    """Training of one kind of model: updates, logged values, and the weights to keep."""

    machine: Machine
    state: TrainState
    learns: bool = True
    """False: there are no parameters, and `fit` makes no updates."""
    guard: GradientGuard | None = None
    """What skips updates, if anything does; `fit` logs their number."""

    @abstractmethod
    def update(self) -> Mapping[str, Tensor]:
        """Do one update and return its metrics, scalars on the device."""

    def status(self) -> dict[str, Any]:
        """Return values that are logged unchanged with every record, and published at the end."""
        return {}

    def measure(self) -> dict[str, Any]:
        """Return metrics of the trained model, to publish beside the losses."""
        return {}

    def measure_held_out(self, since: int) -> dict[str, float]:
        """Return what was due to be measured on held-out episodes in the updates after `since`, to log with them.

        It has no influence on training. All ranks call it at the same updates.
        """
        return {}

    def select_weights(self) -> None:  # noqa: B027 (most keep the last weights)
        """Load the weights to keep into the modules, unless they are the last ones."""


def fit(
    trainer: Trainer,
    updates: int,
    *,
    stage: str = "train",
    settings: TrainingSettings | None = None,
    folder: Path | None = None,
    keep_last: bool = True,
    progress: Progress | None = None,
    log: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, float]:
    """Train until `trainer.state.update == updates`.

    Metrics stay on the device until a record is logged. With a `folder`, training resumes from a checkpoint in it, and
    signals request another one. Without, nothing is written.

    Several ranks stop together, and the first one alone writes, logs and decides when a checkpoint is due.

    Args:
        trainer: Holds models, data and optimizer.
        updates: Total number of updates, those of a resumed checkpoint included.
        stage: Name for messages and log records.
        settings: Intervals of logging and of checkpoints; None takes the defaults.
        folder: Folder of the checkpoint.
        keep_last: Write a checkpoint after the last update, too.
        progress: Display of progress; None is quiet.
        log: Called with a record every `settings.log_every` updates and after the last.

    Returns:
        The means of the metrics in the last record, and the counts `loss_spikes` and `skipped_updates` of this stage.

    Raises:
        ArtifactError: The checkpoint is damaged.
        DivergedError: A metric or weight is not finite, or too large. The last checkpoint precedes it.
        Stopped: A signal arrived; the checkpoint is written.
    """
    settings, progress = settings or TrainingSettings(), progress or Progress(quiet=True)
    state, device = trainer.state, trainer.machine.device
    updates = updates if trainer.learns else 0
    checkpoint = None if folder is None else folder / CHECKPOINT
    if checkpoint is not None and ranks.first(partial(find_checkpoint, checkpoint)):
        state.load(checkpoint, device)
        progress.say(f"{stage}: resuming at update {state.update} of {updates}")
    saved_at = time.monotonic()
    started, started_update = time.monotonic(), state.update
    signals = nullcontext(False) if checkpoint is None else stop_requests()
    with signals as stop, progress.bar(stage, updates, "updates", start=state.update) as bar:
        while state.update < updates:
            state.unlogged.append(trainer.update())
            state.update += 1
            finished = state.update == updates
            waited = ranks.is_first() and time.monotonic() - saved_at >= settings.checkpoint_seconds
            waited, stops = ranks.agree(waited, stop)
            due = checkpoint is not None and (waited or stops or (finished and keep_last))
            logged = state.update % settings.log_every == 0 or finished
            if logged or due:
                values = _metrics(state.unlogged, stage, state.update)
                means = dict(zip(state.unlogged[0], values.mean(0).tolist(), strict=True))
                bar.show(**means)
            bar.advance()
            if logged:
                _count_spikes(state, values)
                state.metrics, state.unlogged = means, []
                rate = (state.update - started_update) / max(time.monotonic() - started, 1e-9)
                record = {"stage": stage, "update": state.trained + state.update, "updates_per_second": rate}
                held_out = trainer.measure_held_out((state.update - 1) // settings.log_every * settings.log_every)
                if ranks.is_first():
                    log(record | means | _counts(trainer) | trainer.status() | held_out)
            if finished or due:
                _check_weights(state, stage)
            if due and checkpoint is not None:
                state.save(checkpoint, device)
                failpoint("checkpoint")
                saved_at = time.monotonic()
            if stops:
                raise Stopped(f"{stage} stopped after update {state.update} of {updates}; the same command resumes it.")
    return state.metrics | _counts(trainer)


def _counts(trainer: Trainer) -> dict[str, int]:
    """Return what is counted over the updates of a stage. It waits for the device."""
    spikes = {"loss_spikes": trainer.state.loss_spikes} if "loss" in trainer.state.metrics else {}
    return spikes | ({} if trainer.guard is None else {"skipped_updates": trainer.guard.skipped})


def _count_spikes(state: TrainState, values: Tensor) -> None:
    """Count the spikes among the losses of the updates since the last record; `values` (R, M) of their metrics."""
    names = list(state.unlogged[0])
    if "loss" not in names:
        return
    for size in values[:, names.index("loss")].abs().tolist():
        if len(state.losses) >= FEWEST and size > SPIKE * statistics.median(state.losses):
            state.loss_spikes += 1
        state.losses = [*state.losses, size][-WINDOW:]


def _check_weights(state: TrainState, stage: str) -> None:
    """Raise DivergedError if the last update left unusable weights, which no later loss would reveal."""
    values = {
        (name, key): value
        for name, module in state.modules.items()
        for key, value in module.state_dict().items()
        if value.is_floating_point()
    }
    if not values:
        return
    # A norm that float32 cannot hold would be infinite in the next forward pass.
    finite = torch.isfinite(torch.stack([value.float().norm() for value in values.values()])).tolist()
    if not all(finite):
        name, key = list(values)[finite.index(False)]
        raise DivergedError(
            f"{stage} diverged: {key} of the {name} is not finite, or too large, after update {state.update}; {LOWER}"
        )


def _metrics(records: list[Mapping[str, Tensor]], stage: str, update: int) -> Tensor:
    """Return the metrics of some updates (R, M), on the device. Only here training waits for it.

    Raises:
        DivergedError: One is not finite, or too large.
    """
    names, values = list(records[0]), ranks.average_metrics(stack_metrics(records))
    sound = values.abs() <= LARGEST
    if not bool(sound.all()):
        first = int((~sound).any(1).nonzero()[0])
        bad = [name for name, fine in zip(names, sound[first].tolist(), strict=True) if not fine]
        fault = "too large" if bool(torch.isfinite(values[first]).all()) else "not finite"
        raise DivergedError(
            f"{stage} diverged: {', '.join(bad)} {fault} at update {update - len(records) + first + 1}; {LOWER}"
        )
    return values
