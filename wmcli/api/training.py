"""Training on experience in memory, without a run directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from wmcli.api.experience import Experience, check_fits
from wmcli.api.models import ControllerModel, DynamicsModel, TokenizerModel
from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.controllers.base import NO_CONTROLLER, Learner, NoControllerSettings
from wmcli.errors import UsageError
from wmcli.progress import Progress
from wmcli.settings import Settings
from wmcli.trainers import DynamicsTrainer, ImaginationTrainer, TokenizerTrainer
from wmcli.training.device import Machine, derived_seed, isolated_randomness
from wmcli.training.loop import Trainer, fit

T = TypeVar("T", bound=Trainer)


def train_tokenizer(
    settings: Settings, experience: Experience, *, device: str = "auto", quiet: bool = True
) -> TokenizerModel:
    """Train a tokenizer for `tokenizer.updates` updates.

    Args:
        settings: Sections `tokenizer`, `training` and `seed` count.
        experience: On the same device.
        device: "auto", "cpu", "cuda" or "cuda:1".
        quiet: Show no progress on stderr.

    Raises:
        UsageError: The settings have no tokenizer, or the experience does not fit.
        DivergedError: A loss or weight is not finite.
    """
    machine = _training_machine(settings, device)
    check_fits(experience, None, machine)

    def build(rng: np.random.Generator) -> TokenizerTrainer:
        tokenizer = build_tokenizer(settings, experience.spaces).to(machine.device)
        return TokenizerTrainer(
            tokenizer, experience.replay, settings.tokenizer, settings.training, machine=machine, rng=rng
        )

    trainer, metrics = _fit(build, settings, machine, "train-tokenizer", settings.tokenizer.updates, quiet)
    return TokenizerModel(trainer.tokenizer.eval().requires_grad_(False), settings, machine, metrics)


def train_dynamics(
    settings: Settings,
    experience: Experience,
    *,
    tokenizer: TokenizerModel | None = None,
    validation: Experience | None = None,
    device: str = "auto",
    quiet: bool = True,
) -> DynamicsModel:
    """Train a dynamics model for `dynamics.updates` updates.

    Args:
        settings: Sections `tokenizer`, `dynamics`, `backbone`, `training` and `seed` count.
        experience: On the same device.
        tokenizer: For kinds that take a trained one.
        validation: Episodes to select weights by, for `dynamics.validate_every`.
        device: "auto", "cpu", "cuda" or "cuda:1".
        quiet: Show no progress on stderr.

    Raises:
        UsageError: A tokenizer is missing or not wanted, or the experience does not fit.
        DivergedError: A loss or weight is not finite.
    """
    dynamics, machine = settings.dynamics, _training_machine(settings, device)
    check_fits(experience, None, machine)
    if dynamics.takes_tokenizer != (tokenizer is not None):
        need = "need a trained one: give tokenizer=" if tokenizer is None else "take none: omit it"
        raise UsageError(f"tokenizer: dynamics of kind '{dynamics.kind}' {need}.")
    if dynamics.needs_validation and validation is None:
        raise UsageError("validation: dynamics.validate_every selects weights on held-out episodes: give some, or 0.")

    def build(rng: np.random.Generator) -> DynamicsTrainer:
        model = None if tokenizer is None else tokenizer.tokenizer
        if dynamics.trains_tokenizer:
            model = build_tokenizer(settings, experience.spaces)
        world_model = build_world_model(settings, model, experience.spaces).to(machine.device).train()
        return DynamicsTrainer(
            world_model,
            experience.replay,
            dynamics,
            settings.training,
            machine=machine,
            rng=rng,
            held_out=validation.replay if validation is not None and dynamics.needs_validation else None,
            validation_seed=derived_seed(settings.seed, "validation"),
        )

    trainer, metrics = _fit(build, settings, machine, "train-dynamics", dynamics.updates, quiet)
    return DynamicsModel(machine.freeze(trainer.world_model), settings, machine, metrics)


def train_controller(
    settings: Settings, dynamics: DynamicsModel, experience: Experience, *, quiet: bool = True
) -> ControllerModel:
    """Train a controller in imagination for `controller.updates` updates, on the device of the dynamics model.

    A planner has nothing to learn and is returned as it is.

    Args:
        settings: Sections `controller`, `training` and `seed` count.
        dynamics: The world model to learn in.
        experience: Whose frames rollouts start from.
        quiet: Show no progress on stderr.

    Raises:
        UsageError: The settings have no controller, the world model has learned no rewards, or the experience does not
            fit.
        DivergedError: A loss or weight is not finite.
    """
    machine, world_model = dynamics.machine, dynamics.world_model
    check_fits(experience, dynamics.spaces, machine)
    if isinstance(settings.controller, NoControllerSettings):
        raise UsageError(NO_CONTROLLER)
    if settings.controller.searches:
        controller = build_controller(settings, world_model, machine).to(machine.device)
        return ControllerModel(machine.freeze(controller), dynamics, settings, machine)
    if not world_model.learns_rewards:
        raise UsageError(
            "dynamics.reward = none: this world model has learned no rewards, so there is nothing to gain."
        )

    ratio = dynamics.settings.dynamics.batch / settings.controller.batch

    def build(rng: np.random.Generator) -> ImaginationTrainer:
        controller = build_controller(settings, world_model).to(machine.device)
        assert isinstance(controller, Learner)
        return ImaginationTrainer(
            world_model,
            controller,
            experience.replay,
            settings.controller,
            settings.training,
            machine=machine,
            rng=rng,
            ratio=ratio,
        )

    trainer, metrics = _fit(build, settings, machine, "imagine", settings.controller.updates, quiet)
    return ControllerModel(machine.freeze(trainer.controller), dynamics, settings, machine, metrics)


def _fit(
    build: Callable[[np.random.Generator], T],
    settings: Settings,
    machine: Machine,
    stage: str,
    updates: int,
    quiet: bool,
) -> tuple[T, dict[str, Any]]:
    """Train as the stage of that name does, without its run directory.

    Equal seeds give equal weights. They are those of the stage where it loads no other model before it builds its own.
    """
    with isolated_randomness(derived_seed(settings.seed, stage, 0), machine.device) as rng:
        trainer = build(rng)
        losses = fit(trainer, updates, stage=stage, settings=settings.training, progress=Progress(quiet))
        trainer.select_weights()
        return trainer, {**losses, **trainer.measure(), **trainer.status(), "updates": updates}


def _training_machine(settings: Settings, device: str) -> Machine:
    """Return the machine to train on, as the settings have it; `device` goes first unless it is "auto"."""
    chosen = settings.training.device if device == "auto" else device
    return Machine.choose(settings.training.model_copy(update={"device": chosen}))
