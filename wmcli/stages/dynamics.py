"""`wm train-dynamics`: learn what follows an action, and for planning a policy and a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import build_tokenizer, build_world_model, load_tokenizer, settings_of
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import Memory, SearchTargets
from wmcli.nn import attention_prior
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.latents import gather, latents_of
from wmcli.stages.pictures import draw_priors, imagined_beside_real, write_side_by_side
from wmcli.stages.rows import LatentRows, Rows
from wmcli.stages.train import Lesson, check_descent, newest_fitted_alone, optimizer_for, parent_of, train
from wmcli.training.checkpoint import TRAINING, WEIGHTS, load_modules, load_tensors, save_tensors
from wmcli.training.device import Machine
from wmcli.training.loop import Trainee, read_part
from wmcli.training.optim import update
from wmcli.world_models.base import Batch, PlanningWorldModel, WorldModel
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings

NONE = "none"  # in place of a reference: start without a tokenizer
JOINT = "model/dynamics/tokenizer."  # where a dynamics model that trains its tokenizer keeps it


def train_dynamics(
    context: Context,
    *,
    tokenizer: str | None = None,
    experience: str | None = None,
    parent: str | None = None,
    controller: str | None = None,
) -> Artifact:
    """Train the run's dynamics model for `dynamics.updates` updates and publish it.

    A model that trains its tokenizer as well starts from the newest one fitted by itself, if there is any and
    `tokenizer` is not "none"; what becomes of it is published as a tokenizer that was made from this dynamics.

    A model that is planned in learns policy and value from what the searches found that played, or from what the
    `controller` (default: the newest, "none": none) found when it searched the experience again.

    Raises ArtifactError when an input is missing or of another environment, UsageError for a tokenizer that has no
    place in this, DivergedError, Stopped.
    """
    settings, environment = context.settings.dynamics, context.environment
    encoder, latent = context.settings.dynamics.encoder, isinstance(settings, LatentWorldModelSettings)
    frames = context.run.resolve(experience or "experience", "experience")
    inputs = {"experience": frames} | parent_of(context, "dynamics", parent)
    codes = _tokenizer(context, tokenizer, inputs.get("parent"))
    if codes is not None:
        inputs["tokenizer"] = codes
    teacher = _reanalysis(context, controller)
    if teacher is not None:
        inputs["controller"] = teacher
    for artifact in inputs.values():
        check_same_environment(environment, artifact)
    for line in attention_prior.warnings(context.settings.attention_prior):
        context.progress.warn(line)
    if "parent" in inputs and codes is not None:
        check_descent(codes, inputs["parent"], inputs["parent"].inputs["tokenizer"])

    def prepare(rng: np.random.Generator) -> Lesson:
        device = context.machine.device
        memory = context.experience(frames)
        model = None
        if encoder == "dynamics":
            model = build_tokenizer(context.settings)
            if codes is not None:
                load_modules({"tokenizer": model}, load_tensors(codes.file(WEIGHTS))[0], codes.name)
        elif codes is not None:
            model = load_tokenizer(codes, context.machine)
        world_model = build_world_model(context.settings, model, environment["actions"]).to(device).train()
        data = memory.frames
        if world_model.frozen_encoder:
            data = latents_of(context, world_model, "rules" if codes is None else codes.digest, memory)
        if isinstance(world_model, LatentWorldModel):
            rows: Rows = LatentRows(context, frames, memory, world_model, rng)
        else:
            rows = Rows(context, memory, world_model, rng)
        targets = _targets(world_model, memory, teacher)
        optimizer = optimizer_for(settings, world_model.parameter_groups())

        def step() -> Mapping[str, Tensor]:
            rows.set_rates(optimizer, trainee)
            windows = rows.sampler.batch(settings.batch)
            batch = gather(memory, data, windows, targets, across_ends=world_model.across_ends)
            metrics = update_dynamics(context.machine, world_model, optimizer, batch, settings.clip, rows.loss)
            rows.look(trainee.update + 1, trainee.trained)
            return metrics

        def watch() -> dict[str, Any]:
            learned = attention_prior.learned(world_model)
            priors = {"priors": {name: value.tolist() for name, value in learned.items()}} if learned else {}
            return priors | rows.told()

        def draw(payload: Path) -> None:
            world_model.eval()
            with context.machine.autocast():
                write_side_by_side(payload, imagined_beside_real(world_model, memory, settings.context))
            if attention_prior.learned(world_model):
                draw_priors([context.run], context.settings, payload / "priors.png")

        trainee = Trainee({"dynamics": world_model}, optimizer, rng, rows.parts)
        return Lesson(trainee, step, draw, watch=watch, choose=rows.choose)

    sections = ("environment", "dynamics", "backbone") + (("tokenizer",) if latent else ())
    artifact = train(
        context,
        "train-dynamics",
        "dynamics",
        sections=sections,
        inputs=inputs,
        updates=settings.updates,
        prepare=prepare,
    )
    if encoder == "dynamics":
        _publish_tokenizer(context, artifact)
    return artifact


def update_dynamics(
    machine: Machine,
    world_model: WorldModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    clip: float,
    loss_of: Callable[[Batch], tuple[Tensor, dict[str, Tensor]]] | None = None,
) -> dict[str, Tensor]:
    """One update on a batch of segments, with all that belongs to it: attention priors' penalties and limits, and what
    follows the weights. Returns loss, its parts and the gradient's norm before it was clipped, scalars on the device.
    `loss_of` stands in for the model's own loss, where rows go on from batch to batch.
    """
    with machine.autocast():
        loss, metrics = (loss_of or world_model.loss)(batch)
    if (priors := attention_prior.penalty(world_model)) is not None:
        loss, metrics = loss + priors, metrics | {"prior_penalty": priors.detach()}
    norm = update(optimizer, loss, clip)
    attention_prior.project(world_model)
    world_model.after_update()
    return {"loss": loss, **metrics, "gradient_norm": norm}


def _tokenizer(context: Context, reference: str | None, parent: Artifact | None) -> Artifact | None:
    """The tokenizer to use or to start from; None where there is none to take."""
    encoder = context.settings.dynamics.encoder
    codes = None
    if encoder == "tokenizer":
        codes = context.run.resolve(reference or "tokenizer", "tokenizer")
    elif reference not in (None, NONE):
        if encoder == "rules":
            raise UsageError(f"--tokenizer {reference}: dynamics of kind 'cells' have no use for one; leave it out.")
        if parent is not None:
            raise UsageError(
                f"--tokenizer {reference}: {parent.name} goes on with the tokenizer it has trained; leave it out."
            )
        codes = context.run.resolve(reference, "tokenizer")
    elif encoder == "dynamics" and parent is None and reference is None:
        codes = newest_fitted_alone(context)
    if codes is not None and settings_of(codes).tokenizer.kind != context.settings.tokenizer.kind:
        raise ArtifactError(
            f"{codes.name} is of kind '{settings_of(codes).tokenizer.kind}', but these dynamics work on"
            f" '{context.settings.tokenizer.kind}': fit one with wm train-tokenizer"
        )
    return codes


def _reanalysis(context: Context, reference: str | None) -> Artifact | None:
    """The controller whose searches of the experience are learned from; None for one that searched nothing again."""
    if context.settings.controller.kind != "mcts" or reference == NONE:
        return None
    found = context.run.resolve(reference, "controller") if reference else context.run.latest("controller")
    return found if found is not None and found.metrics["updates"] else None


def _targets(world_model: WorldModel, memory: Memory, teacher: Artifact | None) -> SearchTargets | None:
    """What searches found in the experience, for a model that learns from it."""
    if not isinstance(world_model, PlanningWorldModel):
        return None
    targets = SearchTargets(memory, world_model.actions)
    if teacher is not None:
        targets.load(read_part(teacher.file(TRAINING), "targets"))
    return targets


def _publish_tokenizer(context: Context, dynamics: Artifact) -> None:
    """Publish the tokenizer inside `dynamics`, unless it was before.

    It follows from the dynamics alone, so a death between the two is made good by the next call.
    """
    job = context.run.job("tokenizer", {"of": "dynamics"}, {"dynamics": dynamics})
    if job.done() or dynamics.pruned:
        return
    with context.work(job, fresh=True) as work:
        dynamics.verify()
        weights, _ = load_tensors(dynamics.file(WEIGHTS))
        found = {
            f"model/tokenizer/{name.removeprefix(JOINT)}": tensor
            for name, tensor in weights.items()
            if name.startswith(JOINT)
        }
        save_tensors(work.payload / WEIGHTS, found, {"kind": "tokenizer"})
        metrics = {name: dynamics.metrics.get(name) for name in ("reconstruction", "updates")}
        artifact = context.publish(work, metrics, settings=dynamics.settings)
    context.progress.say(f"train-dynamics: published {artifact.name}, the tokenizer of {dynamics.name}")
