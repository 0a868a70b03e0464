"""Scores of variants side by side: our runs, and columns of published scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wmcli.errors import UsageError
from wmcli.metrics import atari, statistics
from wmcli.metrics.statistics import Estimate
from wmcli.progress import Progress
from wmcli.stages.scores import NORMALIZED, RETURN, Score, pool_scores

PUBLISHED = " (published)"
"""Ends the name of a column where a variant of ours has the same one."""


class Pool(NamedTuple):
    """The scores of one variant by environment, a number for each of R runs: arrays (R,)."""

    returns: dict[str, np.ndarray]
    normalized: dict[str, np.ndarray] | None
    """The same, human-normalized; None if an environment has no human score."""
    column: atari.Column | None = None
    """Of published scores, their origin."""

    @property
    def means_only(self) -> bool:
        """Whether each number is a mean over runs. Statistics over runs do not follow from it."""
        return self.column is not None and not atari.has_runs(self.column.name)

    def keep(self, environments: Sequence[str]) -> Pool:
        """Return the scores of some environments alone."""
        normalized = None if self.normalized is None else {name: self.normalized[name] for name in environments}
        return self._replace(returns={name: self.returns[name] for name in environments}, normalized=normalized)


Pools = dict[str, Pool]
"""By the name of the variant: first ours, then the published ones."""


def pool_variants(groups: Mapping[str, Sequence[Score]], columns: Sequence[atari.Column]) -> Pools:
    """Return the scores of our variants, and behind them published ones in the same environments.

    Without variants of ours the published ones are of all games of Atari-100k.

    Args:
        groups: Scores, one per run, by the name of their variant.
        columns: Published scores.

    Raises:
        UsageError: No environment has published scores.
    """
    pools = {
        name: Pool(
            pool_scores(members, RETURN),
            pool_scores(members, NORMALIZED)
            if all(score.metrics["human_normalized"] is not None for score in members)
            else None,
        )
        for name, members in groups.items()
    }
    environments = list(dict.fromkeys(name for pool in pools.values() for name in pool.returns)) or atari.games()
    if columns and not any(map(atari.game_name, environments)):
        raise UsageError(
            f"--published {columns[0].name}: published scores are of the 26 games of Atari-100k, and these runs are of"
            f" {', '.join(environments)}: omit --published."
        )
    for column in columns:
        pools[column.name + PUBLISHED * (column.name in groups)] = published_pool(column, environments)
    return pools


def published_pool(column: atari.Column, environments: Sequence[str]) -> Pool:
    """Return the scores of a column in those of some environments that it has."""
    runs = {name: atari.reference_runs(name, column.name) for name in environments}
    returns = {name: np.array(values, dtype=float) for name, values in runs.items() if values}
    normalized = {
        name: np.array([atari.human_normalized(name, value) for value in values]) for name, values in returns.items()
    }
    return Pool(returns, normalized, column)


def share_environments(pools: Mapping[str, Pool], progress: Progress) -> Pools:
    """Keep the environments that all variants have.

    Args:
        pools: By name.
        progress: Gets a warning that names the others, and who lacks them.

    Raises:
        UsageError: No environment is left.
    """
    every = list(dict.fromkeys(name for pool in pools.values() for name in pool.returns))
    shared = [name for name in every if all(name in pool.returns for pool in pools.values())]
    if len(shared) < len(every):
        left_out = [name for name in every if name not in shared]
        lacking = [name for name, pool in pools.items() if not pool.returns.keys() >= set(every)]
        line = f"{', '.join(lacking)} lack{'s' * (len(lacking) == 1)} {', '.join(left_out)}"
        if not shared:
            raise UsageError(f"no environment has scores of all variants ({line}); compare fewer of them.")
        progress.warn(f"statistics are over the {len(shared)} environments that all variants have: {line}")
    return {name: pool.keep(shared) for name, pool in pools.items()}


def leave_means_out(pools: Mapping[str, Pool], of: str, progress: Progress) -> Pools:
    """Keep the variants of which there are scores of single runs, with a warning that names the others.

    Args:
        pools: By name.
        of: What is made of them, for the warning.
        progress: Gets it.

    Raises:
        UsageError: None is left.
    """
    kept = {name: pool for name, pool in pools.items() if not pool.means_only}
    left_out = [name for name in pools if name not in kept]
    line = f"of {', '.join(left_out)} only means over runs are published"
    if not kept:
        raise UsageError(f"no {of}: {line}; name a column with runs, such as: --published REM")
    if left_out:
        progress.warn(f"left out of the {of}: {line}")
    return kept


def unit_of(pools: Mapping[str, Pool]) -> str | None:
    """Return the unit in which scores are pooled over environments, None if returns of several have none in common."""
    if all(pool.normalized is not None for pool in pools.values()):
        return NORMALIZED
    return RETURN if len({name for pool in pools.values() for name in pool.returns}) == 1 else None


def in_unit(pool: Pool, unit: str) -> dict[str, np.ndarray]:
    """Return the scores of a variant in the unit of `unit_of`, (R,) for each environment."""
    if unit == RETURN:
        return pool.returns
    assert pool.normalized is not None
    return pool.normalized


def estimate(pool: Pool, unit: str, rng: np.random.Generator | None) -> dict[str, Estimate | None]:
    """Return the statistics over all environments and runs of a variant.

    Args:
        pool: Its scores.
        unit: Returns have no optimality gap and no superhuman games, nor have scores of a single environment those.
        rng: For 95 % stratified bootstrap intervals; None computes none.

    Returns:
        By their names in `statistics.STATISTICS`. None of a statistic over runs, where only means are published.
    """
    names = [name for name in statistics.STATISTICS if unit == NORMALIZED or name not in statistics.OF_NORMALIZED]
    if len(pool.returns) == 1 and "superhuman" in names:
        names.remove("superhuman")
    if not pool.means_only:
        return dict(statistics.aggregate(in_unit(pool, unit), rng, names))
    found = statistics.aggregate(in_unit(pool, unit), None, [name for name in names if name not in statistics.OF_RUNS])
    return {name: found.get(name) for name in names}


def compared_pairs(pools: Mapping[str, Pool], *, with_means: bool = False) -> list[tuple[str, str]]:
    """Return the pairs (variant, other) that are compared.

    These are ours over the first of ours, ours over each published variant, and without any of ours the first
    published one over each other.

    Args:
        pools: By name.
        with_means: Take published variants of which there are means over runs alone, too.
    """
    ours = [name for name, pool in pools.items() if pool.column is None]
    theirs = [name for name, pool in pools.items() if pool.column is not None and (with_means or not pool.means_only)]
    if not ours:
        return [(theirs[0], other) for other in theirs[1:]]
    return [(other, ours[0]) for other in ours[1:]] + [(name, other) for name in ours for other in theirs]


def games_won(one: Pool, other: Pool) -> tuple[int, int, int]:
    """Return in how many environments the mean over runs of one is higher than that of the other, equal, and lower."""
    signs = [np.sign(one.returns[name].mean() - other.returns[name].mean()) for name in one.returns]
    return signs.count(1), signs.count(0), signs.count(-1)


def improvements(
    pools: Mapping[str, Pool], pairs: Sequence[tuple[str, str]], rng: np.random.Generator
) -> dict[tuple[str, str], Estimate]:
    """Return how probably a run of one variant scores higher than one of another, for pairs with equal environments."""
    return {
        (one, other): statistics.bootstrap_improvement(pools[one].returns, pools[other].returns, rng)
        for one, other in pairs
    }
