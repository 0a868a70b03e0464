"""`wm eval RUN...`: statistics, tables and pictures over the evaluations of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import settings_of
from wmcli.config import did_you_mean
from wmcli.errors import ArtifactError, UsageError
from wmcli.metrics import statistics
from wmcli.settings import flatten
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.pictures import draw_priors


def aggregate(runs: Sequence[Path], against: Sequence[Path] | None = None) -> dict[str, Any]:
    """Statistics over the newest evaluations of several runs, a task being an environment (Agarwal et al. 2021).

    Scores are human-normalised when every environment has reference scores, else raw returns. With `against`, the
    probability that a run of `runs` beats one of `against`. Intervals are 95 % stratified bootstrap intervals.

    Raises ArtifactError for a run without evaluation, UsageError when protocols differ or tasks cannot be pooled.
    """
    tables = [_by_task(runs), _by_task(against)] if against else [_by_task(runs)]
    evaluated = [evaluation for table in tables for evaluations in table.values() for evaluation in evaluations]
    protocols = {evaluation.manifest["environment"]["protocol"] for evaluation in evaluated}
    if len(protocols) > 1:
        raise UsageError(
            f"these runs played under different protocols ({', '.join(sorted(protocols))}); compare runs of one."
        )
    normalized = all(evaluation.metrics["human_normalized"] is not None for evaluation in evaluated)
    if not normalized and len({evaluation.metrics["environment"] for evaluation in evaluated}) > 1:
        raise UsageError(
            "returns of different environments cannot be pooled without reference scores; give runs of one."
        )
    key = "human_normalized" if normalized else "mean"
    scores = [
        {task: np.array([evaluation.metrics[key] for evaluation in evaluations]) for task, evaluations in table.items()}
        for table in tables
    ]
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {
        "scores": {task: values.tolist() for task, values in scores[0].items()},
        "unit": "human-normalised score" if normalized else "return",
        "runs": len(runs),
        "tasks": len(scores[0]),
        **{name: estimate._asdict() for name, estimate in statistics.aggregate(scores[0], rng).items()},
    }
    low, high = min(map(np.min, scores[0].values())), max(map(np.max, scores[0].values()))
    thresholds = np.linspace(low, high, 21)
    profile = statistics.performance_profile(scores[0], thresholds)
    result["performance_profile"] = {"threshold": thresholds.tolist(), "share": np.asarray(profile.value).tolist()}
    if against:
        result["probability_of_improvement"] = statistics.bootstrap_improvement(scores[0], scores[1], rng)._asdict()
    return result


def compare_settings(runs: Sequence[Path], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a table: runs with equal values of these settings (`section.key`) together, in the order of their first.

    Each has those values, `runs`, and the `mean` of their scores with its 95 % bootstrap interval `low` to `high`.

    Raises ArtifactError for a run without evaluation, UsageError for an unknown key or runs that cannot be pooled.
    """
    unit = aggregate(runs)["unit"]
    groups: dict[tuple[Any, ...], list[Path]] = {}
    for run, evaluation in zip(runs, newest_evaluations(runs, PROTOCOL), strict=True):
        values = flatten(settings_of(evaluation))
        for key in keys:
            if key not in values:
                raise UsageError(f"--by {key}: no such setting; {did_you_mean(key, values)}")
        groups.setdefault(tuple(str(values[key]) for key in keys), []).append(run)
    rows = []
    for group, members in groups.items():
        result = aggregate(members)
        if result["unit"] != unit:
            raise UsageError("some of these runs have reference scores and some have none; compare runs of one game.")
        estimate = result["mean"]
        numbers = {"mean": estimate["value"], "low": estimate["low"], "high": estimate["high"]}
        rows.append({**dict(zip(keys, group, strict=True)), "runs": len(members), **numbers})
    return rows


def compare_priors(runs: Sequence[Path], out: Path) -> None:
    """Draw the attention priors that these runs learned. Raises UsageError where they learned none that match."""
    opened = [Run.open(path, create=False) for path in runs]
    draw_priors(opened, settings_of(newest_evaluations(runs[:1], PROTOCOL)[0]), out)


def _by_task(runs: Sequence[Path]) -> dict[str, list[Artifact]]:
    table: dict[str, list[Artifact]] = {}
    for newest in newest_evaluations(runs, PROTOCOL):
        table.setdefault(newest.metrics["environment"], []).append(newest)
    return table


def newest_evaluations(runs: Sequence[Path], protocol: str) -> list[Artifact]:
    """The newest evaluation of each run under a protocol. Raises ArtifactError for a run that has none."""
    found = []
    for path in runs:
        run = Run.open(path, create=False)
        every = (run.get("evaluation", version) for version in reversed(run.versions("evaluation")))
        newest = next((each for each in every if each.metrics["protocol"] == protocol), None)
        if newest is None:
            option = "" if protocol == PROTOCOL else f" --protocol {protocol}"
            raise ArtifactError(f"no such evaluation in {path}; make one with: wm eval --run {path}{option}")
        found.append(newest)
    return found
