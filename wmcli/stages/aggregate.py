"""`wm compare`: statistics, tables and pictures of the evaluations of several runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import settings_of
from wmcli.config import canonical_json, did_you_mean
from wmcli.errors import ArtifactError, UsageError
from wmcli.metrics import atari, statistics
from wmcli.progress import Progress
from wmcli.report.plots import returns_over_steps, write_figure
from wmcli.settings import flatten
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.pictures import draw_priors

ALL = "all"
"""In the rows of a table, all runs or all their environments."""


class Score(NamedTuple):
    """The evaluation that represents a run."""

    run: Path
    """As the user wrote it."""
    evaluation: Artifact

    @property
    def metrics(self) -> dict[str, Any]:
        return self.evaluation.metrics

    @property
    def environment(self) -> str:
        return str(self.metrics["environment"])


# -- choice of evaluations --------------------------------------------------------------------------------------------


def read_scores(runs: Sequence[Path], protocol: str, progress: Progress) -> list[Score]:
    """Find the evaluation that represents each run under a protocol.

    It is the newest final one, or else the newest interim one, with a warning. Evaluations of `wm run` before its last
    epoch are interim, by the epoch in the manifest. Without an epoch an evaluation is final.

    Args:
        runs: Run directories.
        protocol: Name of the protocol.
        progress: Gets the warnings.

    Raises:
        ArtifactError: A run has no such evaluation, or a damaged one that may be the newest.
        UsageError: Two runs are one, by the same path, a link or a copy.
    """
    scores = [Score(path, _choose_evaluation(path, protocol, progress)) for path in runs]
    paths: dict[str, Path] = {}
    for path, evaluation in scores:
        if evaluation.digest in paths:
            raise UsageError(
                f"{paths[evaluation.digest]} and {path} hold the very same {evaluation.name}, which would count twice:"
                " leave one out."
            )
        paths[evaluation.digest] = path
    return scores


def _choose_evaluation(path: Path, protocol: str, progress: Progress) -> Artifact:
    run, interim, others = Run.open(path, create=False), None, set()
    command = f"wm eval --run {shlex.quote(str(path))}" + (f" --protocol {protocol}" if protocol != PROTOCOL else "")
    for version in reversed(run.versions("evaluation")):
        try:
            evaluation = run.get("evaluation", version)
        except ArtifactError as error:
            if interim is not None:
                continue
            raise ArtifactError(
                f"the newest evaluation of {path} cannot be read ({error}); make another with: {command} --force"
            ) from None
        if evaluation.metrics["protocol"] == protocol:
            if not _is_interim(evaluation):
                return evaluation
            interim = interim or evaluation
        else:
            others.add(evaluation.metrics["protocol"])
    if interim is None:
        choices = f" (it has some of --protocol {', '.join(sorted(others))})" if others else ""
        raise ArtifactError(f"{path} has no evaluation of --protocol {protocol}{choices}; make one with: {command}")
    progress.warn(
        f"{path} has no final evaluation: taking {interim.name}, of epoch {interim.manifest['extra']['epoch']} of"
        f" {settings_of(interim).run.epochs}."
    )
    return interim


def _is_interim(evaluation: Artifact) -> bool:
    """Return whether `wm run` made an evaluation before its last epoch."""
    epoch = evaluation.manifest["extra"].get("epoch")
    return epoch is not None and epoch < settings_of(evaluation).run.epochs


# -- comparability ----------------------------------------------------------------------------------------------------

_SAME_TASK = ("protocol", "test")  # keys of the environment that must agree
_NOT_COMPARED = ("id", "action_meanings", "versions")  # keys of the environment
_NOT_LEARNING = (
    "seed",
    "environment.id",
    "environment.protocol",
    "environment.size",
    "evaluation.",
    "run.keep",
    "run.evaluate_",
    "training.device",
    "training.precision",
    "training.kernels",
    "training.cuda_graph",
    "training.threads",
    "training.checkpoint_seconds",
    "training.log_every",
)
"""Settings in which runs of one system may differ: seeds, tasks, and settings without influence on the weights."""
_NAMED = 3  # runs or settings in a warning


def differences(groups: Sequence[Sequence[Score]], by: Sequence[str] = ()) -> list[str]:
    """List the differences between the scores of several runs, one line each.

    Over all groups: episodes, environment steps, temperature of the policy, shared settings of acting. For each
    environment: the size of frames and the rest of its manifest block.
    Within a group: other settings that learning depends on, and runs that agree even in their seed.
    Not compared: versions of packages, device, precision, the number of parallel environments in evaluation.

    Args:
        groups: The scores, in groups that are pooled.
        by: Settings (`section.key`) that make the groups, and are not listed.

    Raises:
        UsageError: The tasks differ: the protocol of the environment, or lives and time limits of test episodes.
    """
    scores = [score for group in groups for score in group]
    blocks = [score.evaluation.manifest["environment"] for score in scores]
    protocols = {block["protocol"] for block in blocks}
    if len(protocols) > 1:
        raise UsageError(
            f"these runs have different protocols of play ({', '.join(sorted(protocols))}); compare runs of one."
        )
    lines = []
    for environment in dict.fromkeys(score.environment for score in scores):
        alike = [(score.run, block) for score, block in zip(scores, blocks, strict=True) if block["id"] == environment]
        for key in dict.fromkeys(key for _, block in alike for key in block if key not in _NOT_COMPARED):
            line = _differ(f"{environment} {key}", [(run, block[key]) for run, block in alike if key in block])
            if line and key in _SAME_TASK:
                raise UsageError(f"these runs have different test episodes: {line}; compare runs with the same.")
            lines.append(line)
    conditions = [(score.run, _conditions(score)) for score in scores]
    for key in dict.fromkeys(key for _, values in conditions for key in values if key not in by):
        lines.append(_differ(key, [(run, values[key]) for run, values in conditions if key in values]))
    for group in groups:
        lines += _differ_in_learning(group, by)
    return [line for line in lines if line]


def _conditions(score: Score) -> dict[str, Any]:
    """Return the conditions of a score besides environment and weights, by name."""
    settings, metrics = settings_of(score.evaluation), score.metrics
    acting = settings.acting
    section = "controller" if acting["controller"] else "dynamics"
    values = acting[section]
    return {
        "episodes": metrics["episodes"],
        "environment steps": metrics.get("total_steps"),
        "evaluation.temperature": settings.evaluation.temperature,
        **{f"{section}.{key}": value for key, value in values.items()},
    }


def _differ(name: str, values: Sequence[tuple[Path, Any]]) -> str | None:
    """Return `episodes differ: 3 (runs/a), 5 (runs/b, runs/c)`, or None if there is one value."""
    runs: dict[str, list[str]] = {}
    for run, value in values:
        runs.setdefault(value if isinstance(value, str) else canonical_json(value), []).append(str(run))
    if len(runs) < 2:
        return None
    return f"{name} differ: " + ", ".join(f"{value} ({_first(names)})" for value, names in runs.items())


def _differ_in_learning(group: Sequence[Score], by: Sequence[str]) -> list[str]:
    every = [flatten(settings_of(score.evaluation)) for score in group]
    acting = {key for score in group for key in _conditions(score)}
    keys = [key for key in dict.fromkeys(key for each in every for key in each) if not key.startswith(_NOT_LEARNING)]
    # Keys that only some kinds have differ with the kind.
    shared = [key for key in keys if key not in acting and all(key in each for each in every)]
    other = [key for key in shared if len({str(each[key]) for each in every}) > 1]
    lines = []
    if other:
        runs = _first([str(score.run) for score in group])
        lines.append(
            f"runs of different settings are pooled into one number: {_first(other)} ({runs}); group them with: --by"
            f" {other[0]}"
        )
    same: dict[str, list[str]] = {}
    for score, each in zip(group, every, strict=True):
        alike = {key: each[key] for key in ("seed", "environment.id", *keys) if key in each}
        same.setdefault(str(alike), []).append(str(score.run))
    lines += [
        f"{_first(names)} have the same settings and the same seed, so they are no independent samples."
        for names in same.values()
        if len(names) > 1
    ]
    return lines


def _first(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


# -- statistics -------------------------------------------------------------------------------------------------------


def aggregate(scores: Sequence[Score], against: Sequence[Score], progress: Progress) -> dict[str, Any]:
    """Compute statistics over the evaluations of several runs. Every environment is a task.

    Scores are human-normalized if every environment has reference scores, else returns. Intervals are 95 % stratified
    bootstrap intervals.

    Args:
        scores: One per run.
        against: Of other runs, for the probability that a run of `scores` beats one of them; may be empty.
        progress: Gets the warnings (see `differences`).

    Returns:
        `scores` by task, their `unit`, numbers of `runs` and `tasks`. An estimate `{"value", "low", "high"}` of each
        statistic. `performance_profile`. `rows`: the same as a table (see `_rows`).

    Raises:
        UsageError: The scores cannot be pooled.

    Source: Agarwal et al. (2021, arXiv 2108.13264).
    """
    for line in differences([scores, against]):
        progress.warn(line)
    unit = _unit([*scores, *against])
    ours, theirs = (_by_task(side, unit) for side in (scores, against))
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {
        "scores": {task: values.tolist() for task, values in ours.items()},
        "unit": unit,
        "runs": len(scores),
        "tasks": len(ours),
        **_estimates(ours, unit, rng),
    }
    low, high = min(map(np.min, ours.values())), max(map(np.max, ours.values()))
    thresholds = np.linspace(low, high, 21)
    profile = statistics.performance_profile(ours, thresholds)
    result["performance_profile"] = {"threshold": thresholds.tolist(), "share": np.asarray(profile.value).tolist()}
    if against:
        result["probability_of_improvement"] = statistics.bootstrap_improvement(ours, theirs, rng)._asdict()
    return result | {"rows": _rows(scores, result)}


NORMALIZED, RETURN = "human-normalized score", "return"


def _unit(scores: Sequence[Score]) -> str:
    """Return the unit of pooled scores. Returns of different environments raise UsageError."""
    if all(score.metrics["human_normalized"] is not None for score in scores):
        return NORMALIZED
    if len({score.environment for score in scores}) > 1:
        raise UsageError(
            "returns of different environments cannot be pooled without reference scores; give runs of one, or add:"
            " --by environment.id"
        )
    return RETURN


def _by_task(scores: Sequence[Score], unit: str) -> dict[str, np.ndarray]:
    key = "human_normalized" if unit == NORMALIZED else "mean"
    table: dict[str, list[float]] = {}
    for score in scores:
        table.setdefault(score.environment, []).append(score.metrics[key])
    return {task: np.array(values) for task, values in table.items()}


def _estimates(scores: Mapping[str, np.ndarray], unit: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return mean, median and IQM, and of human-normalized scores the optimality gap."""
    estimates = {name: estimate._asdict() for name, estimate in statistics.aggregate(scores, rng).items()}
    if unit != NORMALIZED:
        del estimates["optimality_gap"]
    return estimates


