"""The optimization loop that every training stage shares: update, log, checkpoint, stop, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from wmcli.artifacts.failpoint import failpoint
from wmcli.errors import ArtifactError, DivergedError, Stopped
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.training.checkpoint import (
    generator_state,
    load_generator,
    load_modules,
    load_optimizer,
    load_random,
    load_tensors,
    module_tensors,
    optimizer_tensors,
    part_states,
    part_tensors,
    random_tensors,
    save_tensors,
)
from wmcli.training.device import Machine
from wmcli.training.settings import TrainingSettings

CHECKPOINT = "checkpoint.safetensors"


class Resumable(Protocol):
    """Something besides weights that changes while training, such as a sampler."""

    def state(self) -> dict[str, Any]:
        """Plain JSON values and, at the top level, NumPy arrays; both come back as they were."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on exactly where the one that gave `state` stood."""

    def continue_from(self, state: dict[str, Any]) -> None:
        """Take over what training further builds on from the `state` that a finished stage ended with."""


@dataclass
class Trainee:
    """All that changes during a stage's updates, hence all that a checkpoint holds."""

    modules: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer | None
    """None where nothing is learned by gradient."""
    rng: np.random.Generator
    parts: dict[str, Resumable] = field(default_factory=dict)
    update: int = 0
    """Updates done in this stage."""
    trained: int = 0
    """Updates that versions before this one had, when it goes on from one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What was logged last."""
    unlogged: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Metrics of each update since then."""

    def save(self, path: Path, device: torch.device) -> None:
        tensors, parts = part_tensors({name: part.state() for name, part in self.parts.items()})
        about = {
            "update": self.update,
            "trained": self.trained,
            "metrics": self.metrics,
            "unlogged": list(self.unlogged[0]) if self.unlogged else [],
            "rng": generator_state(self.rng),
            "parts": parts,
        }
        tensors |= module_tensors(self.modules) | random_tensors(device)
        if self.optimizer is not None:
            tensors |= optimizer_tensors(self.optimizer)
        if self.unlogged:
            tensors["unlogged"] = _stacked(self.unlogged)
        save_tensors(path, tensors, about)

    def load(self, path: Path, device: torch.device) -> None:
        """Go on exactly where `save` was called."""
        tensors, about = self._load_learned(path)
        load_random(tensors, device)
        self.update, self.trained, self.metrics = about["update"], about["trained"], about["metrics"]
        if about["unlogged"]:
            rows = tensors["unlogged"].to(device)
            self.unlogged = [dict(zip(about["unlogged"], row, strict=True)) for row in rows]
        states = part_states(tensors, about["parts"])
        for name, part in self.parts.items():
            part.load(states[name])
        load_generator(self.rng, about["rng"])  # after the parts: one that shares it may draw from it while it loads

    def continue_from(self, path: Path) -> None:
        """Take over the weights and moments of a finished stage, and of its samplers what still holds when the data
        has grown."""
        tensors, about = self._load_learned(path)
        self.trained = about["trained"] + about["update"]
        states = part_states(tensors, about["parts"])
        for name, part in self.parts.items():
            if name in states:
                part.continue_from(states[name])

    def _load_learned(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, about = load_tensors(path)
        load_modules(self.modules, tensors, str(path))
        if self.optimizer is not None:
            load_optimizer(self.optimizer, tensors)
        return tensors, about


def read_part(path: Path, part: str) -> dict[str, Any]:
    """The state that one part had when `Trainee.save` wrote the file, without its weights and moments.

    Raises ArtifactError when the file is not whole or has no such part.
    """
    tensors, about = load_tensors(path, f"parts/{part}/")
    if part not in about["parts"]:
        raise ArtifactError(f"{path} holds no state of '{part}' (it has: {', '.join(about['parts']) or 'none'}).")
    return part_states(tensors, about["parts"])[part]


def fit(
    trainee: Trainee,
    step: Callable[[], Mapping[str, Tensor]],
    *,
    stage: str,
    updates: int,
    folder: Path,
    machine: Machine,
    settings: TrainingSettings,
    progress: Progress,
    log: Callable[[dict[str, Any]], None],
    watch: Callable[[], dict[str, Any]] = dict,
) -> dict[str, float]:
    """Call `step` until `trainee.update == updates`; return the means of its metrics over the last stretch logged.

    `step` does one update and returns metrics as tensors; they stay on the device until a line is logged. A checkpoint
    in `folder` is taken up first. `log` gets one record per `settings.log_every` updates, with what `watch` returns
    then.

    Raises DivergedError when a metric is NaN or infinite (the last checkpoint is from before), Stopped after a signal.
    """
    checkpoint = folder / CHECKPOINT
    if checkpoint.exists():
        trainee.load(checkpoint, machine.device)
        progress.say(f"{stage}: resuming at update {trainee.update} of {updates}")
    saved_at = time.monotonic()
    started, started_update = time.monotonic(), trainee.update
    with stop_requests() as stop, progress.bar(stage, updates, "updates", start=trainee.update) as bar:
        while trainee.update < updates:
            trainee.unlogged.append(step())
            trainee.update += 1
            finished = trainee.update == updates
            due = time.monotonic() - saved_at >= settings.checkpoint_seconds or bool(stop) or finished
            logged = trainee.update % settings.log_every == 0 or finished
            if logged or due:
                means = _means(trainee.unlogged, stage, trainee.update)
                bar.show(**means)
            bar.advance()
            if logged:
                trainee.metrics, trainee.unlogged = means, []
                rate = (trainee.update - started_update) / max(time.monotonic() - started, 1e-9)
                record = {"stage": stage, "update": trainee.trained + trainee.update, "updates_per_second": rate}
                log(record | means | watch())
            if finished:
                _check_finite(trainee, stage)
            if due:
                trainee.save(checkpoint, machine.device)
                failpoint("checkpoint")
                saved_at = time.monotonic()
            if stop:
                raise Stopped(
                    f"{stage} stopped after update {trainee.update} of {updates}; the same command goes on from there."
                )
    return trainee.metrics


def _check_finite(trainee: Trainee, stage: str) -> None:
    """Raise DivergedError where the last update, whose loss nobody has seen, left weights that nobody can use."""
    for name, module in trainee.modules.items():
        for key, value in module.state_dict().items():
            # A norm that float32 cannot hold would be infinite in the next forward pass.
            if value.is_floating_point() and not bool(torch.isfinite(value.float().norm())):
                raise DivergedError(
                    f"{stage} diverged: {key} of the {name} is not finite, or too large, after update {trainee.update};"
                    " the same command would diverge again: lower the learning rate with --set."
                )


def _stacked(records: list[Mapping[str, Tensor]]) -> Tensor:
    """Metrics of R updates as one float32 (R, M), in the order of their names in the first."""
    return torch.stack(
        [torch.stack([record[name].detach().float().reshape(()) for name in records[0]]) for record in records]
    )


def _means(records: list[Mapping[str, Tensor]], stage: str, update: int) -> dict[str, float]:
    """Mean of each metric over some updates: the one place where training waits for the device."""
    names, stacked = list(records[0]), _stacked(records)
    if not bool(torch.isfinite(stacked).all()):
        first = int((~torch.isfinite(stacked)).any(1).nonzero()[0])
        bad = [name for name, value in zip(names, stacked[first].tolist(), strict=True) if not np.isfinite(value)]
        raise DivergedError(
            f"{stage} diverged: {', '.join(bad)} not finite at update {update - len(records) + first + 1};"
            " the same command would diverge again: lower the learning rate with --set."
        )
    return dict(zip(names, stacked.mean(0).tolist(), strict=True))
