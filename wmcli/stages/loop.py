"""`wm run`: the papers' loop of collect → tokenizer → dynamics → imagine, epoch after epoch, in one process.

The loop keeps no state of its own. Every stage call is a job known by its settings and inputs; those already published
are found again at once, an interrupted one is resumed, so running the loop from its first epoch is how it continues.
"""

from __future__ import annotations

from collections.abc import Iterator

from wmcli.artifacts import Artifact
from wmcli.errors import UsageError
from wmcli.progress import Progress
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
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
    inside = Context(context.run, context.preset, context.settings, Progress(quiet=True), fresh=context.fresh)
    progress.say(f"run: preset {context.preset}, {plan.epochs} epochs on {context.machine}")
    newest: dict[str, Artifact] = {}
    with progress.bar("run", plan.epochs, "epochs") as bar:
        for epoch in range(1, plan.epochs + 1):
            shown: dict[str, float] = {}
            for artifact in _epoch(inside, epoch, newest):
                newest[artifact.kind] = artifact
                shown |= _headline(artifact)
                inside.fresh = False
            if epoch == 1 and newest["experience"].version != 1:
                raise UsageError(
                    f"{context.run.path} holds experience that wm run did not collect; give it a --run of its own."
                )
            bar.advance()
            bar.show(**shown)
            for kind in MODELS:
                context.run.prune(kind, set(context.run.versions(kind)[-plan.keep :]))
    return (
        newest.get("evaluation") or newest[next(kind for kind in reversed(("experience", *MODELS)) if kind in newest)]
    )


def _epoch(context: Context, epoch: int, newest: dict[str, Artifact]) -> Iterator[Artifact]:
    """The artifacts of one epoch, each yielded as soon as it is there, so that the next stage finds it in `newest`."""
    plan = context.settings.run

    def path(kind: str) -> str | None:
        return str(newest[kind].path) if kind in newest else None

    if epoch <= plan.collect_epochs:
        yield collect(context, controller=path("controller") or "random", previous=path("experience"), extend=False)
    if epoch > plan.tokenizer_after:
        yield train_tokenizer(context, experience=path("experience"), parent=path("tokenizer"))
    if epoch > plan.dynamics_after:
        yield train_dynamics(
            context, experience=path("experience"), tokenizer=path("tokenizer"), parent=path("dynamics")
        )
    if epoch > plan.controller_after:
        yield imagine(context, experience=path("experience"), dynamics=path("dynamics"), parent=path("controller"))
        if epoch == plan.epochs:
            yield evaluate(context, controller=path("controller"))
        elif plan.evaluate_every and epoch % plan.evaluate_every == 0:
            yield evaluate(context, controller=path("controller"), episodes=plan.evaluate_episodes)


def _headline(artifact: Artifact) -> dict[str, float]:
    """The number of an artifact that the bar shows."""
    name, key = {
        "experience": ("collected", "mean_return"),
        "tokenizer": ("V", "loss"),
        "dynamics": ("M", "loss"),
        "controller": ("C", "loss"),
        "evaluation": ("return", "mean"),
    }[artifact.kind]
    value = artifact.metrics.get(key)
    return {} if value is None else {name: value}
