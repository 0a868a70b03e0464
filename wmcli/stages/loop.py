"""`wm run`: the papers' loop of collect → tokenizer → dynamics → imagine, epoch after epoch.

The loop has no state of its own. Every stage is a job, identified by its settings and inputs. Finished jobs are
recognized at once and interrupted ones resume, so the loop always starts at its first epoch.

The loop may begin with recorded data (`wmcli.stages.imported`). Where no epoch collects, all of them train on the
newest experience of the run; else on the data and what is collected behind them.

With `run.overlap` a second process collects epoch e + 1 while this one trains epoch e. It acts with the controller of
epoch e - 1, whatever the speed of the processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial

from wmcli import ranks
from wmcli.artifacts import KEY_METRICS, Artifact, needed, needed_elsewhere
from wmcli.artifacts.environment import is_imported, is_recorded
from wmcli.artifacts.job import MadeMeanwhileError
from wmcli.artifacts.overview import stalled
from wmcli.artifacts.store import BEST
from wmcli.errors import BusyError, Stopped, UsageError
from wmcli.experience.load import find_held_out
from wmcli.interrupt import stop_requests
from wmcli.settings import Settings, resolve
from wmcli.stages.checks import HELD_OUT_EVERY, check_memory, check_rows, held_back_by
from wmcli.stages.collect import collect, collect_job
from wmcli.stages.collector import Collector
from wmcli.stages.context import Context, PrunedInputError
from wmcli.stages.dynamics import NONE, train_dynamics
from wmcli.stages.evaluate import RETURNS, best_evaluation, evaluate
from wmcli.stages.held_out import HELD_OUT
from wmcli.stages.imagine import imagine
from wmcli.stages.imported import Importing, import_experience
from wmcli.stages.measures import check_measures, measures_of
from wmcli.stages.protocols import PROTOCOLS
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.stages.training_games import TRAINING

MODELS = ("tokenizer", "dynamics", "controller")
COLLECT, TOKENIZER, DYNAMICS, IMAGINE = "collect", "train-tokenizer", "train-dynamics", "imagine"
MEASURE, EVALUATE = "measure", "eval"


def run_loop(context: Context, importing: Importing | None = None) -> Artifact:
    """Run or resume all epochs of `run.*`.

    Args:
        context: Of the run.
        importing: Recorded data to begin with. Without, those that the run has imported before.

    Returns:
        The last artifact: the final evaluation if there is a controller.

    Raises:
        UsageError: The run has experience of another origin, the stages of its last epoch cannot run, or finished
            training would be repeated under other settings (without `context.force`).
        WmError: See the stages.
    """
    plan, progress = context.settings.run, context.progress
    assert context.binding is not None
    start = _start(context)
    held_out = importing is not None and importing.held_out > 0
    _check_own(context.for_loop().at(1), start, importing)
    _check_last(context.binding.at(plan.epochs), start, is_data=importing is not None, held_out=held_out)
    if _collects(context.settings) and not context.run.versions("experience"):
        check_memory(context.settings)
    if importing is not None:
        data = importing
        ranks.first(lambda: import_experience(context, data))
        start = _start(context)
    inside = context.for_loop()
    if start is not None:
        _describe(context, start)
    for line in _idle(context):
        progress.warn(line)
    progress.say(f"run: preset {context.preset}, {plan.epochs} epochs on {context.machine}")
    while True:
        try:
            with stop_requests(), closing(Collector(inside)) as beside:
                newest, scores = _walk(context, inside, beside, start)
                break
        except MadeMeanwhileError as made:
            progress.say(f"run: {made}")  # finished jobs are recognized, that one as well
        except PrunedInputError as missing:
            # With --force its job runs again, and so do the jobs of its inputs. Finished jobs are recognized.
            if not context.force or missing.artifact.digest in inside.again:
                raise
            inside.again.add(missing.artifact.digest)
    ranks.first(inside.bind)  # also if no job was due: settings of `run` may have changed
    for evaluation in scores:
        progress.say(PROTOCOLS[evaluation.metrics["protocol"]].summarize(evaluation))
    best = best_evaluation(inside.run) if "controller" in newest else None
    if best is not None and best.inputs["controller"].digest != newest["evaluation"].inputs["controller"].digest:
        progress.say(
            f"controller@{best.inputs['controller'].version} scored better: {best.metrics['mean']:.3f} over"
            f" {best.metrics['episodes']} episodes; score it in full with: wm eval --run {inside.run} --controller best"
        )
    if "evaluation" in newest:
        return newest["evaluation"]
    return newest[next(kind for kind in reversed(("experience", *MODELS)) if kind in newest)]


def _walk(
    context: Context, inside: Context, beside: Collector, start: Artifact | None
) -> tuple[dict[str, Artifact], list[Artifact]]:
    """Run all epochs, or up to the end of `run.patience`, from the experience `start` on.

    Returns the newest artifact of each kind, and the evaluations of the last epoch.
    """
    plan = context.settings.run
    newest: dict[str, Artifact] = {} if start is None else {"experience": start}
    own: dict[str, list[Artifact]] = {kind: [] for kind in MODELS}
    scores: list[Artifact] = []
    on_the_way: list[Artifact] = []
    shown: dict[str, float] = {}
    left = _TimeLeft(context.settings)
    with stop_requests() as stop, context.progress.bar("run", plan.epochs, "epochs") as bar:
        for epoch in range(1, plan.epochs + 1):
            inside = inside.at(epoch)
            inside.pictures = epoch == plan.epochs or _is_due(plan.pictures_every, epoch)
            before = worked = inside.worked
            began = time.monotonic()
            for stage, artifact in run_epoch(inside, beside, newest):
                newest[artifact.kind] = artifact
                shown |= _headline(artifact)
                if artifact.kind in own:
                    own[artifact.kind].append(artifact)
                if artifact.kind == "evaluation":
                    (scores if epoch == plan.epochs else on_the_way).append(artifact)
                if inside.worked > worked:
                    left.took(stage, time.monotonic() - began)
                began, worked = time.monotonic(), inside.worked
                if any(ranks.agree(stop)):
                    raise Stopped(f"run stopped in epoch {epoch} after {stage}; the same command resumes it.")
            bar.show(**dict(sorted(shown.items(), key=lambda value: value[0] != "return")))
            bar.expect(left.after(epoch))
            bar.advance()
            if any(ranks.agree(inside.worked > before)) or epoch == plan.epochs:
                own = ranks.first(partial(_prune, inside, own, plan.keep))
            means = [evaluation.metrics["mean"] for evaluation in on_the_way] if plan.patience else []
            if epoch < plan.epochs and (peak := stalled(means, plan.patience)) is not None:
                best = on_the_way[peak].input("controller")
                context.progress.say(
                    f"run: ends after epoch {epoch} of {plan.epochs}: none of the last {plan.patience} evaluations"
                    f" exceeds that of controller@{best.version}"
                )
                scores = list(_measure(inside, newest))
                scores.append(ranks.first(partial(evaluate, inside, controller=str(best.path))))
                newest["evaluation"] = scores[-1]
                break
    return newest, scores


def _collects(settings: Settings) -> bool:
    """Return whether an epoch collects."""
    return COLLECT in due(settings, 1)


def _measures_of_play(settings: Settings) -> list[str]:
    """Return the measures of the settings that apply behind imported data: of what the epochs collect."""
    return [each for each in measures_of(settings) if each == TRAINING.name and _collects(settings)]


def _start(context: Context) -> Artifact | None:
    """Return the experience that the loop begins with: the newest, or what was imported first if epochs collect."""
    run = context.run
    if not _collects(context.settings):
        return run.latest("experience")
    start: Artifact | None = None
    for version in run.versions("experience"):
        artifact = run.get("experience", version)
        if not is_imported(artifact):
            break
        start = artifact
    return start


def _describe(context: Context, start: Artifact) -> None:
    """Say what the loop does with the experience that it begins with, and which measures do not apply to it."""
    settings, progress = context.settings, context.progress
    collects = "epochs collect behind it" if _collects(settings) else "no epoch collects"
    progress.say(f"run: begins with {start.name}, {start.metrics['total_steps']} steps; {collects}")
    if not is_imported(start):
        return
    if find_held_out(start, "test") is None:
        progress.say(
            f"run: {start.name} holds no test episodes back, so dreams are not measured: import with --held-out N"
        )
    if is_recorded(settings.environment.id) and settings.controller.acts:
        progress.say(f"run: nobody can play {settings.environment.id}, so the controller's returns are not measured")
    apply = [HELD_OUT.name, *_measures_of_play(settings)]
    if named := [each for each in measures_of(settings) if each not in apply]:
        progress.say(f"run: imported data have no states to measure {', '.join(named)} by: left out")


def _check_own(context: Context, start: Artifact | None, importing: Importing | None) -> None:
    """Raise UsageError if the loop has nothing to begin with, or cannot go on behind the experience of the run."""
    versions = context.run.versions("experience")
    if not _collects(context.settings):
        if not versions and importing is None:
            if is_recorded(context.settings.environment.id):
                raise UsageError(
                    f"{context.run} holds no experience, and nobody can play its environment: give --data PATH."
                )
            raise UsageError(
                f"run.collect_epochs = 0 collects nothing, and {context.run} holds no experience: give --data."
            )
        return
    behind = [version for version in versions if start is None or version > start.version]
    if importing is not None and start is None and versions:
        raise UsageError(f"--data: {context.run} holds experience that was collected before; give another --run.")
    if not behind:
        return
    job = collect_job(context, {} if start is None else {"previous": start})
    if not job.made(context.run.get("experience", behind[0])):
        reason = context.otherwise(job)
        raise UsageError(
            f"{context.run} holds experience that wm run did not collect with these settings"
            + (f" ({reason})" if reason else "")
            + "; give another --run."
        )


def _check_last(settings: Settings, start: Artifact | None, *, is_data: bool, held_out: bool) -> None:
    """Raise UsageError, before the first epoch, if a stage of the last one cannot run.

    `is_data`: data are imported first; `held_out`: some of their episodes are held out.
    """
    stages = due(settings, settings.run.epochs)
    held_out |= start is not None and find_held_out(start, "validation") is not None
    is_data |= start is not None and is_imported(start)
    if DYNAMICS in stages:
        needs = {"dynamics.validate_every": "validation"} if settings.dynamics.needs_validation else {}
        if settings.training.held_out_every and not held_back_by(settings.collect, "test"):
            needs[HELD_OUT_EVERY] = "test"
        for key, part in needs.items() if is_data and not held_out else ():
            raise UsageError(
                f"{key} needs {part} episodes, and none of the data are held out: import with --held-out N, or set"
                f" {key}=0."
            )
        check_rows(settings, is_held_out=held_out)
    if MEASURE in stages and not is_data:
        check_measures(settings)
    if EVALUATE in stages:
        RETURNS.check(settings)


def _idle(context: Context) -> Iterator[str]:
    """Yield a warning for each model that the preset or a chosen kind wants trained, and that no epoch trains."""
    settings, preset = context.settings, resolve(context.preset)
    wanted = {DYNAMICS: DYNAMICS in due(preset, preset.run.epochs)}
    if settings.controller.acts:
        wanted[IMAGINE] = IMAGINE in due(preset, preset.run.epochs) or not preset.controller.acts
    for stage, key in ((DYNAMICS, "dynamics_after"), (IMAGINE, "controller_after")):
        if wanted.get(stage) and stage not in due(settings, settings.run.epochs):
            first = getattr(settings.run, key) + 1
            yield (
                f"{stage} begins in epoch {first}, and run.epochs = {settings.run.epochs} ends before: it trains"
                f" nothing. Set run.epochs={first} or more, or run.{key} lower."
            )


def due(settings: Settings, epoch: int) -> list[str]:
    """Name the stages of an epoch, in order."""
    plan, stages = settings.run, []
    last = epoch == plan.epochs
    can_play = not is_recorded(settings.environment.id)
    # A model that trains its tokenizer continues with its own.
    with_dynamics = settings.dynamics.encoder == "dynamics" and epoch > plan.dynamics_after + 1
    if can_play and epoch <= plan.collect_epochs:
        stages.append(COLLECT)
    if plan.tokenizer_after < epoch <= plan.tokenizer_epochs and not with_dynamics:
        stages.append(TOKENIZER)
    if epoch > plan.dynamics_after:
        stages.append(DYNAMICS)
        stages += [MEASURE] * (last and bool(measures_of(settings)))
    if settings.controller.acts and epoch > plan.controller_after:
        stages.append(IMAGINE)
        if can_play and (last or _is_due(plan.evaluate_every, epoch)):
            stages.append(EVALUATE)
    return stages


def _is_due(interval: int, epoch: int) -> bool:
    """Return whether something with this interval in epochs, 0 for never, is due."""
    return interval > 0 and epoch % interval == 0


class _TimeLeft:
    """The time left, estimated from the last duration of each stage."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seconds: dict[str, float] = {}
        self._to_come: Counter[str] = Counter()
        for epoch in range(1, settings.run.epochs + 1):
            self._to_come.update(due(settings, epoch))

    def took(self, stage: str, seconds: float) -> None:
        self._seconds[stage] = seconds

    def after(self, epoch: int) -> float | None:
        """Return the seconds left without evaluations. None if a future stage has no duration yet."""
        self._to_come.subtract(due(self._settings, epoch))
        beside = {MEASURE, EVALUATE} | ({COLLECT} if self._settings.run.overlap else set())
        trained = {stage: n for stage, n in self._to_come.items() if n > 0 and stage not in beside}
        if not trained.keys() <= self._seconds.keys():
            return None
        return sum(n * self._seconds[stage] for stage, n in trained.items())


