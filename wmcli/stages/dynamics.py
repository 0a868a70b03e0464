"""`wm train-dynamics`: train the world model, and for planning its policy and value."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wmcli import ranks
from wmcli.artifacts import Artifact
from wmcli.artifacts.environment import check_same_environment
from wmcli.assemble import build_tokenizer, build_world_model, load_tokenizer, settings_of
from wmcli.envs.tasks import TASKS
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import Replay, SearchTargets
from wmcli.experience.load import NONE_HELD_OUT, find_held_out
from wmcli.nn import attention_prior
from wmcli.settings import EpisodesCollectSettings
from wmcli.stages.context import Context
from wmcli.stages.pictures import draw_priors, imagined_beside_real, write_imagination
from wmcli.stages.train import check_descent, latents_of, newest_fitted_alone, parent_of, train
from wmcli.trainers import DynamicsTrainer, HeldOutLosses
from wmcli.trainers.batches import frames_per_row
from wmcli.training.checkpoint import TRAINING, WEIGHTS, load_modules, load_tensors, read_part, save_tensors
from wmcli.training.device import derived_seed
from wmcli.world_models.base import WorldModel

NONE = "none"  # in place of a reference: start without a tokenizer
JOINT = "model/dynamics/tokenizer."  # prefix of a tokenizer's weights inside those of its dynamics model


def train_dynamics(
    context: Context,
    *,
    tokenizer: str | None = None,
    experience: str | None = None,
    parent: str | None = None,
    controller: str | None = None,
) -> Artifact:
    """Train the run's dynamics model for `dynamics.updates` updates and publish it.

    A model that trains its tokenizer as well starts from the newest one that was fitted by itself, if there is any. The
    trained one is published as a tokenizer made from this dynamics.

    Args:
        context: The run.
        tokenizer: Reference; None is the newest, "none" starts without one.
        experience: Reference; None is the newest.
        parent: Reference to the version to train further; None trains anew, with `--more` the newest.
        controller: Reference to the planner whose reanalysis gives targets of policy and value; None is the newest,
            "none" takes those of the searches that played.

    Raises:
        ArtifactError: An input is missing or of another environment.
        UsageError: A tokenizer is given that cannot be used here.
        DivergedError: A loss or weight is not finite.
        Stopped: A signal arrived; the same command resumes.
    """
    settings, environment = context.settings.dynamics, context.environment
    frames = context.run.resolve(experience or "experience", "experience")
    inputs = {"experience": frames} | parent_of(context, "dynamics", parent)
    fitted = _tokenizer(context, tokenizer, inputs.get("parent"))
    if fitted is not None:
        inputs["tokenizer"] = fitted
    planner = _reanalysis(context, controller)
    if planner is not None:
        inputs["controller"] = planner
    for artifact in inputs.values():
        check_same_environment(environment, artifact)
    if context.settings.training.held_out_every and find_held_out(frames, "test") is None:
        raise ArtifactError(
            f"training.held_out_every = {context.settings.training.held_out_every}: {frames.name} {NONE_HELD_OUT}; or"
            " measure no such losses: --set training.held_out_every=0"
        )
    for line in attention_prior.warnings(context.settings.attention_prior):
        context.progress.warn(line)
    if "parent" in inputs and fitted is not None:
        check_descent(fitted, inputs["parent"], inputs["parent"].inputs["tokenizer"])

    def build(rng: np.random.Generator) -> DynamicsTrainer:
        machine, replay = context.machine, context.experience(frames)
        model = None
        if settings.trains_tokenizer:
            model = build_tokenizer(context.settings, context.spaces)
            if fitted is not None:
                load_modules({"tokenizer": model}, load_tensors(fitted.file(WEIGHTS))[0], fitted.name)
        elif fitted is not None:
            model = load_tokenizer(fitted, machine)
        world_model = build_world_model(context.settings, model, context.spaces).to(machine.device).train()
        latents = targets = held_out = losses = None
        if world_model.frozen_encoder:
            latents = latents_of(context, world_model, "rules" if fitted is None else fitted.digest, replay)
        if settings.needs_validation:
            held_out = context.held_out(frames, "validation")
        if context.settings.training.held_out_every:
            losses = HeldOutLosses(
                world_model,
                lambda: context.held_out(frames, "test"),
                rows=settings.batch,
                machine=machine,
                seed=derived_seed(context.settings.seed, "held-out losses"),
            )
        if planner is not None:
            targets = SearchTargets(replay, world_model.action_space)
            targets.load(read_part(planner.file(TRAINING), "targets"))
        if "parent" not in inputs and (line := _learned_otherwise(context, world_model, replay, frames.name)):
            context.progress.warn(line)
        return DynamicsTrainer(
            world_model,
            replay,
            settings,
            context.settings.training,
            machine=machine,
            rng=rng,
            latents=latents,
            targets=targets,
            held_out=held_out,
            validation_seed=derived_seed(context.settings.seed, "validation"),
            losses=losses,
        )

    def draw(payload: Path, trainer: DynamicsTrainer) -> None:
        world_model = trainer.world_model.eval()
        with context.machine.autocast():
            write_imagination(payload, imagined_beside_real(world_model, trainer.replay, settings.context))
        if attention_prior.prior_values(world_model):
            draw_priors([context.run], context.settings, payload / "priors.png")

    inside = settings.tokenizer_kind is not None and not settings.takes_tokenizer
    sections = ("environment", "dynamics", "backbone") + (("tokenizer",) if inside else ())
    artifact = train(
        context,
        "train-dynamics",
        "dynamics",
        sections=sections,
        inputs=inputs,
        references={"tokenizer": tokenizer, "experience": experience, "controller": controller},
        updates=settings.updates,
        build=build,
        draw=draw,
        selects_weights=settings.needs_validation,
    )
    if settings.trains_tokenizer:
        ranks.first(lambda: _publish_tokenizer(context, artifact))
    return artifact


def _learned_otherwise(context: Context, world_model: WorldModel, replay: Replay, name: str) -> str | None:
    """Return a warning if each frame is learned from more or less often than those of a script's `collect.episodes`.

    The updates may follow from these ("50 epochs"), and the experience have others: more collects, those of another
    run, imported ones.
    """
    settings, task = context.settings, TASKS.get(context.settings.environment.id)
    if task is None or not isinstance(settings.collect, EpisodesCollectSettings):
        return None
    learned, episodes = settings.dynamics.updates * settings.dynamics.batch, settings.collect.episodes
    planned = np.full(episodes, task.context + task.query)
    if world_model.across_ends:
        planned = planned.sum(keepdims=True)
    here, there = (
        learned * frames_per_row(world_model, lengths) / lengths.sum()
        for lengths in (replay.runs(world_model.across_ends)[0].length, planned)
    )
    if not here or np.isclose(here, there):
        return None
    updates = settings.dynamics.updates
    return (
        f"dynamics.updates = {updates} learn {here:.3g} times from each of the {len(replay)} frames of {name}, and"
        f" {there:.3g} times from those of collect.episodes = {episodes}: to learn as often, set"
        f" dynamics.updates={max(1, round(updates * there / here))}"
    )


def _tokenizer(context: Context, reference: str | None, parent: Artifact | None) -> Artifact | None:
    """Return the tokenizer to use or to start from; None where there is none to take."""
    settings, fitted = context.settings.dynamics, None
    if settings.takes_tokenizer:
        fitted = context.run.resolve(reference or "tokenizer", "tokenizer")
    elif reference not in (None, NONE):
        if not settings.trains_tokenizer:
            raise UsageError(f"--tokenizer {reference}: dynamics of kind '{settings.kind}' take none; omit it.")
        if parent is not None:
            raise UsageError(f"--tokenizer {reference}: {parent.name} continues with its own tokenizer; omit it.")
        fitted = context.run.resolve(reference, "tokenizer")
    elif settings.trains_tokenizer and parent is None and reference is None:
        fitted = newest_fitted_alone(context)
    if fitted is not None and settings_of(fitted).tokenizer.kind != context.settings.tokenizer.kind:
        raise ArtifactError(
            f"{fitted.name} is of kind '{settings_of(fitted).tokenizer.kind}', but these dynamics work on"
            f" '{context.settings.tokenizer.kind}': fit one with wm train-tokenizer"
        )
    return fitted


def _reanalysis(context: Context, reference: str | None) -> Artifact | None:
    """Return the planner whose reanalysis is learned from; None where nothing was reanalyzed."""
    if not context.settings.controller.searches or reference == NONE:
        return None
    planner = context.run.resolve(reference, "controller") if reference else context.run.latest("controller")
    return planner if planner is not None and planner.metrics["updates"] else None


def _publish_tokenizer(context: Context, dynamics: Artifact) -> None:
    """Publish the tokenizer inside `dynamics`, unless it was before.

    If the process ends between the two publications, the next call makes this one.
    """
    job = context.run.job("tokenizer", {"of": "dynamics"}, {"dynamics": dynamics})
    if job.done() or dynamics.pruned:
        return
    with context.work(job, fresh=True) as work:
        weights, _ = load_tensors(dynamics.file(WEIGHTS), JOINT)
        tokenizer = {f"model/tokenizer/{name.removeprefix(JOINT)}": tensor for name, tensor in weights.items()}
        sha256 = {WEIGHTS: save_tensors(work.payload / WEIGHTS, tokenizer, {"kind": "tokenizer"})}
        metrics = {name: dynamics.metrics.get(name) for name in ("reconstruction", "updates")}
        artifact = context.publish(work, metrics, settings=dynamics.settings, sha256=sha256)
    context.progress.say(f"train-dynamics: published {artifact.name}, the tokenizer of {dynamics.name}")
