"""`wm compare`: pictures of the scores of several runs."""

from __future__ import annotations

import re
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
from wmcli.report.plots import (
    BAND,
    STEPS,
    BandKind,
    improvement,
    interval_panels,
    performance_profiles,
    returns_over,
    write_figure,
)
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.pictures import check_same_priors, logged_priors, plot_prior_groups, plot_priors
from wmcli.stages.pools import (
    Pool,
    compared_pairs,
    improvements,
    in_unit,
    leave_means_out,
    share_environments,
    unit_of,
)
from wmcli.stages.scores import Score, check_same_tasks, random_mean
from wmcli.stages.training_games import TRAINING
from wmcli.stages.variants import aggregate_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROFILE_POINTS = 200  # thresholds in a picture
_LABELS = {"steps": STEPS, "minutes": "minutes of work"}


Over = Literal["steps", "minutes"]
"""Horizontal axis of curves."""


STATISTICS = {
    "mean": "mean",
    "median": "median",
    "iqm": "interquartile mean",
    "optimality_gap": "optimality gap",
}
"""Statistics that have a panel, by their names in `statistics.STATISTICS`."""


# -- curves -----------------------------------------------------------------------------------------------------------


def draw_curves(
    groups: Mapping[str, Sequence[Score]],
    out: Path,
    progress: Progress,
    *,
    over: Over = "steps",
    band: BandKind = BAND,
    published: Sequence[atari.Column] = (),
) -> None:
    """Draw the mean returns of several runs over environment steps, or over minutes of work.

    Runs of one environment are drawn in one picture. Of several environments each has a file of its own, with the name
    of the environment behind that of the file.

    Args:
        groups: Scores, one per run, by the label of their line.
        out: A .png, .svg or .pdf.
        progress: Gets a warning for each evaluation that cannot be read, and for published scores that are missing.
        over: "minutes" counts all work in the run's directory until a controller was trained, evaluations included.
        band: See `returns_over`.
        published: Scores that are drawn as dashed lines, besides those of random play and people.

    Raises:
        UsageError: Runs have different rules of play, or a picture cannot be written.
    """
    times = over == "minutes"

    def curve(score: Score) -> list[Point]:
        return read_curve(score, Run.open(score.run, create=False).history() if times else None, progress)

    environments = list(dict.fromkeys(score.environment for members in groups.values() for score in members))
    files = picture_files(out, environments)
    for environment in environments:
        alike = {
            label: [each for each in members if each.environment == environment] for label, members in groups.items()
        }
        alike = {label: members for label, members in alike.items() if members}
        curves = {label: [curve(score) for score in members] for label, members in alike.items()}
        values = {column.name: atari.reference(environment, column.name) for column in published}
        if lacking := [name for name, value in values.items() if value is None]:
            progress.warn(f"the curves of {environment} have no line of {', '.join(lacking)}: no score is published")
        baselines = {name: value for name, value in values.items() if value is not None}
        write_figure(files[environment], plot_lines(alike, curves, over, band, baselines))


def plot_lines(
    groups: Mapping[str, Sequence[Score]],
    curves: Mapping[str, Sequence[Sequence[Point]]],
    over: Over = "steps",
    band: BandKind = BAND,
    baselines: Mapping[str, float] | None = None,
) -> Figure:
    """Plot the curves of `read_curve`, one per score, with the scores of random play and people.

    Args:
        groups: Scores, one per run, all of one environment, by the label of their line.
        curves: Of the same.
        over: Horizontal axis.
        band: See `returns_over`.
        baselines: More returns that are drawn as dashed lines, by name.

    Raises:
        UsageError: The runs have different rules of play.
    """
    scores = [score for members in groups.values() for score in members]
    check_same_tasks(scores)
    lines = {label: [along(curve, over) for curve in members] for label, members in curves.items()}
    known = {"random": random_mean(scores), "human": atari.reference(scores[0].environment, "human")}
    references = {name: value for name, value in known.items() if value is not None} | dict(baselines or {})
    return returns_over(lines, x_label=_LABELS[over], references=references, title=scores[0].environment, band=band)


# -- statistics over runs ---------------------------------------------------------------------------------------------


def draw_profiles(pools: Mapping[str, Pool], out: Path, progress: Progress) -> None:
    """Draw the picture of `plot_profiles` into a .png, .svg or .pdf, of the environments that all variants have.

    Variants of which only means over runs are published are left out with a warning.
    """
    kept = leave_means_out(share_environments(pools, progress), "performance profiles", progress)
    write_figure(out, plot_profiles(kept))


def plot_profiles(pools: Mapping[str, Pool]) -> Figure:
    """Plot performance profiles: for each variant, the share of runs with a score above each threshold.

    Bands are 95 % stratified bootstrap intervals.

    Args:
        pools: Scores of runs in the same environments, by the label of their line.

    Raises:
        UsageError: The scores cannot be pooled.

    Source: Agarwal et al. (2021, arXiv 2108.13264).
    """
    unit = _pooled_unit(pools)
    tasks = {label: in_unit(pool, unit) for label, pool in pools.items()}
    values = np.concatenate([runs for table in tasks.values() for runs in table.values()])
    spread, size = np.ptp(values), np.abs(values).max()
    margin = 0.05 * (spread if spread > 1e-9 * size else size or 1.0)  # shows the lines at 100 % and at 0
    thresholds = np.linspace(values.min() - margin, values.max() + margin, PROFILE_POINTS)
    rng = np.random.default_rng(0)
    profiles = {label: statistics.performance_profile(table, thresholds, rng)[1:] for label, table in tasks.items()}
    return performance_profiles(thresholds, profiles, xlabel=f"{unit} τ")


