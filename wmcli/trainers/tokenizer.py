"""Training of a tokenizer on single frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from wmcli import ranks
from wmcli.experience import Replay
from wmcli.trainers.batches import build_sampler
from wmcli.training.checkpoint import Resumable, TrainState
from wmcli.training.device import Machine, Metrics
from wmcli.training.loop import Trainer
from wmcli.training.optim import GradientGuard, optimizer_for, update
from wmcli.training.settings import TrainingSettings
from wmcli.transfer import take_rows

REPORT_FRAMES = 512  # frames for the measurement of code usage


class TokenizerTrainer(Trainer):
    """Trains a tokenizer on frames of the experience.

    Args:
        tokenizer: On the machine's device.
        replay: The experience.
        settings: The section of the tokenizer.
        training: Determines the sampling of frames.
        machine: Device and precision.
        rng: Belongs to the sampler from here on.

    Raises:
        UsageError: There is no frame.
    """

    def __init__(
        self,
        tokenizer: nn.Module,
        replay: Replay,
        settings: Any,
        training: TrainingSettings,
        *,
        machine: Machine,
        rng: np.random.Generator,
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.replay = replay
        self.settings = settings
        self.machine = machine
        ranks.own_count(settings.batch, "tokenizer.batch")
        self._sampler = build_sampler(training, replay, rng, length=1, minimum=1, pad="right")
        self.learns = any(True for _ in tokenizer.parameters())
        optimizer = None
        parts: dict[str, Resumable] = {"sampler": self._sampler}
        if self.learns:
            optimizer = optimizer_for(settings, tokenizer.parameters())
            self.guard = GradientGuard.of(settings, machine.device)
            if self.guard is not None:
                parts["guard"] = self.guard
            self._update = tokenizer_update(machine, tokenizer, optimizer, settings.clip, self.guard)
        self.state = TrainState({"tokenizer": tokenizer}, optimizer, rng, parts)

    def update(self) -> Metrics:
        """Learn from a batch of frames. Not for a tokenizer without parameters, see `learns`."""
        with ranks.sharing_rows():
            windows = ranks.own_rows(self._sampler.batch(self.settings.batch))
            return self._update(self._take(windows.rows[:, 0]))

    def measure(self) -> dict[str, Any]:
        """Measure the usage of codes over frames spread evenly."""
        self.tokenizer.eval()
        count = len(self.replay)
        rows = torch.linspace(0, count - 1, min(REPORT_FRAMES, count)).long().numpy()
        with self.machine.autocast():
            return self.tokenizer.usage(self._take(rows))

    def _take(self, rows: np.ndarray) -> Any:
        """Return observations on the device."""
        return take_rows(self.replay.observation, rows, self.machine.device)


def tokenizer_update(
    machine: Machine,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    clip: float,
    guard: GradientGuard | None = None,
) -> Callable[[Any], Metrics]:
    """Build the update of a tokenizer in training mode: from frames (B, *part) to metrics.

    Metrics are the loss, its parts and the gradient norm before clipping. With `training.cuda_graph` the whole update
    is one graph.
    """

    def learn(frames: Any) -> tuple[Metrics, None]:
        with machine.autocast():
            loss, metrics = tokenizer.loss(frames)
        norm = update(optimizer, loss, clip, guard)
        return {"loss": loss.detach(), **metrics, "gradient_norm": norm}, None

    learn_or_replay = machine.wrap_update(learn)
    return lambda frames: learn_or_replay(frames)[0]
