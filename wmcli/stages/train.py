"""The common part of training stages: job, resume, training, publication, pictures."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from wmcli import ranks
from wmcli.artifacts import Artifact, InputRef, Work
from wmcli.config import Identity, parse_override
from wmcli.errors import ArtifactError, DivergedError
from wmcli.experience import Replay
from wmcli.nn.initialize import without_initialization
from wmcli.report.plots import along, curves_by_stage, learning_curves, write_figure
from wmcli.stages.context import Context
from wmcli.trainers.batches import encode_frames
from wmcli.training.checkpoint import TRAINING, WEIGHTS, module_tensors, save_tensors
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.training.loop import Trainer, fit
from wmcli.world_models.base import WorldModel

T = TypeVar("T", bound=Trainer)

LEARNED = {"tokenizer": "codes", "dynamics": "latents"}
"""What a later model learns of each kind."""


def newest_fitted_alone(context: Context) -> Artifact | None:
    """Return the newest tokenizer that was not trained inside a dynamics model, None if there is none."""
    for version in reversed(context.run.versions("tokenizer")):
        artifact = context.run.get("tokenizer", version)
        if "dynamics" not in artifact.inputs:
            return artifact
    return None


def parent_of(context: Context, kind: str, reference: str | None) -> dict[str, Artifact]:
    """Return the version to train further as an input: the one referred to, the newest with `--more`, else none."""
    if reference is None and not context.more:
        return {}
    return {"parent": context.run.resolve(reference or kind, kind)}


def check_descent(encoder: Artifact, parent: Artifact, learned_with: InputRef) -> None:
    """Check that latents keep their meaning for a model that is trained further.

    Args:
        encoder: The tokenizer or dynamics that is to encode frames now.
        parent: The model to train further.
        learned_with: The one that encoded frames for it.

    Raises:
        ArtifactError: `encoder` does not descend from that one.
    """
    ancestor = encoder
    while ancestor.digest != learned_with.digest:
        if "parent" not in ancestor.inputs:
            raise ArtifactError(
                f"{parent.name} learned the {LEARNED[learned_with.kind]} of {learned_with.name}, and {encoder.name}"
                " does not descend from it; train anew without --more."
            )
        ancestor = ancestor.input("parent")


def latents_of(context: Context, world_model: WorldModel, encoder: str, replay: Replay) -> Tensor:
    """Return latents (N, ...) of all frames in memory, encoded once and kept for later stages of this process.

    Args:
        context: Keeps them.
        world_model: Its encoder is frozen.
        encoder: Names it: the digest of the artifact that holds it, or "rules".
        replay: The experience. Frames that were added since are encoded now.
    """
    latents = encode_frames(
        world_model,
        replay.observation,
        context.machine,
        encoded=context.latents.get(encoder),
        progress=context.progress,
    )
    context.latents = {encoder: latents}
    return latents


def train(
    context: Context,
    stage: str,
    kind: str,
    *,
    sections: tuple[str, ...],
    inputs: dict[str, Artifact],
    references: Mapping[str, str | None],
    updates: int,
    build: Callable[[np.random.Generator], T],
    measure_parent: Callable[[T], None] = lambda trainer: None,
    draw: Callable[[Path, T], None] = lambda payload, trainer: None,
    selects_weights: bool = False,
) -> Artifact:
    """Run a training stage to its published artifact: the existing one, a resumed one or a new one.

    Args:
        context: The run and its settings.
        stage: Name for messages and logs.
        kind: Kind of the artifact.
        sections: Settings that the weights depend on.
        inputs: Artifacts that it is made from; `parent` is the version to train further.
        references: Those that the command named, by its options.
        updates: Updates to do.
        build: Loads models and data and returns the trainer; torch's global generator is seeded around it.
        measure_parent: Called with the weights of the version to train further, before the first update.
        draw: Writes pictures into the payload.
        selects_weights: Publish the weights that `trainer.select_weights` loads, not the last ones.

    Raises:
        DivergedError: A loss or weight is not finite. The message names the command to go on with.
        Stopped: A signal arrived; the same command resumes.
    """
    settings, progress = context.settings, context.progress
    identity = settings.identity("seed", *sections) | {
        "precision": context.machine.precision,
        "sampling": settings.training.sampling,
    }
    if settings.training.sampling == "dfs":
        of_imagination = () if kind == "controller" else ("imagination_temperature", "alpha", "beta")
        identity |= Identity.of_part("dfs", settings.training.dfs, without=of_imagination)
    elif settings.training.sampling == "prioritized" and kind == "dynamics":
        identity |= Identity.of_part("priority", settings.training.priority)
    if ranks.size() > 1:
        identity |= {"ranks": ranks.size()}
    job = context.run.job(kind, identity, inputs)
    if existing := context.done(job):
        progress.say(
            f"{stage}: {existing.name} is up to date, nothing to do (--more trains further, --force makes another)"
        )
        return existing
    with context.work(job) as work, _naming_the_way_on(context, stage, kind, references):
        progress.say(f"{stage}: {', '.join(artifact.name for artifact in inputs.values())} on {context.machine}")
        for artifact in inputs.values():
            artifact.verify()
        trained = inputs["parent"].metrics["updates"] if "parent" in inputs else 0
        steps = int(inputs["experience"].metrics["total_steps"])
        with isolated_randomness(derived_seed(settings.seed, stage, trained), context.machine.device) as rng:
            with without_initialization() if "parent" in inputs else nullcontext():
                trainer = build(rng)
            state = trainer.state
            if "parent" in inputs:  # a checkpoint replaces it in `fit`
                state.continue_from(inputs["parent"].file(TRAINING))
                measure_parent(trainer)
            losses = fit(
                trainer,
                updates,
                stage=stage,
                settings=settings.training,
                folder=work.path,
                keep_last=False,
                progress=progress,
                log=partial(context.log, job, steps),
            )
            with ThreadPoolExecutor(1) as writer:  # both files at once
                training = writer.submit(
                    state.save_training, work.payload / TRAINING, context.machine.device, weights=selects_weights
                )
                if selects_weights:
                    training.result()  # training continues from the last weights
                    trainer.select_weights()
                sha256 = {}
                if ranks.is_first():
                    sha256[WEIGHTS] = save_tensors(
                        work.payload / WEIGHTS, module_tensors(state.modules), {"kind": kind}
                    )
                sha256[TRAINING] = training.result()
            metrics: dict[str, Any] = {**losses, **trainer.measure(), **trainer.status()}
            metrics["updates"] = state.trained + state.update
            if context.pictures and ranks.is_first():
                draw(work.payload, trainer)
                if state.update:
                    _draw_curves(work, stage)
        artifact = context.publish(work, metrics, sha256=sha256)
    progress.say(f"{stage}: published {artifact.name}")
    return artifact


@contextmanager
def _naming_the_way_on(context: Context, stage: str, kind: str, references: Mapping[str, str | None]) -> Iterator[None]:
    """Add the command with a third of the learning rate to a DivergedError."""
    try:
        yield
    except DivergedError as error:
        rate = getattr(getattr(context.settings, kind), "learning_rate", None)
        if rate is None:
            raise
        key = f"{kind}.learning_rate"
        lower = f"{key}={float(f'{rate / 3:.2g}')}"
        words = ["wm", stage, "--run", str(context.run.path)]
        if context.epoch is not None:
            words = ["wm", "run", "--run", str(context.run.path), "--from-epoch", str(context.epoch), "--set", lower]
        else:
            if context.is_new:  # it is unbound now, if it has nothing yet
                words += ["--preset", context.preset]
            for option, reference in references.items():
                words += [] if reference is None else [f"--{option}", reference]
            words += ["--more"] * context.more
            kept = [text for text in context.overrides if ".".join(parse_override(text)[0]) != key]
            words += [word for text in (*kept, lower) for word in ("--set", text)]
        raise DivergedError(f"{error} Go on with: {shlex.join(words)}") from None


def _draw_curves(work: Work, stage: str) -> None:
    """Draw the learning curves of this job and of the versions that it continues."""
    jobs, ancestor = [work.job.digest], work.job.inputs.get("parent")
    while ancestor is not None:
        jobs.insert(0, ancestor.manifest["job"])
        try:
            ancestor = ancestor.input("parent") if "parent" in ancestor.inputs else None
        except ArtifactError:  # removed, and so are earlier ones
            break
    try:
        records = along(work.job.run.history(), jobs)
    except ArtifactError:  # too large to draw
        return
    if stage in curves_by_stage(records):  # a power cut may have cost the last lines
        write_figure(work.payload / "curves.png", learning_curves(records, stages=[stage]))
