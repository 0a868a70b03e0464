"""`wm compare`: pictures of the scores of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np

from wmcli.artifacts import Run
from wmcli.artifacts.overview import seconds_of_work
from wmcli.assemble import settings_of
from wmcli.errors import ArtifactError, UsageError
from wmcli.metrics import atari, statistics
from wmcli.progress import Progress
from wmcli.report.plots import STEPS, performance_profiles, returns_over, write_figure
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.pictures import draw_priors
from wmcli.stages.scores import Score, check_same_tasks, label_groups, pool_scores, pooled_unit

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

    The points of a run are the evaluations of its newest controller and its ancestors, the newest at equal steps.

    Args:
        groups: Scores, one per run, all of one environment, by the label of their line.
        out: A .png, .svg or .pdf.
        progress: Gets a warning for each evaluation that cannot be read.
        over: "minutes" counts all work in the run's directory until a controller was trained, evaluations included.

    Raises:
        UsageError: The runs are of different environments, or the picture cannot be written.
    """
    scores = [score for members in groups.values() for score in members]
    environments = sorted({score.environment for score in scores})
    if len(environments) > 1:
        raise UsageError(f"curves are drawn of one environment: these runs are of {', '.join(environments)}.")
    check_same_tasks(scores)
    lines = {label: [_curve(score, progress, over) for score in members] for label, members in groups.items()}
    references = {"random": float(np.mean([score.metrics["random_mean"] for score in scores]))}
    human = atari.reference(environments[0], "human")
    references |= {} if human is None else {"human": human}
    write_figure(out, returns_over(lines, x_label=_LABELS[over], references=references, title=environments[0]))


def draw_profiles(scores: Sequence[Score], against: Sequence[Score], keys: Sequence[str], out: Path) -> None:
    """Draw the performance profiles of `scores`: a line for each value of some settings, or one for all, and one for
    `against` if there are any.

    See `draw_group_profiles`. An unknown key raises UsageError, too.
    """
    groups = label_groups(scores, keys) if keys else {"RUN" if against else "all runs": list(scores)}
    draw_group_profiles(groups | ({"--against": list(against)} if against else {}), out)


def draw_group_profiles(groups: Mapping[str, Sequence[Score]], out: Path) -> None:
    """Draw performance profiles: for each group of runs, the share with a score above each threshold.

    Bands are 95 % stratified bootstrap intervals.

    Args:
        groups: Scores, one per run, by the label of their line.
        out: A .png, .svg or .pdf.

    Raises:
        UsageError: The scores cannot be pooled, the groups have different environments, or the picture cannot be
            written.

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
                f"--profiles needs the same environments in each group: {label} lacks {', '.join(lacking)}."
            )
    values = np.concatenate([runs for table in tasks.values() for runs in table.values()])
    margin = 0.05 * np.ptp(values)  # shows the lines at 100 % and at 0
    thresholds = np.linspace(values.min() - margin, values.max() + margin, PROFILE_POINTS)
    rng = np.random.default_rng(0)
    profiles = {label: statistics.performance_profile(table, thresholds, rng)[1:] for label, table in tasks.items()}
    write_figure(out, performance_profiles(thresholds, profiles, xlabel=f"{unit} τ"))


def _curve(score: Score, progress: Progress, over: Over) -> list[tuple[float, float]]:
    """Return (step or minute, mean return) of each evaluation on a run's line of controllers, in order."""
    run, lineage = Run.open(score.run, create=False), _lineage(score, progress)
    history = run.history() if over == "minutes" else []
    points: dict[float, float] = {}
    for version in run.versions("evaluation"):
        try:
            evaluation = run.get("evaluation", version)
            controller = evaluation.inputs.get("controller")
            if evaluation.metrics["protocol"] != PROTOCOL or controller is None or controller.digest not in lineage:
                continue
            x = evaluation.metrics["total_steps"]
            if over == "minutes":
                trained = datetime.fromisoformat(evaluation.input("controller").manifest["created"])
                x = seconds_of_work(history, trained + timedelta(seconds=1)) / 60  # the manifest's time has no fraction
        except ArtifactError as error:
            progress.warn(f"left out of the curve of {score.run}: {error}")
            continue
        points[x] = evaluation.metrics["mean"]
    return sorted(points.items())


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


def compare_priors(scores: Sequence[Score], out: Path) -> None:
    """Draw the attention priors that runs learned.

    Raises:
        UsageError: They learned none, or priors that do not match.
    """
    runs = [Run.open(score.run, create=False) for score in scores]
    draw_priors(runs, settings_of(scores[0].evaluation), out)
