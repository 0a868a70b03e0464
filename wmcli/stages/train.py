"""What the three training stages share: identity of the job, idempotence, resume, the loop, publication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Artifact, InputRef, Work
from wmcli.config import Identity, Section
from wmcli.errors import ArtifactError
from wmcli.report.plots import along, learning_curves, write_figure
from wmcli.stages.context import Context
from wmcli.training.checkpoint import TRAINING, WEIGHTS, module_tensors, save_tensors
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.training.loop import CHECKPOINT, Trainee, fit
from wmcli.training.optim import build_optimizer

WHAT_IS_LEARNED = {"tokenizer": "codes", "dynamics": "latents"}


@dataclass(frozen=True)
class Lesson:
    """A training stage made concrete: what to train, how to do one update, what to leave beside the weights."""

    trainee: Trainee
    step: Callable[[], Mapping[str, Tensor]]
    draw: Callable[[Path], None]
    """Writes pictures into the payload folder it is given."""
    measure: Callable[[], dict[str, Any]] = dict
    """Returns metrics to publish beside the losses."""
    watch: Callable[[], dict[str, Any]] = dict
    """Returns what to log as it stands with every line of the log, and to publish in the end."""
    choose: Callable[[], None] = lambda: None
    """Puts the weights to publish into the modules, where these are not the last ones."""


def newest_fitted_alone(context: Context) -> Artifact | None:
    """The newest tokenizer that did not come out of a dynamics model, None if there is none."""
    for version in reversed(context.run.versions("tokenizer")):
        artifact = context.run.get("tokenizer", version)
        if "dynamics" not in artifact.inputs:
            return artifact
    return None


def optimizer_for(section: Section, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer that a section of the settings describes."""
    values = section.model_dump()
    return build_optimizer(
        values["optimizer"],
        parameters,
        values["learning_rate"],
        values["weight_decay"],
        warmup=values.get("warmup", 0) if values["optimizer"] == "laprop" else 0,  # others warm up by their schedule
        eps=values.get("eps") or None,
        beta2=values.get("beta2", 0.999),
        momentum=values.get("momentum", 0.0),
    )


def parent_of(context: Context, kind: str, reference: str | None) -> dict[str, Artifact]:
    """The version to train further, as an input: the one referred to, the newest with `--more`, else none."""
    if reference is None and not context.more:
        return {}
    return {"parent": context.run.resolve(reference or kind, kind)}


def check_descent(teacher: Artifact, parent: Artifact, known: InputRef) -> None:
    """A model may go on with the tokenizer (or the dynamics) it knows or with one trained further from that: what it
    learned keeps its meaning.

    Raises ArtifactError when `teacher` does not descend from it.
    """
    ancestor = teacher
    while ancestor.digest != known.digest:
        if "parent" not in ancestor.inputs:
            raise ArtifactError(
                f"{parent.name} learned the {WHAT_IS_LEARNED[known.kind]} of {known.name}, and {teacher.name} does not"
                " descend from it; train"
                " anew without --more."
            )
        ancestor = ancestor.input("parent")


def train(
    context: Context,
    stage: str,
    kind: str,
    *,
    sections: tuple[str, ...],
    inputs: dict[str, Artifact],
    updates: int,
    prepare: Callable[[np.random.Generator], Lesson],
) -> Artifact:
    """Run a training stage to its published artifact: the existing one, a resumed one or a new one.

    `sections` are the settings the weights depend on. `inputs` may hold `parent`, the version to train further.
    `prepare` builds models and data; torch's global generator is seeded around it.
    """
    settings, progress = context.settings, context.progress
    identity = settings.identity("seed", *sections) | {
        "precision": context.machine.precision,
        "sampling": settings.training.sampling,
    }
    if settings.training.sampling == "dfs":
        of_imagination = () if kind == "controller" else ("imagination_temperature", "alpha", "beta")
        identity |= Identity.of_part("dfs", settings.training.dfs, without=of_imagination)
    job = context.run.job(kind, identity, inputs)
    if existing := context.done(job):
        progress.say(
            f"{stage}: {existing.name} is this very job, nothing to do (--more trains further, --force makes another)"
        )
        return existing
    with context.work(job) as work:
        progress.say(f"{stage}: {', '.join(artifact.name for artifact in inputs.values())} on {context.machine}")
        for artifact in inputs.values():
            artifact.verify()
        trained = inputs["parent"].metrics["updates"] if "parent" in inputs else 0
        steps = int(inputs["experience"].metrics["total_steps"])
        with isolated_randomness(derived_seed(settings.seed, stage, trained), context.machine.device) as rng:
            lesson = prepare(rng)
            if "parent" in inputs and not (work.path / CHECKPOINT).exists():
                lesson.trainee.continue_from(inputs["parent"].file(TRAINING))
            metrics: dict[str, Any] = dict(
                fit(
                    lesson.trainee,
                    lesson.step,
                    stage=stage,
                    updates=updates,
                    folder=work.path,
                    machine=context.machine,
                    settings=settings.training,
                    progress=progress,
                    log=partial(context.log, job, steps),
                    watch=lesson.watch,
                )
            )
            lesson.trainee.save(work.payload / TRAINING, context.machine.device)  # training goes on from the last
            lesson.choose()
            save_tensors(work.payload / WEIGHTS, module_tensors(lesson.trainee.modules), {"kind": kind})
            metrics |= lesson.measure() | lesson.watch() | {"updates": lesson.trainee.trained + lesson.trainee.update}
            if context.pictures:
                lesson.draw(work.payload)
                if updates:
                    _draw_curves(work, stage)
        artifact = context.publish(work, metrics)
    progress.say(f"{stage}: published {artifact.name}")
    return artifact


def _draw_curves(work: Work, stage: str) -> None:
    """Learning curves of this job and of the versions that it goes on from."""
    jobs, ancestor = [work.job.digest], work.job.inputs.get("parent")
    while ancestor is not None:
        jobs.insert(0, ancestor.manifest["job"])
        try:
            ancestor = ancestor.input("parent") if "parent" in ancestor.inputs else None
        except ArtifactError:  # it is gone, and so is what was before it
            break
    records = along(work.job.run.history(), jobs)
    write_figure(work.payload / "curves.png", learning_curves(records, stages=[stage]))
