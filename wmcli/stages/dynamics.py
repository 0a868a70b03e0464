"""`wm train-dynamics`: learn what follows an action, in the tokenizer's latents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import build_world_model, load_tokenizer
from wmcli.experience.sampler import WindowSampler
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.latents import gather, latents_of
from wmcli.stages.pictures import imagined_beside_real, write_side_by_side
from wmcli.stages.train import Lesson, check_descent, parent_of, train
from wmcli.training.loop import Trainee
from wmcli.training.optim import build_optimiser, update


def train_dynamics(
    context: Context, *, tokenizer: str | None = None, experience: str | None = None, parent: str | None = None
) -> Artifact:
    """Train the run's dynamics model for `dynamics.updates` updates and publish it.

    Raises ArtifactError when an input is missing or of another environment, DivergedError, Stopped.
    """
    settings = context.settings.dynamics
    frames = context.run.resolve(experience or "experience", "experience")
    codes = context.run.resolve(tokenizer or "tokenizer", "tokenizer")
    environment = context.environment
    for artifact in (frames, codes):
        check_same_environment(environment, artifact)
    inputs = {"experience": frames, "tokenizer": codes} | parent_of(context, "dynamics", parent)
    if "parent" in inputs:
        check_descent(codes, inputs["parent"], inputs["parent"].inputs["tokenizer"])

    def prepare(rng: np.random.Generator) -> Lesson:
        device = context.machine.device
        memory = context.experience(frames)
        world_model = build_world_model(context.settings, load_tokenizer(codes, device), environment["actions"]).to(
            device
        )
        latents = latents_of(context, world_model, codes, memory)
        sampler = WindowSampler(
            memory.episodes,
            memory.order,
            length=settings.horizon,
            minimum=settings.context + 1,
            pad="right",
            sampling=context.settings.training.sampling,
            rng=rng,
        )
        optimiser = build_optimiser(
            "adamw", world_model.parameter_groups(), settings.learning_rate, settings.weight_decay
        )

        def step() -> Mapping[str, Tensor]:
            batch = gather(memory, latents, sampler.batch(settings.batch))
            with context.machine.autocast():
                loss, metrics = world_model.loss(batch)
            return {"loss": loss, **metrics, "gradient_norm": update(optimiser, loss, settings.clip)}

        def draw(payload: Path) -> None:
            world_model.eval()
            with context.machine.autocast():
                write_side_by_side(payload, imagined_beside_real(world_model, memory, latents, settings.context))

        trainee = Trainee({"dynamics": world_model}, optimiser, rng, {"sampler": sampler})
        return Lesson(trainee, step, draw)

    return train(
        context,
        "train-dynamics",
        "dynamics",
        sections=("environment", "dynamics", "backbone"),
        inputs=inputs,
        updates=settings.updates,
        prepare=prepare,
    )
