"""One tiny run of each kind of system, and a look at every single update that a training stage makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_run import TINY, TINY_S4WM
from torch import Tensor, nn

from wmcli.artifacts import Artifact
from wmcli.stages import train
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.imagine import imagine
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.training.checkpoint import WEIGHTS, load_tensors

_MACHINE = ["training.device=cpu", "training.precision=float32", "training.threads=1", "training.log_every=1"]
_GAME = ["environment.size=16", "environment.count=3", "collect.steps=60", *_MACHINE]
_PLANNING = ["dynamics.td_steps=2", "dynamics.channels=[6, 8]", "dynamics.batch=4"]
_SEARCH = ["controller.simulations=3", "controller.batch=5", "controller.updates=2"]
SYSTEMS: dict[str, tuple[str, list[str]]] = {
    "rem": ("quickstart", [*TINY, "collect.steps=60", "dynamics.warmup=0", "training.log_every=1"]),
    "drama": (
        "drama-quick",
        [
            *_GAME,
            *("tokenizer.categoricals=4", "tokenizer.classes=5", "tokenizer.channels=[6, 8]"),
            *("tokenizer.strides=[2, 2]", "tokenizer.batch=7", "tokenizer.warmup=0"),
            *("dynamics.sequence_length=9", "dynamics.context=3", "dynamics.act_window=4", "dynamics.head_width=10"),
            *("dynamics.batch=4", "dynamics.warmup=0", "backbone.width=16", "backbone.layers=1"),
            *("backbone.dropout=0.25", "backbone.head_width=8", "alternatives.backbone.transformer.heads=2"),
            *("controller.actor_width=12", "controller.critic_width=14", "controller.imagination_horizon=2"),
            *("controller.batch=6", "controller.warmup=0"),
        ],
    ),
    "dreamer": (
        "dreamer-quick",
        [
            *_GAME,
            *("tokenizer.categoricals=4", "tokenizer.classes=5", "tokenizer.channels=[6]", "tokenizer.strides=[4]"),
            *("tokenizer.posterior_width=9", "tokenizer.mlp_width=11", "tokenizer.mlp_layers=1"),
            *("dynamics.prior_width=7", "dynamics.head_width=10", "dynamics.sequence_length=9", "dynamics.context=3"),
            *("dynamics.batch=4", "dynamics.warmup=0", "backbone.width=16", "backbone.blocks=2"),
            *("backbone.hidden_size=8", "backbone.input_width=8"),
            *("controller.actor_width=12", "controller.critic_width=14", "controller.imagination_horizon=2"),
            *("controller.starts=2", "controller.batch=6", "controller.warmup=0"),
        ],
    ),
    "s4wm": (
        "memory-small",
        [
            *TINY_S4WM,
            *("environment.id=wm/DistractingMemory-20-v0", "collect.episodes=4", "collect.validation=2"),
            *("collect.test=1", "dynamics.head_width=9", "dynamics.sequence_length=50", "dynamics.warmup=0"),
            *("dynamics.validate_every=0", "backbone.dropout=0.25", "training.log_every=1"),
        ],
    ),
    "unizero": (
        "unizero-quick",
        [
            *_GAME,
            *_PLANNING,
            *_SEARCH,
            *("dynamics.sequence_length=4", "dynamics.context=2", "backbone.width=16", "backbone.layers=1"),
            *("backbone.dropout=0.25", "backbone.heads=2"),
        ],
    ),
    "muzero": ("muzero-quick", [*_GAME, *_PLANNING, *_SEARCH, "dynamics.unroll_steps=2", "dynamics.frame_stack=3"]),
    "cells": (
        "gridworld",
        [
            *("environment.count=3", "collect.steps=60", "dynamics.sequence_length=4", "dynamics.batch=3"),
            *("backbone.width=16", "backbone.layers=1", "backbone.dropout=0.25", "controller.imagination_horizon=2"),
            *("controller.width=8", "controller.latent_channels=[4]", "controller.burn_in=2", "controller.batch=3"),
            *_MACHINE,
        ],
    ),
}
"""The preset and what makes it tiny."""
STAGES: dict[str, Callable[..., Artifact]] = {
    "tokenizer": train_tokenizer,
    "dynamics": train_dynamics,
    "controller": imagine,
}

Make = Callable[..., Path]
"""See the fixture `make`."""


def opened(folder: Path, *overrides: str, **how: bool) -> Context:
    """The context of one command."""
    context = open_context(folder, None, overrides, create=False, quiet=True, **how)
    context.pictures = False
    return context


def begun(name: str, folder: Path) -> Path:
    """A new run: with experience and, where it has one of its own, a tokenizer."""
    preset, overrides = SYSTEMS[name]
    context = open_context(folder, preset, overrides, create=True, quiet=True)
    collect(context)
    context.pictures = False
    if context.settings.dynamics.encoder == "tokenizer":
        train_tokenizer(context)
    return folder


class Update(NamedTuple):
    """What one update found and left. Tensors are copies, by the names of the module's `state_dict`."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gradient: dict[str, Tensor]
    """After clipping."""
    rates: list[float]
    """Learning rates of the optimizer's groups."""
    metrics: dict[str, float]


def learn(run: Path, kind: str, *overrides: str, **how: bool) -> tuple[Artifact, list[Update]]:
    """Call the stage that makes `kind`: what it published, and each of its updates."""
    seen: list[Update] = []
    fit = train.fit

    def watched(trainer: Any, updates: int, **given: Any) -> dict[str, float]:
        (module,) = trainer.state.modules.values()
        update = trainer.update

        def one() -> Mapping[str, Tensor]:
            before = tensors(module)
            metrics = update()
            gradient = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            optimizer = trainer.state.optimizer
            rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
            numbers = {name: float(value.detach()) for name, value in metrics.items()}
            seen.append(Update(before, tensors(module), gradient, rates, numbers))
            return metrics

        trainer.update = one
        return fit(trainer, updates, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "fit", watched)
        return STAGES[kind](opened(run, *overrides, **how)), seen


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """A copy of its parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two modules hold the same bits."""
    assert one.keys() == other.keys() and one
    return all(torch.equal(value, other[name]) for name, value in one.items())


def weights(artifact: Artifact, file: str = WEIGHTS) -> dict[str, Tensor]:
    """Those of its model, as published or as they were last (`TRAINING`)."""
    found, _ = load_tensors(artifact.file(file), "model/")
    return {name.split("/", 2)[2]: value for name, value in found.items()}
