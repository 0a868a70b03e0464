"""Trainers of the papers' presets on random experience, at the papers' sizes or tiny."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from systems import LATENTS, PATCHES
from torch import Tensor, nn

from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.experience import Replay
from wmcli.settings import Settings, resolve
from wmcli.spaces import Spaces
from wmcli.trainers import DynamicsTrainer, ImaginationTrainer, ReanalysisTrainer, TokenizerTrainer
from wmcli.training.device import Machine, isolated_randomness
from wmcli.training.loop import Trainer
from wmcli.training.settings import TrainingSettings

ACTIONS, EPISODES = 4, 3

_BACKBONE = ["backbone.width=16", "backbone.layers=1", "backbone.heads=2"]
_TOKENS = [*PATCHES, *_BACKBONE, "dynamics.sequence_length=6"]
_TOKENS += ["dynamics.context=2", "controller.width=12", "controller.burn_in=2", "controller.imagination_horizon=3"]
_PLANNER = ["dynamics.channels=[6, 8]", "dynamics.td_steps=2", "controller.simulations=3"]
_MEMORY = ["tokenizer.categoricals=3", "tokenizer.classes=5", "tokenizer.channels=[4, 6]", "tokenizer.strides=[4, 2]"]
_MEMORY += ["tokenizer.kernel=4", "tokenizer.posterior_width=8", "dynamics.prior_width=7", "dynamics.head_width=9"]
_MEMORY += ["backbone.width=16", "backbone.layers=1", "dynamics.sequence_length=12"]
_WINDOWS = [*LATENTS, "dynamics.sequence_length=9", "dynamics.context=3"]
_DREAMER = [*LATENTS, "dynamics.sequence_length=9", "dynamics.burn_in=2", "dynamics.context=5"]
_DREAMER += [
    "dynamics.prior_width=7",
    "tokenizer.posterior_width=8",
    "tokenizer.decoder_blocks=2",
    "tokenizer.decoder_width=8",
]
_DREAMER += ["backbone.blocks=2", "backbone.hidden_size=6", "backbone.input_width=8", "controller.starts=3"]

PRESETS: dict[str, list[str]] = {
    "rem": [*_TOKENS, "controller.latent_channels=[10]"],
    "iris": [*_TOKENS, "tokenizer.channels=32", "controller.pixel_channels=[4, 6, 8]"],
    "drama": [*_WINDOWS, "dynamics.act_window=4", "backbone.head_width=8"],
    "storm": [*_WINDOWS, "dynamics.act_window=4", "backbone.heads=2"],
    "dreamer": _DREAMER,
    "unizero": [*_PLANNER, "dynamics.sequence_length=4", "dynamics.context=2", *_BACKBONE],
    "muzero": [*_PLANNER, "dynamics.unroll_steps=2", "dynamics.frame_stack=3"],
    "s4wm-2d": [*_MEMORY, "backbone.state_size=4"],
    "s4wm-3d": [*_MEMORY, "backbone.state_size=4"],
    "rssm-tbtt-2d": _MEMORY,
    "rssm-tbtt-3d": _MEMORY,
    "tssm-xl-2d": [*_MEMORY, "backbone.heads=2"],
    "tssm-xl-3d": [*_MEMORY, "backbone.heads=2"],
}
"""What makes each tiny."""

BATCHES = {"tokenizer": 8, "dynamics": 4, "controller": 8}  # at the papers' sizes, so that the CPU keeps up
LONG = ("s4wm-3d", "tssm-xl-3d")  # episodes of 1,001 frames, of which one is enough
DROPOUT = ("backbone.dropout=0",)


def stages(preset: str) -> list[str]:
    """Return the kinds of what the preset's stages train."""
    settings = resolve(preset, [])
    learns = settings.dynamics.takes_tokenizer or settings.dynamics.trains_tokenizer
    return ["tokenizer"] * learns + ["dynamics"] + ["controller"] * settings.controller.acts


def settings_of(preset: str, tiny: bool, *overrides: str) -> Settings:
    sizes = ["environment.size=16", *PRESETS[preset]] if tiny else []
    settings = resolve(preset, [*sizes, *overrides])
    batches = BATCHES | ({"dynamics": 1} if preset in LONG and not tiny else {})
    small = [f"{key}.batch={size}" for key, size in batches.items() if hasattr(getattr(settings, key), "batch")]
    return resolve(preset, [*sizes, *small, *overrides])


def machine_of(device: str, kernels: str = "torch", *, cuda_graph: bool = False) -> Machine:
    """Choose the machine as a command does, in float32."""
    how: Any = {"device": device, "precision": "float32", "kernels": kernels, "cuda_graph": cuda_graph}
    return Machine.choose(TrainingSettings(threads=torch.get_num_threads(), **how))


