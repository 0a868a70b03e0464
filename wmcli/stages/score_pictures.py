"""`wm compare`: pictures of the scores of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from wmcli.artifacts import Run
from wmcli.artifacts.overview import seconds_of_work
from wmcli.assemble import settings_of
from wmcli.errors import ArtifactError, UsageError
from wmcli.metrics import atari, statistics
from wmcli.progress import Progress
from wmcli.report.plots import STEPS, performance_profiles, returns_over, write_figure
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.pictures import draw_priors, plot_prior_groups
from wmcli.stages.scores import Score, check_same_tasks, label_groups, pool_scores, pooled_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROFILE_POINTS = 200  # thresholds in a picture
_LABELS = {"steps": STEPS, "minutes": "minutes of work"}


Over = Literal["steps", "minutes"]
"""Horizontal axis of curves."""


def draw_returns(
    scores: Sequence[Score], keys: Sequence[str], out: Path, progress: Progress, over: Over = "steps"
) -> None:
    """Draw the returns of several runs: a line for each value of some settings (`section.key`), or for each run.

    See `draw_lines`. An unknown key raises UsageError, too.
    """
    groups = label_groups(scores, keys) if keys else {str(score.run): [score] for score in scores}
    draw_lines(groups, out, progress, over)


def draw_lines(groups: Mapping[str, Sequence[Score]], out: Path, progress: Progress, over: Over = "steps") -> None:
    """Draw the mean returns of several runs over environment steps, or over minutes of work, in one picture.

    Args:
        groups: Scores, one per run, all of one environment, by the label of their line.
        out: A .png, .svg or .pdf.
        progress: Gets a warning for each evaluation that cannot be read.
        over: "minutes" counts all work in the run's directory until a controller was trained, evaluations included.

    Raises:
        UsageError: The runs are of different environments, or the picture cannot be written.
    """
    _check_one_environment([score for members in groups.values() for score in members])
    times = over == "minutes"

    def curve(score: Score) -> list[Point]:
        return read_curve(score, Run.open(score.run, create=False).history() if times else None, progress)

    curves = {label: [curve(score) for score in members] for label, members in groups.items()}
    write_figure(out, plot_lines(groups, curves, over))


def plot_lines(
    groups: Mapping[str, Sequence[Score]],
    curves: Mapping[str, Sequence[Sequence[Point]]],
    over: Over = "steps",
    *,
    interval: bool = False,
) -> Figure:
    """Plot the curves of `read_curve`, one per score, with the scores of random play and people.

    Args:
        groups: Scores, one per run, all of one environment, by the label of their line.
        curves: Of the same.
        over: Horizontal axis.
        interval: Draw 95 % intervals of the mean over runs, not the range of the runs.

    Raises:
        UsageError: The runs are of different environments.
    """
    scores = [score for members in groups.values() for score in members]
    _check_one_environment(scores)
    lines = {label: [along(curve, over) for curve in members] for label, members in curves.items()}
    references = {"random": float(np.mean([score.metrics["random_mean"] for score in scores]))}
    human = atari.reference(scores[0].environment, "human")
    references |= {} if human is None else {"human": human}
    bands = {"interval": True} if interval else {}
    return returns_over(lines, x_label=_LABELS[over], references=references, title=scores[0].environment, **bands)


def _check_one_environment(scores: Sequence[Score]) -> None:
    environments = sorted({score.environment for score in scores})
    if len(environments) > 1:
        raise UsageError(f"curves are drawn of one environment: these runs are of {', '.join(environments)}.")
    check_same_tasks(scores)


def draw_profiles(scores: Sequence[Score], against: Sequence[Score], keys: Sequence[str], out: Path) -> None:
    """Draw the performance profiles of `scores`: a line for each value of some settings, or one for all, and one for
    `against` if there are any.

    See `draw_group_profiles`. An unknown key raises UsageError, too.
    """
    groups = label_groups(scores, keys) if keys else {"RUN" if against else "all runs": list(scores)}
    draw_group_profiles(groups | ({"--against": list(against)} if against else {}), out)


def draw_group_profiles(groups: Mapping[str, Sequence[Score]], out: Path) -> None:
    """Draw the picture of `plot_profiles` into a .png, .svg or .pdf."""
    write_figure(out, plot_profiles(groups))


def plot_profiles(groups: Mapping[str, Sequence[Score]]) -> Figure:
    """Plot performance profiles: for each group of runs, the share with a score above each threshold.

    Bands are 95 % stratified bootstrap intervals.

    Args:
        groups: Scores, one per run, by the label of their line.

    Raises:
        UsageError: The scores cannot be pooled, or the groups have different environments.

    Source: Agarwal et al. (2021, arXiv 2108.13264).
    """
    scores = [score for members in groups.values() for score in members]
    check_same_tasks(scores)
    unit = pooled_unit(scores)
    tasks = {label: pool_scores(members, unit) for label, members in groups.items()}
    every = set().union(*tasks.values())
    for label, table in tasks.items():
        if lacking := sorted(every - set(table)):
            raise UsageError(
                f"performance profiles need the same environments in each group: {label} lacks {', '.join(lacking)}."
            )
    values = np.concatenate([runs for table in tasks.values() for runs in table.values()])
    margin = 0.05 * np.ptp(values)  # shows the lines at 100 % and at 0
    thresholds = np.linspace(values.min() - margin, values.max() + margin, PROFILE_POINTS)
    rng = np.random.default_rng(0)
    profiles = {label: statistics.performance_profile(table, thresholds, rng)[1:] for label, table in tasks.items()}
    return performance_profiles(thresholds, profiles, xlabel=f"{unit} τ")


class Point(NamedTuple):
    """An evaluation on a run's line of controllers."""

    steps: int
    """Environment steps in the experience of the controller."""
    minutes: float | None
    """Of work until the controller was trained; None where they were not asked for."""
    mean: float
    """Mean return."""


