"""The training loop: update, log, checkpoint, stop, resume."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
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
from wmcli.training.checkpoint import CHECKPOINT, TrainState, stack_metrics
from wmcli.training.device import Machine
from wmcli.training.settings import TrainingSettings


class Trainer(ABC):
    """Training of one kind of model: updates, logged values, and the weights to keep."""

    machine: Machine
    state: TrainState
    learns: bool = True
    """False: there are no parameters, and `fit` makes no updates."""

    @abstractmethod
    def update(self) -> Mapping[str, Tensor]:
        """Do one update and return its metrics, scalars on the device."""

    def status(self) -> dict[str, Any]:
        """Return values that are logged unchanged with every record, and published at the end."""
        return {}

    def measure(self) -> dict[str, Any]:
        """Return metrics of the trained model, to publish beside the losses."""
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
        The means of the metrics in the last record.

    Raises:
        DivergedError: A metric or weight is NaN or infinite. The last checkpoint precedes it.
        Stopped: A signal arrived; the checkpoint is written.
    """
    settings, progress = settings or TrainingSettings(), progress or Progress(quiet=True)
    state, device = trainer.state, trainer.machine.device
    updates = updates if trainer.learns else 0
    checkpoint = None if folder is None else folder / CHECKPOINT
    if checkpoint is not None and ranks.first(checkpoint.exists):
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
                means = _means(state.unlogged, stage, state.update)
                bar.show(**means)
            bar.advance()
            if logged:
                state.metrics, state.unlogged = means, []
                rate = (state.update - started_update) / max(time.monotonic() - started, 1e-9)
                record = {"stage": stage, "update": state.trained + state.update, "updates_per_second": rate}
                if ranks.is_first():
                    log(record | means | trainer.status())
            if finished:
                _check_finite(state, stage)
            if due and checkpoint is not None:
                state.save(checkpoint, device)
                failpoint("checkpoint")
                saved_at = time.monotonic()
            if stops:
                raise Stopped(f"{stage} stopped after update {state.update} of {updates}; the same command resumes it.")
    return state.metrics


def _check_finite(state: TrainState, stage: str) -> None:
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
            f"{stage} diverged: {key} of the {name} is not finite, or too large, after update {state.update};"
            " lower the learning rate with --set, since the same command would diverge again."
        )


def _means(records: list[Mapping[str, Tensor]], stage: str, update: int) -> dict[str, float]:
    """Return the mean of each metric over some updates. Only here training waits for the device."""
    names, values = list(records[0]), ranks.average_metrics(stack_metrics(records))
    if not bool(torch.isfinite(values).all()):
        first = int((~torch.isfinite(values)).any(1).nonzero()[0])
        bad = [name for name, value in zip(names, values[first].tolist(), strict=True) if not np.isfinite(value)]
        raise DivergedError(
            f"{stage} diverged: {', '.join(bad)} not finite at update {update - len(records) + first + 1};"
            " lower the learning rate with --set, since the same command would diverge again."
        )
    return dict(zip(names, values.mean(0).tolist(), strict=True))