def trainer_of(settings: Settings, kind: str, machine: Machine) -> Trainer:
    """Build a trainer, whose weights and experience are the same on every device."""
    torch.manual_seed(7)
    rng, device = np.random.default_rng(8), machine.device
    data = _experience(settings, device)
    assert not data.frames_on_host or settings.training.replay == "host"
    dynamics: Any = settings.dynamics
    spaces = Spaces.of_images(settings.environment.size, ACTIONS)
    tokenizer = None
    if dynamics.takes_tokenizer or dynamics.trains_tokenizer:
        tokenizer = build_tokenizer(settings, spaces).to(device)
    if kind == "tokenizer":
        assert tokenizer is not None
        return TokenizerTrainer(tokenizer, data, settings.tokenizer, settings.training, machine=machine, rng=rng)
    if dynamics.takes_tokenizer:
        tokenizer = machine.freeze(tokenizer)
    model = build_world_model(settings, tokenizer, spaces)
    if kind == "controller" and settings.controller.searches:
        _spread(model)
    model.to(device)
    if kind == "dynamics":
        return DynamicsTrainer(model.train(), data, dynamics, settings.training, machine=machine, rng=rng)
    model = machine.freeze(model)
    controller: Any = build_controller(settings, model, machine).to(device)
    if settings.controller.searches:
        return ReanalysisTrainer(model, controller, data, settings.controller, machine=machine, rng=rng)
    return ImaginationTrainer(model, controller, data, settings.controller, settings.training, machine=machine, rng=rng)


def _spread(model: nn.Module) -> None:
    """Give all matrices random numbers. Fresh heads are zero, and a search would rank the rounding of equal values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.02 * torch.randn_like(parameter))


def _experience(settings: Settings, device: torch.device) -> Replay:
    """Return some episodes of random frames, in one stream. N rows, A actions."""
    dynamics: Any = settings.dynamics
    segment = getattr(dynamics, "sequence_length", 0)
    length = segment if getattr(dynamics, "rows", None) == "episodes" else max(20, segment)
    rows, size = EPISODES * length, settings.environment.size
    rng, first = np.random.default_rng(0), np.arange(rows) % length == 0
    held = Replay(device, frames_on=settings.training.replay)
    arrays: dict[str, np.ndarray] = {
        "observation": rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8),
        "action": rng.integers(ACTIONS, size=rows).astype(np.int32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "terminated": np.roll(first, -1),
        "truncated": np.zeros(rows, bool),
        "first": first,
        "lives": np.zeros(rows, np.int16),
        "stream": np.zeros(rows, np.int16),
    }
    if settings.controller.searches:
        arrays["policy"] = rng.dirichlet(np.ones(ACTIONS), rows).astype(np.float32)
        arrays["value"] = rng.normal(size=rows).astype(np.float32)
    held.extend(arrays)
    return held


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of weights and moments on the CPU."""
    (module,) = trainer.state.modules.values()
    found = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    if trainer.state.optimizer is not None:
        for index, moments in trainer.state.optimizer.state_dict()["state"].items():
            found |= {f"{index}/{name}": value.cpu().clone() for name, value in moments.items()}
    return found


def updates(trainer: Trainer, count: int, seed: int = 9) -> list[dict[str, float]]:
    """Do some updates from a seed of torch's generators and return their metrics."""
    with isolated_randomness(seed, trainer.machine.device):
        found = []
        for _ in range(count):
            found.append({name: float(value.detach()) for name, value in trainer.update().items()})
            trainer.state.update += 1
    return found


class SameSamples:
    """Random numbers of the host for every device, and samples that the second device takes from the first.

    A sample is where a random number falls among sums, and so may differ by rounding. At most one of a thousand does.
    """

    def __init__(self) -> None:
        self._samples: list[Tensor] = []

    @contextmanager
    def __call__(self, second: bool) -> Iterator[None]:
        samples, search = iter(self._samples), torch.searchsorted

        def on_the_host(draw: Any) -> Any:
            return lambda *given, device=None, **how: draw(*given, **how).to("cpu" if device is None else device)

        def search_once(*operands: Any, **how: Any) -> Tensor:
            found = search(*operands, **how)
            if not second:
                self._samples.append(found.cpu())
                return found
            first = next(samples)
            assert (first != found.cpu()).float().mean() <= 1e-3, "samples differ by more than rounding"
            return first.to(found.device)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("rand", "randn", "randint"):
                patch.setattr(torch, name, on_the_host(getattr(torch, name)))
            patch.setattr(torch, "searchsorted", search_once)
            yield
