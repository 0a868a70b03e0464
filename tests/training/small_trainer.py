"""A small thing to train whose every source of randomness matters: initial weights, dropout, sampled windows.

N rows of data, B windows in a batch, L frames in a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wmcli.experience import Episodes, FrequencySampler, PrioritySampler, WindowSampler, WindowTable
from wmcli.training.checkpoint import TrainState, generator_state, module_tensors, optimizer_tensors
from wmcli.training.device import Machine, isolated_randomness
from wmcli.training.loop import Trainer, fit
from wmcli.training.optim import GradientGuard, build_optimizer, update
from wmcli.training.settings import FrequencySettings, TrainingSettings

CPU = Machine(torch.device("cpu"), "float32", 1)
DATA = torch.from_numpy(np.random.default_rng(3).normal(size=(23, 4)).astype(np.float32))
EPISODES = Episodes(np.array([0, 9, 14]), np.array([9, 5, 9]))
FREQUENCIES = FrequencySettings(temperature=0.5)


class Killed(BaseException):
    """Stands for the death of the process: nothing catches it."""


class Net(nn.Module):
    """Has parameters, a buffer that changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)


class SmallTrainer(Trainer):
    """Trains a `Net` on windows of `DATA`.

    `before` is called before each update, `more` returns more metrics, `scale` the factor of the loss. Gradients beyond
    `skip_above` are skipped.
    """

    machine = CPU

    def __init__(
        self,
        sampling: Any,
        optimizer: Any,
        rng: np.random.Generator,
        before: Callable[[int], None] = lambda done: None,
        more: Callable[[int], dict[str, float]] = lambda done: {},
        scale: Callable[[int], float] = lambda done: 1.0,
        skip_above: float = 0.0,
    ) -> None:
        net = Net()
        windows_of: dict[str, Any] = {"length": 4, "minimum": 2, "pad": "right", "rng": rng}
        sampler: WindowSampler | FrequencySampler | PrioritySampler
        if sampling == "dfs":
            sampler = FrequencySampler(
                EPISODES, np.arange(23), kind="dynamics", settings=FREQUENCIES, ratio=1.0, **windows_of
            )
        elif sampling == "prioritized":
            del windows_of["rng"]
            table = WindowTable(EPISODES, np.arange(23), **windows_of)
            sampler = PrioritySampler(table, share=0.5, temperature=1.0, rng=rng)
        else:
            sampler = WindowSampler(EPISODES, np.arange(23), sampling=sampling, **windows_of)
        self.net, self.sampler, self.before, self.more, self.scale = net, sampler, before, more, scale
        self.optimizer = build_optimizer(optimizer, net.parameters(), 1e-2, 0.1)
        parts: dict[str, Any] = {"sampler": sampler}
        if skip_above:
            self.guard = parts["guard"] = GradientGuard(skip_above, CPU.device)
        self.state = TrainState({"net": net}, self.optimizer, rng, parts)

    def update(self) -> Mapping[str, Tensor]:
        done = self.state.update
        self.before(done)
        windows = self.sampler.batch(7)
        x = DATA[torch.from_numpy(windows.rows)]  # (B, L, 4)
        squares = (self.net(x) * torch.from_numpy(windows.valid)[..., None]).square()
        if isinstance(self.sampler, PrioritySampler):
            self.sampler.learn(squares.detach().mean((1, 2)).numpy())
        loss = self.scale(done) * (squares.mean() + self.state.rng.random() * 1e-3)
        metrics = {name: torch.tensor(value) for name, value in self.more(done).items()}
        return {"loss": loss, "gradient_norm": update(self.optimizer, loss, 1.0, self.guard), **metrics}


@dataclass
class Process:
    """One process that trains: everything is built anew from the seed."""

    folder: Path | None
    sampling: Any = "windows"
    optimizer: Any = "adamw"
    seed: int = 5
    before: Callable[[int], None] = lambda done: None
    """Called with the number of updates done, before each."""
    metrics: Callable[[int], dict[str, float]] = lambda done: {}
    """More metrics of an update."""
    scale: Callable[[int], float] = lambda done: 1.0
    """Factor of the loss of an update."""
    skip_above: float = 0.0
    state: TrainState = field(init=False)
    log: list[dict[str, Any]] = field(default_factory=list)
    random: Tensor = field(init=False)
    """State of torch's global generator at the end."""

    def run(self, updates: int, *, parent: Path | None = None, **settings: Any) -> dict[str, float]:
        chosen = TrainingSettings.model_validate({"checkpoint_seconds": 0.0, "log_every": 3} | settings)
        with isolated_randomness(self.seed, CPU.device) as rng:
            trainer = SmallTrainer(
                self.sampling,
                self.optimizer,
                rng,
                lambda done: self.before(done),
                self.metrics,
                self.scale,
                self.skip_above,
            )
            self.state = trainer.state
            if parent is not None:
                self.state.continue_from(parent)
            try:
                return fit(trainer, updates, stage="learn", folder=self.folder, settings=chosen, log=self.log.append)
            finally:
                self.random = torch.get_rng_state()

    def learned(self) -> dict[str, Any]:
        """All that an update changes."""
        optimizer = self.state.optimizer
        assert optimizer is not None
        tensors = module_tensors(self.state.modules) | optimizer_tensors(optimizer) | {"random": self.random}
        parts = {
            name: {
                key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in part.state().items()
            }
            for name, part in self.state.parts.items()
        }
        return {name: tensor.tolist() for name, tensor in tensors.items()} | {
            "rng": generator_state(self.state.rng),
            **parts,
            "update": self.state.update,
            "trained": self.state.trained,
        }