def read_curve(score: Score, history: Sequence[Mapping[str, Any]] | None, progress: Progress) -> list[Point]:
    """Read the evaluations of a run's newest controller and its ancestors, in order of their versions.

    Args:
        score: Of the run.
        history: The run's log, for the minutes of work; None leaves them out.
        progress: Gets a warning for each evaluation that cannot be read.
    """
    run, lineage = Run.open(score.run, create=False), _lineage(score, progress)
    points = []
    for version in run.versions("evaluation"):
        minutes = None
        try:
            evaluation = run.get("evaluation", version)
            controller = evaluation.inputs.get("controller")
            if evaluation.metrics["protocol"] != PROTOCOL or controller is None or controller.digest not in lineage:
                continue
            if history is not None:
                trained = datetime.fromisoformat(evaluation.input("controller").manifest["created"])
                minutes = seconds_of_work(history, trained + timedelta(seconds=1)) / 60  # no fraction in the manifest
        except ArtifactError as error:
            progress.warn(f"left out of the curve of {score.run}: {error}")
            continue
        points.append(Point(evaluation.metrics["total_steps"], minutes, evaluation.metrics["mean"]))
    return points


def along(curve: Sequence[Point], over: Over) -> list[tuple[float, float]]:
    """Return (step or minute, mean return) of each point in order, the newest of those at one place."""
    places = {point.steps if over == "steps" else point.minutes: point.mean for point in curve}
    return sorted((place, mean) for place, mean in places.items() if place is not None)


def _lineage(score: Score, progress: Progress) -> set[str]:
    """Return the digests of a run's newest controller, or else the scored one, and of its ancestors."""
    controller = Run.open(score.run, create=False).latest("controller") or score.evaluation.input("controller")
    digests = {controller.digest}
    while "parent" in controller.inputs:
        digests.add(controller.inputs["parent"].digest)
        try:
            controller = controller.input("parent")
        except ArtifactError as error:
            progress.warn(f"the curve of {score.run} begins late: {error}")
            break
    return digests


def compare_priors(scores: Sequence[Score], keys: Sequence[str], out: Path) -> None:
    """Draw the attention priors that runs learned: over updates, or with `keys` what each group of runs ended with.

    Raises:
        UsageError: They learned none, or priors that do not match.
    """
    if keys:
        groups = label_groups(scores, keys)
        opened = {label: [Run.open(score.run, create=False) for score in group] for label, group in groups.items()}
        settings = {label: settings_of(group[0].evaluation) for label, group in groups.items()}
        write_figure(out, plot_prior_groups(opened, settings))
        return
    runs = [Run.open(score.run, create=False) for score in scores]
    draw_priors(runs, settings_of(scores[0].evaluation), out)