def run_epoch(context: Context, beside: Collector, newest: dict[str, Artifact]) -> Iterator[tuple[str, Artifact]]:
    """Run the stages of an epoch. Yield each stage and its artifact, which the caller adds to `newest`.

    Of several ranks the first one collects and evaluates, and all of them train.
    """
    plan, epoch = context.settings.run, context.epoch
    assert epoch is not None
    stages = due(context.settings, epoch)
    last = epoch == plan.epochs

    def path(kind: str) -> str | None:
        return str(newest[kind].path) if kind in newest else None

    if COLLECT in stages and plan.overlap:
        if epoch == 1:
            ranks.first(lambda: beside.begin(context, None, newest.get("experience")))
        yield COLLECT, ranks.first(beside.result)
        if epoch < min(plan.collect_epochs, plan.epochs):
            ranks.first(lambda: beside.begin(context.at(epoch + 1), newest.get("controller"), newest["experience"]))
        else:
            ranks.first(beside.close)
    elif COLLECT in stages:
        who = (path("controller") or "random") if context.settings.collect.policy == "learned" else None
        act = partial(collect, context, controller=who, previous=path("experience"), extend=False)
        yield COLLECT, ranks.first(act)
    if TOKENIZER in stages:
        yield TOKENIZER, train_tokenizer(context, experience=path("experience"), parent=path("tokenizer"))
    if DYNAMICS in stages:
        # A model that trains its tokenizer continues with its own. It may start from the loop's.
        start = path("tokenizer")
        if context.settings.dynamics.encoder == "dynamics" and (start is None or "dynamics" in newest):
            start = NONE
        yield (
            DYNAMICS,
            train_dynamics(
                context,
                experience=path("experience"),
                tokenizer=start,
                parent=path("dynamics"),
                controller=path("controller") or NONE,
            ),
        )
        if last:
            for measured in _measure(context, newest):
                yield MEASURE, measured
    if IMAGINE in stages:
        models = {"experience": path("experience"), "dynamics": path("dynamics")}
        yield IMAGINE, imagine(context, **models, parent=path("controller"))
        if EVALUATE in stages:
            episodes = None if last else plan.evaluate_episodes
            score = partial(evaluate, context, controller=path("controller"), episodes=episodes)
            yield EVALUATE, ranks.first(score)


