"""`wm run`: the papers' loop of collect → tokenizer → dynamics → imagine, epoch after epoch.

The loop keeps no state of its own. Every stage call is a job known by its settings and inputs; those already published
are found again at once, an interrupted one is resumed, so running the loop from its first epoch is how it continues.

With `run.overlap` a second process collects epoch e + 1 while epoch e trains here. Who acts there is the newest
controller when epoch e begins to train, that of epoch e - 1: which one it is does not hang on how fast anything is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import get_args

from wmcli.artifacts import KEY_METRICS, Artifact
from wmcli.errors import UsageError
from wmcli.settings import Measure
from wmcli.stages.collect import collect, collect_job
from wmcli.stages.collector import Collector
from wmcli.stages.context import Context
from wmcli.stages.dynamics import NONE, train_dynamics
from wmcli.stages.evaluate import evaluate, summary
from wmcli.stages.imagine import imagine
from wmcli.stages.memory import evaluate_memory
from wmcli.stages.memory_table import told
from wmcli.stages.tokenizer import train_tokenizer

MODELS = ("tokenizer", "dynamics", "controller")


def run_loop(context: Context) -> Artifact:
    """Run, or go on with, all epochs of `run.*`; return the last artifact, the final evaluation once a controller
    exists.

    Raises UsageError when the run holds experience that `wm run` did not collect; everything the stages raise passes
    through.
    """
    plan = context.settings.run
    progress = context.progress
    _check_own(context)
    inside = Context(context.run, context.preset, context.settings, progress.inside(), fresh=context.fresh)
    progress.say(f"run: preset {context.preset}, {plan.epochs} epochs on {context.machine}")
    newest: dict[str, Artifact] = {}
    scores: list[Artifact] = []
    with closing(Collector(inside)) as beside, progress.bar("run", plan.epochs, "epochs") as bar:
        for epoch in range(1, plan.epochs + 1):
            shown: dict[str, float] = {}
            inside.pictures = epoch == plan.epochs
            for artifact in _epoch(inside, beside, epoch, newest):
                newest[artifact.kind] = artifact
                shown |= _headline(artifact)
                if artifact.kind == "evaluation" and epoch == plan.epochs:
                    scores.append(artifact)
            bar.advance()
            bar.show(**shown)
            for kind in MODELS:
                context.run.prune(kind, set(context.run.versions(kind)[-plan.keep :]))
    for evaluation in scores:
        progress.say(told(evaluation) if evaluation.metrics["protocol"] in get_args(Measure) else summary(evaluation))
    if "evaluation" in newest:
        return newest["evaluation"]
    return newest[next(kind for kind in reversed(("experience", *MODELS)) if kind in newest)]


def _check_own(context: Context) -> None:
    """The loop's first experience is its own, or it would go on beside a time line that is not its."""
    versions = context.run.versions("experience")
    if versions and context.run.get("experience", versions[0]).manifest["job"] != collect_job(context, {}).digest:
        raise UsageError(
            f"{context.run} holds experience that wm run did not collect with these settings; give it a --run of its"
            " own."
        )


def _epoch(context: Context, beside: Collector, epoch: int, newest: dict[str, Artifact]) -> Iterator[Artifact]:
    """The artifacts of one epoch, each yielded as soon as it is there, so that the next stage finds it in `newest`."""
    plan = context.settings.run

    def path(kind: str) -> str | None:
        return str(newest[kind].path) if kind in newest else None

    if epoch <= plan.collect_epochs and plan.overlap:
        if epoch == 1:
            beside.begin(None, None)
        yield beside.result()
        if epoch < min(plan.collect_epochs, plan.epochs):
            beside.begin(newest.get("controller"), newest["experience"])
        else:
            beside.close()
    elif epoch <= plan.collect_epochs:
        yield collect(context, controller=path("controller") or "random", previous=path("experience"), extend=False)
    joint = context.settings.encoder == "dynamics"
    if plan.tokenizer_after < epoch <= plan.tokenizer_epochs and not (joint and "dynamics" in newest):
        yield train_tokenizer(context, experience=path("experience"), parent=path("tokenizer"))
    if epoch > plan.dynamics_after:
        # A model that trains its tokenizer goes on with its own, and begins with none but the loop's.
        start = path("tokenizer")
        if joint and (start is None or "dynamics" in newest):
            start = NONE
        yield train_dynamics(
            context,
            experience=path("experience"),
            tokenizer=start,
            parent=path("dynamics"),
            controller=path("controller") or NONE,
        )
        if epoch == plan.epochs:
            for measure in context.settings.evaluation.measures:
                yield evaluate_memory(context, measure, dynamics=path("dynamics"))
    if epoch > plan.controller_after:
        yield imagine(context, experience=path("experience"), dynamics=path("dynamics"), parent=path("controller"))
        if epoch == plan.epochs:
            yield evaluate(context, controller=path("controller"))
        elif plan.evaluate_every and epoch % plan.evaluate_every == 0:
            yield evaluate(context, controller=path("controller"), episodes=plan.evaluate_episodes)


def _headline(artifact: Artifact) -> dict[str, float]:
    """The number of an artifact that the bar shows."""
    key = KEY_METRICS[artifact.kind]
    value = artifact.metrics.get(key)
    return {} if value is None else {"return" if artifact.kind == "evaluation" else key: value}
