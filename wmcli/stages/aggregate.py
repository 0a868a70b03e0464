"""`wm compare`: statistics and tables of the evaluations of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wmcli.metrics import atari, statistics
from wmcli.progress import Progress
from wmcli.stages.pools import estimate, published_pool
from wmcli.stages.scores import (
    GAMES,
    NORMALIZED,
    RETURN,
    Score,
    differences,
    group_scores,
    pool_scores,
    pooled_unit,
    random_mean,
)

ALL = "all"
"""In the rows of a table, all runs or all their environments."""


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
        statistic, of human-normalized scores also of `superhuman`, the number of tasks with a mean of 1 or more.
        `performance_profile`.
        `rows`: the same as a table (see `_rows`).

    Raises:
        UsageError: The scores cannot be pooled.

    Source: Agarwal et al. (2021, arXiv 2108.13264).
    """
    for line in differences([scores, against]):
        progress.warn(line)
    unit = pooled_unit([*scores, *against])
    ours, theirs = (pool_scores(side, unit) for side in (scores, against))
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


def _estimates(scores: Mapping[str, np.ndarray], unit: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return mean, median and IQM, and of human-normalized scores the optimality gap and the superhuman games."""
    names = [name for name in statistics.STATISTICS if unit == NORMALIZED or name not in statistics.OF_NORMALIZED]
    return {name: estimate._asdict() for name, estimate in statistics.aggregate(scores, rng, names).items()}


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
        if isinstance(value, Mapping) and "value" in value and (name != "superhuman" or result["tasks"] > 1):
            unit = {"probability_of_improvement": "probability", "superhuman": GAMES}.get(name, result["unit"])
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
        mine = [score for score in scores if score.environment == environment]
        for row in atari.references(environment, random_mean(mine)):
            rows.append({"environment": environment, "statistic": "mean", "unit": RETURN} | row)
    if result["tasks"] > 1:
        rows += _published_aggregates(sorted({score.environment for score in scores}))
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


def _published_aggregates(environments: Sequence[str]) -> list[dict[str, Any]]:
    """Return the statistics of each published system that has all of these games, without intervals.

    Statistics over runs are left out where only means over runs are published.
    """
    rows = []
    for column in atari.columns("system"):
        pool = published_pool(column, environments)
        if len(pool.returns) == len(environments):
            for statistic, found in estimate(pool, NORMALIZED, None).items():
                if found is not None:
                    is_count = statistic == "superhuman"
                    about = {"name": column.name, "environment": ALL, "statistic": statistic, "score": found.value}
                    about |= {"unit": GAMES if is_count else NORMALIZED, "caveat": column.caveat or None}
                    rows.append(about | {"human_normalized": None if is_count else found.value})
    return sorted(rows, key=lambda row: list(statistics.STATISTICS).index(row["statistic"]))


# -- groups by settings -----------------------------------------------------------------------------------------------


def compare_settings(scores: Sequence[Score], keys: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
    """Make a row for each group of runs with equal values of some settings, in the order of their first runs.

    Args:
        scores: One per run.
        keys: Settings, `section.key`.
        progress: Gets the warnings (see `differences`).

    Returns:
        Rows of those values, the number of `runs`, and the `mean` of their scores in a `unit`, with its 95 % bootstrap
        interval from `low` to `high`. With `environment.id` among the keys these are returns, and `human_normalized` is
        the same mean, human-normalized (None without human scores). `episodes` and environment `steps` are per run,
        "3 to 10" if they differ.

    Raises:
        UsageError: A key is unknown, or the scores cannot be pooled.
    """
    groups = group_scores(scores, keys)
    for line in differences(list(groups.values()), keys):
        progress.warn(line)
    by_game = "environment.id" in keys  # returns of one environment need no common unit
    unit = RETURN if by_game else pooled_unit(scores)
    rng = np.random.default_rng(0)
    rows = []
    for values, members in groups.items():
        mean = statistics.bootstrap(pool_scores(members, unit), "mean", rng)
        normalized = atari.human_normalized(members[0].environment, mean.value) if by_game else None
        rows.append(
            {
                **dict(zip(keys, values, strict=True)),
                "runs": len(members),
                "mean": mean.value,
                "low": mean.low,
                "high": mean.high,
                "unit": unit,
                **({"human_normalized": normalized} if by_game else {}),
                "episodes": _range([score.metrics["episodes"] for score in members]),
                "steps": _range([score.metrics.get("total_steps", 0) for score in members]),
            }
        )
    return rows


def _range(values: Sequence[int]) -> int | str:
    low, high = min(values), max(values)
    return low if low == high else f"{low} to {high}"