def _measure(context: Context, newest: dict[str, Artifact]) -> Iterator[Artifact]:
    """Yield each measure of the newest models: those of the settings, or behind imported data dreams and play."""
    yield from ranks.first(lambda: list(_measured(context, newest)))


def _measured(context: Context, newest: dict[str, Artifact]) -> Iterator[Artifact]:
    start = _start(context)
    measures: Sequence[str] = measures_of(context.settings)
    if start is not None and is_imported(start):
        held_out = [HELD_OUT.name] if find_held_out(newest["experience"], "test") is not None else []
        measures = [*held_out, *_measures_of_play(context.settings)]
    for measure in measures:
        needs = PROTOCOLS[measure].needs
        try:
            measured = PROTOCOLS[measure].evaluate(context, **{needs: str(newest[needs].path)})
        except UsageError as reason:  # of the experience: `check_measures` knows the settings
            context.progress.warn(f"run: {measure} is not measured: {reason}")
        else:
            yield measured


def _prune(context: Context, own: dict[str, list[Artifact]], keep: int) -> dict[str, list[Artifact]]:
    """Remove the weights of older models of this loop, unless another process writes these kinds just now.

    The newest `keep` of each kind and the best controller stay, and all that these or other runs need.

    Returns:
        `own` without the models that were removed.
    """
    run = context.run
    old = {kind: versions[:-keep] for kind, versions in own.items()}
    # A tokenizer that learns inside the dynamics model is published beside it.
    dynamics = {artifact.digest for artifact in old["dynamics"]}
    old["tokenizer"] += [
        artifact
        for artifact in run.artifacts("tokenizer")
        if "dynamics" in artifact.inputs and artifact.inputs["dynamics"].digest in dynamics
    ]
    unused = {artifact.digest for versions in old.values() for artifact in versions}
    in_use = [artifact for kind in MODELS for artifact in run.artifacts(kind) if artifact.digest not in unused]
    in_use += needed_elsewhere(run)
    if (run.path / "controller" / BEST).exists():
        in_use.append(run.resolve(f"controller@{BEST}", "controller"))
    unused -= {artifact.digest for artifact in needed(in_use)}
    with suppress(BusyError):
        for kind in reversed(MODELS):  # wherever this ends, no version is left without what it needs
            run.prune(kind, {artifact.version for artifact in old[kind] if artifact.digest in unused})
    return {kind: [each for each in versions if not each.pruned] for kind, versions in own.items()}


def _headline(artifact: Artifact) -> dict[str, float]:
    """Return the metrics of an artifact for the progress bar."""
    metrics = {key: artifact.metrics.get(key) for key in KEY_METRICS[artifact.kind]}
    return {
        "return" if artifact.kind == "evaluation" else key: value for key, value in metrics.items() if value is not None
    }
