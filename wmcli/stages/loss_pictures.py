"""`wm compare --losses`: losses of dynamics models on held-out episodes over updates, beside those in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wmcli.artifacts import Run
from wmcli.assemble import settings_of
from wmcli.errors import ArtifactError, UsageError
from wmcli.progress import Progress
from wmcli.report.plots import along, compared_curves, curves_by_stage, latest_records, write_figure
from wmcli.settings import flatten
from wmcli.stages.scores import Score
from wmcli.trainers.held_out import PREFIX

STAGE = "train-dynamics"
NO_LOSSES = ("nonzero_rewards", "nonzero_rewards_hit")  # logged beside losses, to compute a recall
SCORED = "dynamics.observation_burn_in"
"""Which frames of a segment count in the observation loss of a token model."""

BAND = "one standard deviation over runs"

Curve = tuple[np.ndarray, np.ndarray]


class Losses(NamedTuple):
    """Curves of the dynamics of a run, (updates, values) by metric without `PREFIX`."""

    held_out: dict[str, Curve]
    trained: dict[str, Curve]
    """Of the same metrics, on the batches of training."""
    lost: dict[str, list[int]]
    """Updates where a held-out loss is not finite."""


def draw_losses(groups: Mapping[str, Sequence[Score]], out: Path, progress: Progress) -> None:
    """Draw the losses of runs on held-out episodes, and faintly those in training, a panel for each.

    A line is a run, or the mean of several with a band of a standard deviation over them on either side.

    Args:
        groups: Scores, one per run, by the name of their line.
        out: A .png, .svg or .pdf.
        progress: Gets a warning where losses are not of the same frames, not finite, or not of all runs of a line.

    Raises:
        UsageError: A run measured no such losses, or the picture cannot be written.

    Source: REM (Cohen et al. 2024, arXiv 2402.05643), figure 15.
    """
    _warn_of_other_frames([score for members in groups.values() for score in members], progress)
    losses = {label: [read_losses(score.run, progress) for score in members] for label, members in groups.items()}
    for label, runs in losses.items():
        for score, run in zip(groups[label], runs, strict=True):
            for name, updates in run.lost.items():
                progress.warn(
                    f"{score.run}: {len(updates)} values of {name} from update {updates[0]} on are not finite"
                )
    held_out = {label: _over_runs(label, [run.held_out for run in runs], progress) for label, runs in losses.items()}
    trained = {label: _over_runs(label, [run.trained for run in runs]) for label, runs in losses.items()}
    is_banded = any(len(runs) > 1 for runs in losses.values())
    counts = {label: f" ({len(runs)} run{'s' * (len(runs) > 1)})" * is_banded for label, runs in losses.items()}
    names = {label: label + count for label, count in counts.items()}
    figure = compared_curves(
        {names[label]: curves for label, curves in held_out.items()},
        faint={names[label]: {name: curve[:2] for name, curve in curves.items()} for label, curves in trained.items()},
        title="On held-out episodes; dotted: in training",
        band=BAND if is_banded else "",
    )
    write_figure(out, figure)


def read_losses(path: Path, progress: Progress) -> Losses:
    """Read the losses of a run's newest dynamics model and its ancestors, with a warning where one cannot be read.

    Raises:
        UsageError: It measured none on held-out episodes.
    """
    run = Run.open(path, create=False)
    jobs, version = [], run.latest("dynamics")
    while version is not None:
        jobs.append(version.manifest["job"])
        try:
            version = version.input("parent") if "parent" in version.inputs else None
        except ArtifactError as error:
            progress.warn(f"the losses of {path} begin late: {error}")
            break
    records = along(run.history(), jobs)
    curves = curves_by_stage(records).get(STAGE, {})
    held_out = {name.removeprefix(PREFIX): curve for name, curve in curves.items() if name.startswith(PREFIX)}
    held_out = {name: curve for name, curve in held_out.items() if name not in NO_LOSSES}
    lost: dict[str, list[int]] = {}
    for record in latest_records(each for each in records if each.get("stage") == STAGE):
        for name in record:
            loss = name.removeprefix(PREFIX)
            if name.startswith(PREFIX) and loss not in NO_LOSSES and record[name] is None:  # what JSON lacks
                lost.setdefault(loss, []).append(record["update"])
    if not held_out and lost:
        raise UsageError(
            f"{path}: no loss on held-out episodes is finite; train anew with a lower dynamics.learning_rate"
        )
    if not held_out:
        raise UsageError(
            f"{path} has no losses on held-out episodes; train with --set training.held_out_every=N, which needs"
            " episodes that are held out (collect.test_games, or wm import --held-out)"
        )
    return Losses(held_out, {name: curves[name] for name in held_out if name in curves}, lost)


def _over_runs(
    label: str, runs: Sequence[Mapping[str, Curve]], progress: Progress | None = None
) -> dict[str, tuple[np.ndarray, ...]]:
    """Return updates, mean, and of several runs the limits of the band, for each metric that all runs have.

    Args:
        label: Name of the line.
        runs: Curves of each run.
        progress: Gets a warning for what is left out.
    """
    every = list(dict.fromkeys(name for run in runs for name in run))
    found: dict[str, tuple[np.ndarray, ...]] = {}
    lacking, apart = [], []
    for name in every:
        if not all(name in run for run in runs):
            lacking.append(name)
            continue
        curves = [run[name] for run in runs]
        first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        updates = np.unique([x for each, _ in curves for x in each if first <= x <= last])
        if not len(updates):  # no update that all runs have reached
            apart.append(name)
            continue
        values = np.array([np.interp(updates, x, y) for x, y in curves])
        mean, spread = values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else None
        found[name] = (updates, mean) if spread is None else (updates, mean, mean - spread, mean + spread)
    if progress is not None and lacking:
        progress.warn(f"{label}: not all runs have {', '.join(lacking)}: left out of the picture")
    if progress is not None and apart:
        progress.warn(f"{label}: no update has {', '.join(apart)} of all runs: left out of the picture")
    return found


def _warn_of_other_frames(scores: Sequence[Score], progress: Progress) -> None:
    settings = [flatten(settings_of(score.evaluation)) for score in scores]
    frames = {str(each[SCORED]) for each in settings if SCORED in each}
    predictions = {str(each.get("dynamics.prediction")) for each in settings}
    if len(frames) > 1 or (frames == {"0"} and len(predictions) > 1):
        progress.warn(
            f"{SCORED} = {', '.join(sorted(frames))} with dynamics.prediction = {', '.join(sorted(predictions))}:"
            f" observation losses are means over other frames; train all with one {SCORED} of 1 or more"
        )
