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
from wmcli.metrics.statistics import Estimate
from wmcli.progress import Progress
from wmcli.stages.pools import (
    PUBLISHED,
    Pool,
    Pools,
    compared_pairs,
    estimate,
    games_won,
    improvements,
    pool_variants,
    published_pool,
    share_environments,
    unit_of,
)
from wmcli.stages.scores import GAMES as COUNT
from wmcli.stages.scores import NORMALIZED, RETURN, Score, check_same_tasks, random_mean

GAMES, AGGREGATES, PAIRS, COST = "games", "aggregates", "pairs", "cost"
PROBABILITY, IMPROVEMENT = "probability", "improvement over "
"""Unit and beginning of the statistic of a pair of variants; the name of the other follows."""
WON = ("games better than ", "games equal to ", "games worse than ")
"""Beginnings of the numbers of games of a pair, by the means over runs."""
COLUMNS = (
    *("table", "variant", "environment", "statistic", "value", "low", "high", "unit", "human_normalized", "runs"),
    *("steps", "lowest", "highest", "caveat"),
)
"""Keys of all rows. Published scores stand under the name of their column as variant."""
MEANS_ONLY = "means only"
"""In place of a statistic over runs, where only means over runs are published."""


def compare_variants(
    scores: Mapping[str, Sequence[Score]],
    records: Mapping[Path, Mapping[str, Any]],
    progress: Progress,
    published: Sequence[atari.Column] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of all four tables, with the keys of COLUMNS.

    Means over the runs of a game have 95 % bootstrap intervals over seeds, aggregates stratified ones. Aggregates need
    human-normalized scores, or a single game; the probability of improvement needs neither.

    Args:
        scores: One per run, at least one for each variant. Without variants the tables are of published scores alone.
        records: What a sweep recorded of a run, `seconds` of work and `peak_bytes`, by its folder. Without, the seconds
            are those of its metrics.jsonl.
        progress: Gets a warning for aggregates that are left out, and for environments that not all variants have.
        published: Published scores that stand beside as variants of their own. None: all systems, with values alone.

    Raises:
        UsageError: Runs have different rules of play, or published scores have no game in common with them.

    Source: Agarwal et al. (2021, arXiv 2108.13264).
    """
    check_same_tasks([score for members in scores.values() for score in members])
    pools = pool_variants(scores, published or ())
    if not scores:
        pools = share_environments(pools, progress)
    games = _games(pools, scores)
    if published is None:
        order = list(dict.fromkeys(row["environment"] for row in games))
        games = sorted([*games, *_systems_by_game(scores)], key=lambda row: order.index(row["environment"]))
    rows = [*games, *_aggregates(pools, progress, systems=published is None), *_cost(scores, records)]
    return [dict.fromkeys(COLUMNS) | row for row in rows]


# -- tables for people ------------------------------------------------------------------------------------------------


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
    units: dict[str, str] = {}
    for row in rows:
        if row["table"] == table:
            line = lines.setdefault(row["variant"], {"variant": row["variant"]})
            line[row["statistic"]] = with_interval(row)
            if table == AGGREGATES and row["unit"] != COUNT:
                units[row["variant"]] = row["unit"]
    return [line | ({"unit": units[name]} if name in units else {}) for name, line in lines.items()]


def pairs_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the probabilities of improvement and numbers of games for people: a row for each pair of variants."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["table"] == PAIRS:
            begin = next(each for each in (IMPROVEMENT, *WON) if row["statistic"].startswith(each))
            other = row["statistic"].removeprefix(begin)
            line = lines.setdefault((row["variant"], other), {"variant": row["variant"], "over": other})
            if begin == IMPROVEMENT:
                line["probability of improvement"] = with_interval(row)
            else:
                column = "games better, equal, worse"
                line[column] = ", ".join(filter(None, (line.get(column), with_interval(row))))
    return list(lines.values())


def with_interval(row: Mapping[str, Any]) -> str:
    """Return the value of a row with its interval, if it has one, in the digits that its unit has in papers."""
    if row["value"] is None:
        return MEANS_ONLY
    exact = {NORMALIZED: ".3f", PROBABILITY: ".3f", COUNT: ".0f"}.get(row["unit"])
    one, other = (exact, exact) if exact else (".4g", ".3g")
    if row["unit"] == RETURN and abs(row["value"]) >= 100:
        one = other = ".1f"
    text = f"{row['value']:{one}}"
    return text if row["low"] is None else f"{text} ({row['low']:{other}} to {row['high']:{other}})"


def notes(rows: Sequence[Mapping[str, Any]], columns: Sequence[atari.Column]) -> list[str]:
    """Return a line for each published column: what its numbers are, and why they may not be comparable.

    Args:
        rows: Those of the tables.
        columns: Columns that were named. Others have a line only for their caveat.
    """
    named = {column.name for column in columns}
    lines = [f"{column.name}: {column.scores}; {column.paper}. {column.caveat}".rstrip() for column in columns]
    caveats = {row["variant"]: row["caveat"] for row in rows if row["caveat"]}
    return lines + [
        f"{name}: {caveat}" for name, caveat in caveats.items() if name.removesuffix(PUBLISHED) not in named
    ]


# -- rows -------------------------------------------------------------------------------------------------------------


def _games(pools: Pools, scores: Mapping[str, Sequence[Score]]) -> list[dict[str, Any]]:
    """Return a row for each game and variant."""
    rng = np.random.default_rng(0)
    rows = []
    for environment in dict.fromkeys(environment for pool in pools.values() for environment in pool.returns):
        for variant, pool in pools.items():
            if environment in pool.returns:
                runs = pool.returns[environment]
                mean = statistics.bootstrap({environment: runs}, "mean", rng)
                steps = {
                    score.metrics.get("total_steps")
                    for score in scores.get(variant, ())
                    if score.environment == environment
                }
                rows.append(
                    _game_row(environment, variant, mean, None if pool.means_only else len(runs))
                    | {"lowest": float(runs.min()), "highest": float(runs.max()), "caveat": _caveat(pool)}
                    | {"steps": steps.pop() if len(steps) == 1 else None}
                )
    return rows


def _game_row(environment: str, variant: str, mean: Estimate, runs: int | None) -> dict[str, Any]:
    about = {"table": GAMES, "variant": variant, "environment": environment, "statistic": "mean", "unit": RETURN}
    normalized = atari.human_normalized(environment, mean.value)
    return about | mean._asdict() | {"human_normalized": normalized, "runs": runs}


def _caveat(pool: Pool) -> str | None:
    return (pool.column.caveat or None) if pool.column else None


def _systems_by_game(scores: Mapping[str, Sequence[Score]]) -> list[dict[str, Any]]:
    """Return a row for each published score of these games, or else for random play, as it was measured."""
    every = [score for members in scores.values() for score in members]
    rows = []
    for environment in dict.fromkeys(score.environment for score in every):
        random = random_mean([score for score in every if score.environment == environment])
        for row in atari.references(environment, random):
            name = row["name"] + PUBLISHED * (row["name"] in scores)
            about = {key: row.get(key) for key in ("lowest", "highest", "caveat")}
            rows.append(_game_row(environment, name, Estimate(row["score"], None, None), row.get("runs")) | about)
    return rows


def _aggregates(pools: Pools, progress: Progress, *, systems: bool) -> list[dict[str, Any]]:
    """Return the aggregates of each variant, perhaps of all systems, and how probably runs of one beat another's."""
    rows, rng = [], np.random.default_rng(0)
    try:
        pools = share_environments(pools, progress)
    except UsageError as error:
        progress.warn(f"no aggregates over games: {error}")
        return []
    unit = unit_of(pools)
    if unit is None:
        progress.warn("no aggregates over games: they have no human scores to normalize by")
    else:
        rows += [row for name, pool in pools.items() for row in aggregate_rows(name, pool, unit, rng)]
        rows += _systems(pools) if systems else []
    return rows + _pairs(pools, rng)


def _pairs(pools: Pools, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return how probably runs of one variant beat another's, and of several games those where its mean is higher."""
    chances = improvements(pools, compared_pairs(pools), rng)
    rows = []
    for variant, other in compared_pairs(pools, with_means=True):
        about = {"table": PAIRS, "variant": variant, "runs": _runs(pools[variant])}
        chance = chances.get((variant, other))
        values = chance._asdict() if chance else dict.fromkeys(Estimate._fields)
        rows.append({**about, "statistic": IMPROVEMENT + other, "unit": PROBABILITY, **values})
        if len(pools[variant].returns) > 1:
            counts = games_won(pools[variant], pools[other])
            for name, count in zip(WON, counts, strict=True):
                rows.append(about | {"statistic": name + other, "unit": COUNT, "value": count})
    return rows


def aggregate_rows(name: str, pool: Pool, unit: str, rng: np.random.Generator | None) -> list[dict[str, Any]]:
    """Return a row for each aggregate of a variant, see `estimate`."""
    rows = []
    for statistic, found in estimate(pool, unit, rng).items():
        about = {"table": AGGREGATES, "variant": name, "statistic": statistic, "runs": _runs(pool)}
        about |= {"unit": COUNT if statistic == "superhuman" else unit, "caveat": _caveat(pool)}
        rows.append(about | (found._asdict() if found else dict.fromkeys(Estimate._fields)))
    return rows


def _systems(pools: Pools) -> list[dict[str, Any]]:
    """Return the aggregates of every published system that has all of several games of ours."""
    environments = list(dict.fromkeys(name for pool in pools.values() for name in pool.returns))
    if len(environments) < 2 or not all(map(atari.game_name, environments)):
        return []
    rows = []
    for column in atari.columns("system"):
        pool = published_pool(column, environments)
        if len(pool.returns) == len(environments):
            rows += aggregate_rows(column.name + PUBLISHED * (column.name in pools), pool, NORMALIZED, None)
    return rows


def _runs(pool: Pool) -> int | None:
    return None if pool.means_only else sum(map(len, pool.returns.values()))


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
