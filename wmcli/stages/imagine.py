"""`wm imagine`: train the controller on rollouts of the dynamics model, or search the experience again with it.

A controller that plans has nothing of its own to learn. Here it searches inside the newest model at frames that were
played before (MuZero Reanalyse: Schrittwieser et al. 2021, arXiv 2104.06294); what it finds is published with it, and
`wm train-dynamics` learns policy and value from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import build_controller, load_world_model, settings_of
from wmcli.controllers.base import Learner, episode_starts
from wmcli.controllers.mcts import MCTSSettings
from wmcli.errors import UsageError
from wmcli.experience import SearchTargets
from wmcli.experience.sampler import WindowTable
from wmcli.nn.masked import masked_mean
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.latents import gather, latents_of
from wmcli.stages.pictures import imagined_beside_real, write_side_by_side
from wmcli.stages.sampling import build_sampler
from wmcli.stages.train import Lesson, check_descent, optimizer_for, parent_of, train
from wmcli.training.checkpoint import TRAINING
from wmcli.training.loop import Trainee, read_part
from wmcli.training.optim import update


def imagine(
    context: Context, *, dynamics: str | None = None, experience: str | None = None, parent: str | None = None
) -> Artifact:
    """Train the run's controller in imagination for `controller.updates` updates and publish it.

    One that plans searches `controller.batch` frames again in each of them.

    Raises ArtifactError when an input is missing or of another environment, DivergedError, Stopped.
    """
    settings = context.settings.controller
    frames = context.run.resolve(experience or "experience", "experience")
    model = context.run.resolve(dynamics or "dynamics", "dynamics")
    for artifact in (frames, model):
        check_same_environment(context.environment, artifact)
    inputs = {"experience": frames, "dynamics": model} | parent_of(context, "controller", parent)
    if isinstance(settings, MCTSSettings):
        prepare = partial(_reanalysis, context, frames, model)
    else:
        prepare = partial(_imagination, context, frames, model, _teacher(model, inputs.get("parent")))
    return train(
        context,
        "imagine",
        "controller",
        sections=("environment", "controller"),
        inputs=inputs,
        updates=settings.updates,
        prepare=prepare,
    )


def _teacher(model: Artifact, parent: Artifact | None) -> Artifact | None:
    """What makes latents of frames for `model`, None where that is not learned. Raises ArtifactError if `parent`, a
    controller to be trained further, learned with one that this does not descend from."""
    encoder = settings_of(model).dynamics.encoder
    if encoder == "rules":
        return None
    teacher = model.input("tokenizer") if encoder == "tokenizer" else model
    if parent is not None:
        known = parent.inputs["dynamics"] if teacher is model else parent.input("dynamics").inputs["tokenizer"]
        check_descent(teacher, parent, known)
    return teacher


def _imagination(
    context: Context, frames: Artifact, model: Artifact, teacher: Artifact | None, rng: np.random.Generator
) -> Lesson:
    """Rollouts of the model from experience, and what the controller learns of them."""
    settings, trained_with = context.settings.controller, settings_of(model)
    known = trained_with.dynamics.context  # frames that imagination starts from
    if getattr(trained_with.dynamics, "reward", "") == "none":
        raise UsageError(
            f"{model.name} has learned no rewards (dynamics.reward = none), and without them there is nothing to gain:"
            " train dynamics with another dynamics.reward."
        )
    memory = context.experience(frames)
    world_model = load_world_model(model, context.machine)
    latents = latents_of(context, world_model, "rules" if teacher is None else teacher.digest, memory)
    controller = build_controller(context.settings, world_model).to(context.machine.device)
    assert isinstance(controller, Learner) and not isinstance(settings, MCTSSettings)
    sampler = build_sampler(
        context.settings,
        memory,
        rng,
        length=controller.window,
        # A model over latents takes a shorter context as it comes, like one behind the end of an episode.
        minimum=1 if trained_with.dynamics.encoder in ("dynamics", "itself") else min(known + 1, controller.window),
        pad="left",
        across_ends=world_model.across_ends,
        trained=_times_trained(context, model, frames) if context.settings.training.sampling == "dfs" else None,
        ratio=trained_with.dynamics.batch / settings.batch,
    )
    optimizer = optimizer_for(settings, controller.parameter_groups())
    rollout = context.machine.repeated(partial(controller.imagine, world_model))

    def step() -> Mapping[str, Tensor]:
        batch = gather(memory, latents, sampler.batch(settings.batch), across_ends=world_model.across_ends)
        imagined = rollout(batch, controller.noise(world_model, batch))
        with context.machine.autocast():
            loss, metrics = controller.loss(imagined)
        norm = update(optimizer, loss, settings.clip)
        controller.after_update()
        return {"loss": loss, **metrics, "gradient_norm": norm}

    def draw(payload: Path) -> None:
        with context.machine.autocast():
            write_side_by_side(payload, imagined_beside_real(world_model, memory, known))

    return Lesson(Trainee({"controller": controller}, optimizer, rng, {"sampler": sampler}), step, draw)


def _reanalysis(context: Context, frames: Artifact, model: Artifact, rng: np.random.Generator) -> Lesson:
    """Search again at the frames that were searched least, the oldest of those first, as if they were just played."""
    memory = context.experience(frames)
    world_model = load_world_model(model, context.machine)
    controller = build_controller(context.settings, world_model, context.machine)
    targets = SearchTargets(memory, world_model.actions)
    runs, order = memory.runs(across_ends=False)
    windows = WindowTable(runs, order, length=world_model.context, minimum=1, pad="left")
    place = np.argsort(order)  # of each row: the number of the window that ends with it

    @torch.no_grad()
    def step() -> Mapping[str, Tensor]:
        rows = targets.due(context.settings.controller.batch)
        batch = gather(memory, memory.frames, windows.windows(place[rows]), targets)
        with context.machine.autocast():
            _, world = world_model.observe(world_model.encode(batch.latent), batch.action, episode_starts(batch))
            state = controller.initial_state(len(rows))
            _, state = controller.decide(world_model, world, state, torch.default_generator)
        summary = controller.summarize_search(state)
        assert summary is not None and batch.targets is not None
        targets.update(rows, summary.policy, summary.value)
        before, known = batch.targets.policy[:, -1], batch.targets.found[:, -1]
        return {
            "search_value": summary.value.mean(),
            "search_entropy": -torch.xlogy(summary.policy, summary.policy).sum(-1).mean(),
            "policy_change": masked_mean((summary.policy - before).abs().sum(-1) / 2, known),
            "value_change": masked_mean((summary.value - batch.targets.value[:, -1]).abs(), known),
        }

    trainee = Trainee({"controller": controller}, None, rng, {"targets": targets})
    return Lesson(trainee, step, draw=lambda payload: None)


def _times_trained(context: Context, model: Artifact, frames: Artifact) -> np.ndarray:
    """How often each row of the experience started a segment that the dynamics model was trained on, int64; empty for
    a model whose sampler did not count, or that was trained on other experience."""
    known = frames
    while known.digest != model.inputs["experience"].digest:
        if "previous" not in known.inputs:
            context.progress.warn(
                f"{model.name} was trained on other experience than {frames.name}: nothing counts yet."
            )
            return np.zeros(0, np.int64)
        known = known.input("previous")
    return read_part(model.file(TRAINING), "sampler").get("counts", np.zeros(0, np.int64))
