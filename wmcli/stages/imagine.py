"""`wm imagine`: train the controller on rollouts of the dynamics model, or search the experience again with it.

A planner has no weights of its own. Here it searches inside the newest model at frames that were played before
(reanalysis). Its findings are published with it, and `wm train-dynamics` learns policy and value from them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.artifacts.environment import check_same_environment
from wmcli.assemble import build_controller, load_world_model, settings_of
from wmcli.controllers.base import NO_CONTROLLER, Learner, NoControllerSettings
from wmcli.errors import UsageError
from wmcli.stages.context import Context
from wmcli.stages.pictures import imagined_beside_real, write_imagination
from wmcli.stages.train import check_descent, latents_of, parent_of, train
from wmcli.trainers import ImaginationTrainer, ReanalysisTrainer
from wmcli.trainers.calibration import calibrate
from wmcli.training.checkpoint import TRAINING, read_part
from wmcli.training.device import derived_seed


def imagine(
    context: Context, *, dynamics: str | None = None, experience: str | None = None, parent: str | None = None
) -> Artifact:
    """Train the run's controller in imagination for `controller.updates` updates and publish it.

    A planner searches `controller.batch` frames again in each of them.

    Args:
        context: The run.
        dynamics: Reference; None is the newest.
        experience: Reference; None is the newest.
        parent: Reference to the version to train further; None trains anew, with `--more` the newest.

    Raises:
        ArtifactError: An input is missing or of another environment.
        UsageError: The dynamics model has learned no rewards, or the settings have no controller.
        DivergedError: A loss or weight is not finite.
        Stopped: A signal arrived; the same command resumes.
    """
    settings = context.settings.controller
    if isinstance(settings, NoControllerSettings):
        raise UsageError(NO_CONTROLLER)
    frames = context.run.resolve(experience or "experience", "experience")
    model = context.run.resolve(dynamics or "dynamics", "dynamics")
    for artifact in (frames, model):
        check_same_environment(context.environment, artifact)
    inputs = {"experience": frames, "dynamics": model} | parent_of(context, "controller", parent)
    publish = partial(
        train,
        context,
        "imagine",
        "controller",
        sections=("environment", "controller"),
        inputs=inputs,
        references={"dynamics": dynamics, "experience": experience},
        updates=settings.updates,
    )
    if context.settings.controller.searches:
        return publish(build=partial(_reanalysis, context, frames, model))
    encoder = _encoder(model, inputs.get("parent"))
    return publish(
        build=partial(_imagination, context, frames, model, encoder),
        measure_parent=partial(_calibrate, context, frames, inputs.get("parent")),
        draw=_draw_imagination,
    )


def _encoder(model: Artifact, parent: Artifact | None) -> Artifact | None:
    """Return the artifact that encodes frames for `model`, None where that is not learned.

    Raises:
        ArtifactError: `parent`, a controller to train further, learned with one that this does not descend from.
    """
    settings = settings_of(model).dynamics
    if not settings.learns_encoder:
        return None
    encoder = model.input("tokenizer") if settings.takes_tokenizer else model
    if parent is not None:
        before = parent.inputs["dynamics"] if encoder is model else parent.input("dynamics").inputs["tokenizer"]
        check_descent(encoder, parent, before)
    return encoder


def _imagination(
    context: Context, frames: Artifact, model: Artifact, encoder: Artifact | None, rng: np.random.Generator
) -> ImaginationTrainer:
    """Load the world model and build the controller that learns in its imagination."""
    settings, machine, replay = context.settings, context.machine, context.experience(frames)
    assert not isinstance(settings.controller, NoControllerSettings)
    world_model = load_world_model(model, machine, settings)
    if not world_model.learns_rewards:
        raise UsageError(
            f"{model.name} has learned no rewards (dynamics.reward = none), and without them there is nothing to gain:"
            " train dynamics with another dynamics.reward."
        )
    latents = latents_of(context, world_model, "rules" if encoder is None else encoder.digest, replay)
    controller = build_controller(settings, world_model).to(machine.device)
    assert isinstance(controller, Learner)
    return ImaginationTrainer(
        world_model,
        controller,
        replay,
        settings.controller,
        settings.training,
        machine=machine,
        rng=rng,
        latents=latents,
        counts=_counts(context, model, frames) if settings.training.sampling == "dfs" else None,
        ratio=settings_of(model).dynamics.batch / settings.controller.batch,
    )


def _calibrate(context: Context, frames: Artifact, parent: Artifact | None, trainer: ImaginationTrainer) -> None:
    """Calibrate the parent on the newest experience, if that is its own."""
    player = frames.inputs.get("controller")
    if parent is not None and player is not None and player.digest == parent.digest:
        seed = derived_seed(context.settings.seed, "calibration", trainer.state.trained)
        trainer.calibration = calibrate(trainer, int(frames.metrics["steps"]), seed)


def _draw_imagination(payload: Path, trainer: ImaginationTrainer) -> None:
    world_model = trainer.world_model
    with trainer.machine.autocast():
        write_imagination(payload, imagined_beside_real(world_model, trainer.replay, world_model.context))


def _reanalysis(context: Context, frames: Artifact, model: Artifact, rng: np.random.Generator) -> ReanalysisTrainer:
    """Load the world model and build the search in it."""
    replay, world_model = context.experience(frames), load_world_model(model, context.machine)
    controller = build_controller(context.settings, world_model, context.machine).to(context.machine.device)
    return ReanalysisTrainer(
        world_model, controller, replay, context.settings.controller, machine=context.machine, rng=rng
    )


def _counts(context: Context, model: Artifact, frames: Artifact) -> np.ndarray:
    """Return how often each row of the experience started a segment that the dynamics model was trained on, int64.

    Empty for a model whose sampler did not count, or that was trained on other experience.
    """
    ancestor = frames
    while ancestor.digest != model.inputs["experience"].digest:
        if "previous" not in ancestor.inputs:
            context.progress.warn(
                f"{model.name} was trained on other experience than {frames.name}: nothing counts yet."
            )
            return np.zeros(0, np.int64)
        ancestor = ancestor.input("previous")
    return read_part(model.file(TRAINING), "sampler").get("counts", np.zeros(0, np.int64))
