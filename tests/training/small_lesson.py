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

from wmcli.experience import Episodes, FrequencySampler, WindowSampler
from wmcli.progress import Progress
from wmcli.training.checkpoint import generator_state, module_tensors, optimizer_tensors
from wmcli.training.device import Machine, isolated_randomness
from wmcli.training.loop import Trainee, fit
from wmcli.training.optim import build_optimizer, update
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


@dataclass
class Lesson:
    """One process that trains: everything made anew from the seed."""

    folder: Path
    sampling: Any = "windows"
    optimizer: Any = "adamw"
    seed: int = 5
    before: Callable[[int], None] = lambda done: None
    """Called with the number of updates done, before each."""
    metrics: Callable[[int], dict[str, float]] = lambda done: {}
    """More metrics of an update."""
    trainee: Trainee = field(init=False)
    log: list[dict[str, Any]] = field(default_factory=list)
    random: Tensor = field(init=False)
    """State of torch's global generator at the end."""

    def run(self, updates: int, *, parent: Path | None = None, **settings: Any) -> dict[str, float]:
        chosen = TrainingSettings.model_validate({"checkpoint_seconds": 0.0, "log_every": 3} | settings)
        with isolated_randomness(self.seed, CPU.device) as rng:
            net = Net()
            windows_of: dict[str, Any] = {"length": 4, "minimum": 2, "pad": "right", "rng": rng}
            sampler: WindowSampler | FrequencySampler
            if self.sampling == "dfs":
                sampler = FrequencySampler(
                    EPISODES, np.arange(23), kind="dynamics", settings=FREQUENCIES, ratio=1.0, **windows_of
                )
            else:
                sampler = WindowSampler(EPISODES, np.arange(23), sampling=self.sampling, **windows_of)
            optimizer = build_optimizer(self.optimizer, net.parameters(), 1e-2, 0.1)
            self.trainee = Trainee({"net": net}, optimizer, rng, {"sampler": sampler})
            if parent is not None:
                self.trainee.continue_from(parent)

            def step() -> Mapping[str, Tensor]:
                done = self.trainee.update
                self.before(done)
                windows = sampler.batch(7)
                x = DATA[torch.from_numpy(windows.rows)]  # (B, L, 4)
                loss = (net(x) * torch.from_numpy(windows.valid)[..., None]).square().mean() + rng.random() * 1e-3
                metrics = {name: torch.tensor(value) for name, value in self.metrics(done).items()}
                return {"loss": loss, "gradient_norm": update(optimizer, loss, 1.0), **metrics}

            try:
                return fit(
                    self.trainee,
                    step,
                    stage="learn",
                    updates=updates,
                    folder=self.folder,
                    machine=CPU,
                    settings=chosen,
                    progress=Progress(quiet=True),
                    log=self.log.append,
                )
            finally:
                self.random = torch.get_rng_state()

    def learned(self) -> dict[str, Any]:
        """All that an update changes."""
        trainee = self.trainee
        tensors = module_tensors(trainee.modules) | optimizer_tensors(trainee.optimizer) | {"random": self.random}
        state = trainee.parts["sampler"].state()
        return {name: tensor.tolist() for name, tensor in tensors.items()} | {
            "rng": generator_state(trainee.rng),
            "sampler": {key: value.tolist() if key == "counts" else value for key, value in state.items()},
            "update": trainee.update,
            "trained": trainee.trained,
        }