# -- rows -------------------------------------------------------------------------------------------------------------


COLUMNS = (
    "name",
    "environment",
    "statistic",
    "score",
    "low",
    "high",
    "stderr",
    "unit",
    "human_normalized",
    "runs",
    "episodes",
    "steps",
    "lowest",
    "highest",
    "evaluation",
    "caveat",
)


def _rows(scores: Sequence[Score], result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table: a row for each run, our aggregates, and the published scores of these environments.

    All rows have the same columns. `score` is the `statistic` of `name` in `environment`, in a `unit`. The score of a
    run is the mean return of its episodes, with `stderr`. An aggregate has the interval from `low` to `high`. A
    published score is a mean over runs, with the `lowest` and the `highest` run if they are published.
    """
    rows = [_run_row(score) for score in sorted(scores, key=lambda score: score.environment)]
    for name, value in result.items():
        if isinstance(value, Mapping) and "value" in value:
            unit = "probability" if name == "probability_of_improvement" else result["unit"]
            rows.append(
                {
                    "name": ALL,
                    "environment": ALL if result["tasks"] > 1 else scores[0].environment,
                    "statistic": name,
                    "score": value["value"],
                    "low": value["low"],
                    "high": value["high"],
                    "unit": unit,
                    "human_normalized": value["value"] if unit == NORMALIZED else None,
                    "runs": result["runs"],
                }
            )
    for environment in sorted({score.environment for score in scores}):
        mine = [score.metrics for score in scores if score.environment == environment]
        for row in atari.references(environment, float(np.mean([metrics["random_mean"] for metrics in mine]))):
            rows.append({"environment": environment, "statistic": "mean", "unit": RETURN} | row)
    if result["tasks"] > 1:
        rows += _published_aggregates({score.environment for score in scores})
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def _run_row(score: Score) -> dict[str, Any]:
    metrics = score.metrics
    return {
        "name": str(score.run),
        "environment": score.environment,
        "statistic": "mean",
        "score": metrics["mean"],
        "stderr": metrics["stderr"],
        "unit": RETURN,
        "human_normalized": metrics["human_normalized"],
        "runs": 1,
        "episodes": metrics["episodes"],
        "steps": metrics.get("total_steps"),
        "evaluation": score.evaluation.name,
    }


def _published_aggregates(environments: set[str]) -> list[dict[str, Any]]:
    """Return mean and median of each published system that has all of these games.

    There are no IQM and optimality gap: of many systems only means over runs are published.
    """
    games = {atari.game_name(environment) for environment in environments}
    rows = []
    for statistic in (statistics.mean, statistics.median):
        for column in atari.columns("system"):
            scores = {game: runs for game, runs in atari.normalized_runs(column.name).items() if game in games}
            if len(scores) == len(games):
                value = statistic(scores)
                rows.append(
                    {
                        "name": column.name,
                        "environment": ALL,
                        "statistic": statistic.__name__,
                        "score": value,
                        "unit": NORMALIZED,
                        "human_normalized": value,
                        "caveat": column.caveat or None,
                    }
                )
    return rows


# -- groups by settings -----------------------------------------------------------------------------------------------


def compare_settings(scores: Sequence[Score], keys: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
    """Make a row for each group of runs with equal values of some settings, in the order of their first runs.

    Args:
        scores: One per run.
        keys: Settings, `section.key`.
        progress: Gets the warnings (see `differences`).

    Returns:
        Rows of those values, the number of `runs`, and the `mean` of their scores in a `unit`, with its 95 % bootstrap
        interval from `low` to `high`. `episodes` and environment `steps` are per run, "3 to 10" if they differ.

    Raises:
        UsageError: A key is unknown, or the scores cannot be pooled.
    """
    groups = _grouped(scores, keys)
    for line in differences(list(groups.values()), keys):
        progress.warn(line)
    # Groups of one environment each need no common unit.
    shared = None if "environment.id" in keys else _unit(scores)
    rng = np.random.default_rng(0)
    rows = []
    for values, members in groups.items():
        unit = shared or _unit(members)
        estimate = statistics.bootstrap(_by_task(members, unit), "mean", rng)
        rows.append(
            {
                **dict(zip(keys, values, strict=True)),
                "runs": len(members),
                "mean": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "unit": unit,
                "episodes": _range([score.metrics["episodes"] for score in members]),
                "steps": _range([score.metrics.get("total_steps", 0) for score in members]),
            }
        )
    return rows


def _grouped(scores: Sequence[Score], keys: Sequence[str]) -> dict[tuple[str, ...], list[Score]]:
    """Group scores by the values of some settings, "-" where the kind of a section has no such key."""
    tables = [flatten(settings_of(score.evaluation)) for score in scores]
    groups: dict[tuple[str, ...], list[Score]] = {}
    for key in keys:
        if not any(key in table for table in tables):
            raise UsageError(f"--by {key}: no such setting; {did_you_mean(key, tables[0])}")
    for score, table in zip(scores, tables, strict=True):
        groups.setdefault(tuple(str(table.get(key, "-")) for key in keys), []).append(score)
    return groups


def _range(values: Sequence[int]) -> int | str:
    low, high = min(values), max(values)
    return low if low == high else f"{low} to {high}"


# -- pictures ---------------------------------------------------------------------------------------------------------


def draw_returns(scores: Sequence[Score], keys: Sequence[str], out: Path, progress: Progress) -> None:
    """Draw the mean returns of several runs over environment steps in one picture.

    The points of a run are the evaluations of its newest controller and its ancestors, the newest at equal steps.

    Args:
        scores: One per run, all of one environment.
        keys: Settings (`section.key`) that make groups of runs. Without any, each run is a line.
        out: A .png, .svg or .pdf.
        progress: Gets a warning for each evaluation that cannot be read.

    Raises:
        UsageError: The runs are of different environments, a key is unknown, or the picture cannot be written.
    """
    environments = sorted({score.environment for score in scores})
    if len(environments) > 1:
        raise UsageError(f"curves are drawn of one environment: these runs are of {', '.join(environments)}.")
    groups = _grouped(scores, keys) if keys else {(str(score.run),): [score] for score in scores}
    differences(list(groups.values()), keys)  # raises; the table lists the differences
    lines = {}
    for values, members in groups.items():
        label = ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True)) if keys else values[0]
        lines[label] = [_curve(score, progress) for score in members]
    references = {"random": float(np.mean([score.metrics["random_mean"] for score in scores]))}
    human = atari.reference(environments[0], "human")
    references |= {} if human is None else {"human": human}
    write_figure(out, returns_over_steps(lines, references=references, title=environments[0]))


def _curve(score: Score, progress: Progress) -> list[tuple[float, float]]:
    """Return (environment step, mean return) of each evaluation on a run's line of controllers, by step."""
    run, lineage = Run.open(score.run, create=False), _lineage(score, progress)
    points: dict[int, float] = {}
    for version in run.versions("evaluation"):
        try:
            evaluation = run.get("evaluation", version)
        except ArtifactError as error:
            progress.warn(f"left out of the curve of {score.run}: {error}")
            continue
        controller = evaluation.inputs.get("controller")
        if evaluation.metrics["protocol"] == PROTOCOL and controller is not None and controller.digest in lineage:
            points[evaluation.metrics["total_steps"]] = evaluation.metrics["mean"]
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