def draw_intervals(pools: Mapping[str, Pool], out: Path, progress: Progress) -> None:
    """Draw the statistics of each variant with their 95 % stratified bootstrap intervals into a .png, .svg or .pdf.

    Of means over runs only mean and median are drawn, as a value without interval.

    Raises:
        UsageError: The scores cannot be pooled, or the picture cannot be written.

    Source: Agarwal et al. (2021, arXiv 2108.13264), figure 9.
    """
    pools = share_environments(pools, progress)
    unit, rng = _pooled_unit(pools), np.random.default_rng(0)
    rows = [row for name, pool in pools.items() for row in aggregate_rows(name, pool, unit, rng)]
    write_figure(out, plot_intervals(rows, max(len(pool.returns) for pool in pools.values())))


def plot_intervals(rows: Sequence[Mapping[str, Any]], environments: int) -> Figure:
    """Plot the statistics of variants with their intervals: a panel for each statistic, a row for each variant.

    Args:
        rows: Of `aggregate_rows`.
        environments: Their number. Of one the median is the mean, and has no panel.
    """
    panels: dict[str, dict[str, statistics.Estimate]] = {}
    for row in rows:
        panel = STATISTICS.get(row["statistic"])
        if panel is not None and row["value"] is not None and (environments > 1 or panel != "median"):
            estimate = statistics.Estimate(row["value"], row["low"], row["high"])
            panels.setdefault(panel, {})[row["variant"]] = estimate
    return interval_panels(panels, x_label=rows[0]["unit"])


def draw_improvement(pools: Mapping[str, Pool], out: Path, progress: Progress) -> None:
    """Draw how probably a run of one variant scores higher than one of another into a .png, .svg or .pdf.

    The pairs are those of `compared_pairs`. Variants of which only means are published are left out with a warning.

    Raises:
        UsageError: There is no pair, or the picture cannot be written.

    Source: Agarwal et al. (2021, arXiv 2108.13264), figure 11.
    """
    kept = leave_means_out(share_environments(pools, progress), "probability of improvement", progress)
    write_figure(out, improvement(improvements(kept, compared_pairs(kept), np.random.default_rng(0))))


def _pooled_unit(pools: Mapping[str, Pool]) -> str:
    unit = unit_of(pools)
    if unit is None:
        raise UsageError(
            "returns of different environments cannot be pooled without human scores; compare runs of one environment."
        )
    return unit


# -- curves of runs ---------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """An evaluation on a run's line of controllers, or the running mean behind a training game."""

    steps: int
    """Environment steps in the experience of the controller, or until the game ended."""
    minutes: float | None
    """Of work until the controller was trained; None where they were not asked for."""
    mean: float
    """Mean return."""


def read_curve(score: Score, history: Sequence[Mapping[str, Any]] | None, progress: Progress) -> list[Point]:
    """Read the evaluations of a run's newest controller and its ancestors, in order of their versions.

    A score of training games has its own curve, without minutes.

    Args:
        score: Of the run.
        history: The run's log, for the minutes of work; None leaves them out.
        progress: Gets a warning for each evaluation that cannot be read.
    """
    if score.metrics["protocol"] == TRAINING.name:
        return [Point(steps, None, mean) for steps, mean in score.metrics["curve"]]
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


# -- attention priors -------------------------------------------------------------------------------------------------


def compare_priors(groups: Mapping[str, Sequence[Score]], out: Path, progress: Progress) -> None:
    """Draw the attention priors that runs learned: of one group over updates, of several what each ended with.

    Args:
        groups: Scores, one per run, by the name of their group.
        out: A .png, .svg or .pdf.
        progress: Gets a warning for groups that learned none.

    Raises:
        UsageError: None learned any, or those of a group do not match.
    """
    logged = {
        name: [logged_priors(Run.open(score.run, create=False).history()) for score in members]
        for name, members in groups.items()
    }
    learned = {name: runs for name, runs in logged.items() if any(runs)}
    if not learned:
        raise UsageError("no priors to draw; train dynamics whose backbone.prior.kind learns one.")
    if without := [name for name in logged if name not in learned]:
        progress.warn(f"not in the picture: {', '.join(without)}, without attention priors that are learned")
    every = {name: [settings_of(score.evaluation) for score in groups[name]] for name in learned}
    check_same_priors(every)
    settings = {name: members[0] for name, members in every.items()}
    if len(learned) == 1:
        ((name, runs),) = learned.items()
        write_figure(out, plot_priors(runs, settings[name]))
    else:
        write_figure(out, plot_prior_groups(learned, settings))


def picture_files(path: Path, environments: Sequence[str]) -> dict[str, Path]:
    """Return the file of each environment's picture: `path`, or of several with its name behind that of `path`."""
    if len(environments) == 1:
        return {environments[0]: path}
    names = [environment.rpartition("/")[2] for environment in environments]
    names = names if len({*names}) == len(names) else list(environments)
    endings = [re.sub(r"[^\w.]+", "-", name) for name in names]
    return {
        environment: path.with_stem(f"{path.stem}-{ending}")
        for environment, ending in zip(environments, endings, strict=True)
    }
