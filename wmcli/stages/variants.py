"""Tables of several variants: games, aggregates over them, and cost, a column or row for each variant.

A variant is a system or its settings: the runs of a variant differ in environment and seed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from wmcli.artifacts import Run
from wmcli.artifacts.overview import seconds_of_work
from wmcli.errors import UsageError
from wmcli.metrics import atari, statistics
from wmcli.progress import Progress
from wmcli.stages.scores import NORMALIZED, RETURN, Score, check_same_tasks, pool_scores, pooled_unit, random_mean

GAMES, AGGREGATES, COST = "games", "aggregates", "cost"
COLUMNS = (
    *("table", "variant", "environment", "statistic", "value", "low", "high", "unit", "human_normalized", "runs"),
    "steps",
)
"""Keys of all rows. Published scores stand under the name of their system as variant."""


def compare_variants(
    scores: Mapping[str, Sequence[Score]], records: Mapping[Path, Mapping[str, Any]], progress: Progress
) -> list[dict[str, Any]]:
    """Return the rows of all three tables, with the keys of COLUMNS.

    Means over the runs of a game have 95 % bootstrap intervals over seeds, aggregates stratified ones. Aggregates need
    human-normalized scores, or a single game; the probability of improvement over the first variant needs neither.

    Args:
        scores: One per run, at least one for each variant.
        records: What a sweep recorded of a run, `seconds` of work and `peak_bytes`, by its folder. Without, the seconds
            are those of its metrics.jsonl.
        progress: Gets a warning for aggregates that are left out.

    Raises:
        UsageError: Runs have different rules of play.

    Source: Agarwal et al. (2021, arXiv 2108.13264).
    """
    check_same_tasks([score for members in scores.values() for score in members])
    rows = [*_games(scores), *_aggregates(scores, progress), *_cost(scores, records)]
    return [dict.fromkeys(COLUMNS) | row for row in rows]


def games_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of games for people: a row for each game, a column for each variant and published system."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["table"] == GAMES:
            line = table.setdefault(row["environment"], {"environment": row["environment"]})
            line[row["variant"]] = with_interval(row)
    return list(table.values())


def variants_table(rows: Sequence[Mapping[str, Any]], table: str) -> list[dict[str, Any]]:
    """Return the table of aggregates or cost for people: a row for each variant, a column for each statistic."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["table"] == table:
            line = lines.setdefault(row["variant"], {"variant": row["variant"]})
            line[row["statistic"]] = with_interval(row)
            line["unit"] = row["unit"] if table == AGGREGATES and row["unit"] != "probability" else line.get("unit")
    return [{key: value for key, value in line.items() if value is not None} for line in lines.values()]


def with_interval(row: Mapping[str, Any]) -> str:
    """Return the value of a row with its interval, if it has one."""
    text = f"{row['value']:.4g}"
    return text if row["low"] is None else f"{row['value']:.3g} ({row['low']:.3g} to {row['high']:.3g})"


def _games(scores: Mapping[str, Sequence[Score]]) -> list[dict[str, Any]]:
    """Return a row for each game and variant, and for each published score of these games."""
    rng = np.random.default_rng(0)
    every = [score for members in scores.values() for score in members]
    rows = []
    for environment in dict.fromkeys(score.environment for score in every):
        about = {"table": GAMES, "environment": environment, "statistic": "mean", "unit": RETURN}
        for variant, members in scores.items():
            metrics = [score.metrics for score in members if score.environment == environment]
            if metrics:
                estimate = statistics.bootstrap({environment: [each["mean"] for each in metrics]}, "mean", rng)
                normalized = atari.human_normalized(environment, estimate.value)
                steps: list[Any] = list({each.get("total_steps") for each in metrics})
                rows.append(
                    {**about, "variant": variant, **estimate._asdict(), "human_normalized": normalized}
                    | {"runs": len(metrics), "steps": steps[0] if len(steps) == 1 else None}
                )
        random = random_mean([score for score in every if score.environment == environment])
        for row in atari.references(environment, random):
            published = {"variant": row["name"], "value": row["score"], "low": None, "high": None}
            rows.append(about | published | {"human_normalized": row.get("human_normalized"), "runs": row.get("runs")})
    return rows


def _aggregates(scores: Mapping[str, Sequence[Score]], progress: Progress) -> list[dict[str, Any]]:
    """Return the aggregates of each variant, and how probably its runs beat those of the first one."""
    rng = np.random.default_rng(0)
    try:
        unit = pooled_unit([score for members in scores.values() for score in members])
    except UsageError:
        progress.warn("no aggregates over games: they have no human scores to normalize by")
        unit = None
    rows, first = [], next(iter(scores))
    for variant, members in scores.items():
        about = {"table": AGGREGATES, "variant": variant, "runs": len(members)}
        if unit is not None:
            estimates = statistics.aggregate(pool_scores(members, unit), rng)
            rows += [
                {**about, "statistic": name, **estimate._asdict(), "unit": unit}
                for name, estimate in estimates.items()
                if name != "optimality_gap" or unit == NORMALIZED
            ]
        ours, theirs = (pool_scores(side, RETURN) for side in (members, scores[first]))
        if variant != first and ours.keys() == theirs.keys():
            estimate = statistics.bootstrap_improvement(ours, theirs, rng)
            name = f"improvement over {first}"
            rows.append({**about, "statistic": name, **estimate._asdict(), "unit": "probability"})
    return rows


def _cost(scores: Mapping[str, Sequence[Score]], records: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return hours, peak memory and speed of each variant: means over runs, and the largest memory."""
    rows = []
    for variant, members in scores.items():
        about = {"table": COST, "variant": variant, "runs": len(members)}
        seconds: list[float] = []
        peaks: list[int] = []
        steps = 0
        for score in members:
            record = records.get(score.run, {})
            taken = record.get("seconds")
            if taken is None:
                taken = seconds_of_work(Run.open(score.run, create=False).history(), datetime.now(UTC))
            seconds.append(taken)
            steps += score.metrics.get("total_steps") or 0
            peaks.append(record.get("peak_bytes") or 0)
        rows.append({**about, "statistic": "hours", "value": float(np.mean(seconds)) / 3600, "unit": "hours"})
        if any(peaks):
            rows.append({**about, "statistic": "memory", "value": max(peaks) / 1e9, "unit": "GB"})
        if steps and np.sum(seconds) > 0:
            speed = steps / float(np.sum(seconds))
            rows.append({**about, "statistic": "steps per second", "value": speed, "unit": "1/s"})
    return rows
