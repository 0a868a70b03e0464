"""`wm imagine`: train the controller on rollouts of the dynamics model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import build_controller, load_world_model, settings_of
from wmcli.experience.sampler import WindowSampler
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.latents import gather, latents_of
from wmcli.stages.pictures import imagined_beside_real, write_side_by_side
from wmcli.stages.train import Lesson, check_descent, parent_of, train
from wmcli.training.loop import Trainee
from wmcli.training.optim import build_optimiser, update


def imagine(
    context: Context, *, dynamics: str | None = None, experience: str | None = None, parent: str | None = None
) -> Artifact:
    """Train the run's controller in imagination for `controller.updates` updates and publish it.

    Raises ArtifactError when an input is missing or of another environment, DivergedError, Stopped.
    """
    settings = context.settings.controller
    frames = context.run.resolve(experience or "experience", "experience")
    model = context.run.resolve(dynamics or "dynamics", "dynamics")
    for artifact in (frames, model):
        check_same_environment(context.environment, artifact)
    inputs = {"experience": frames, "dynamics": model} | parent_of(context, "controller", parent)
    if "parent" in inputs:
        learned = inputs["parent"].input("dynamics").inputs["tokenizer"]
        check_descent(model.input("tokenizer"), inputs["parent"], learned)
    known = settings_of(model).dynamics.context  # frames that imagination starts from

    def prepare(rng: np.random.Generator) -> Lesson:
        device = context.machine.device
        memory = context.experience(frames)
        world_model = load_world_model(model, device)
        latents = latents_of(context, world_model, model.input("tokenizer"), memory)
        controller = build_controller(context.settings, world_model).to(device)
        sampler = WindowSampler(
            memory.episodes,
            memory.order,
            length=controller.window,
            minimum=known + 1,
            pad="left",
            sampling=context.settings.training.sampling,
            rng=rng,
        )
        optimiser = build_optimiser(
            settings.optimiser, controller.parameter_groups(), settings.learning_rate, settings.weight_decay
        )

        def step() -> Mapping[str, Tensor]:
            batch = gather(memory, latents, sampler.batch(settings.batch))
            with context.machine.autocast():
                loss, metrics = controller.loss(world_model, batch)
            return {"loss": loss, **metrics, "gradient_norm": update(optimiser, loss, settings.clip)}

        def draw(payload: Path) -> None:
            with context.machine.autocast():
                write_side_by_side(payload, imagined_beside_real(world_model, memory, latents, known))

        trainee = Trainee({"controller": controller}, optimiser, rng, {"sampler": sampler})
        return Lesson(trainee, step, draw)

    return train(
        context,
        "imagine",
        "controller",
        sections=("environment", "controller"),
        inputs=inputs,
        updates=settings.updates,
        prepare=prepare,
    )
