"""Statistics over runs and tasks, with bootstrap intervals.

Scores are numbers, one per training run, grouped by task (game). Tasks may have different numbers of runs. There are
three forms:

    {"Pong": [0.9, 1.1], "Alien": [0.1, 0.2, 0.1]}      a mapping, task -> runs
    [[0.9, 1.1], [0.1, 0.2, 0.1]]                       a sequence over tasks
    array of shape (runs, tasks)                        the papers' convention

A statistic takes a list over tasks of arrays (..., R) and reduces the last axis: one call serves all samples.
B bootstrap samples, R runs of one task, N runs of all tasks, K thresholds.

Source: Agarwal et al. (2021, NeurIPS, arXiv 2108.13264).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wmcli.errors import UsageError

Scores = Mapping[str, ArrayLike] | Sequence[ArrayLike] | np.ndarray
Statistic = Callable[[list[np.ndarray]], np.ndarray]

REPETITIONS = 50_000  # resamples; with 2,000 the limits over 26 games vary by 0.01 between seeds

_CHUNK = 1 << 18  # numbers at once while bootstrapping: 2 MiB, which fit the processor's cache


class Estimate(NamedTuple):
    """A statistic and its bootstrap interval.

    `low` and `high` are None where no task has more than one run, or where no interval was asked for.
    """

    value: float
    low: float | None
    high: float | None


class Profile(NamedTuple):
    """A performance profile: the share of runs above each threshold. Arrays (K,)."""

    thresholds: np.ndarray
    value: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


# -- point statistics -------------------------------------------------------------------------------------------------


def mean(scores: Scores) -> float:
    """Return the mean over tasks of the mean over runs."""
    return float(_mean(by_task(scores)))


def median(scores: Scores) -> float:
    """Return the median over tasks of the mean over runs."""
    return float(_median(by_task(scores)))


def performance_profile(
    scores: Scores,
    thresholds: ArrayLike,
    rng: np.random.Generator | None = None,
    *,
    repetitions: int = REPETITIONS,
    confidence: float = 0.95,
) -> Profile:
    """Return the share of all runs of all tasks with a score above each threshold.

    Args:
        scores: Of all tasks.
        thresholds: (K,).
        rng: For pointwise stratified bootstrap limits; None computes none.
        repetitions: Number of resamples.
        confidence: Of the limits.
    """
    tasks, taus = by_task(scores), np.asarray(thresholds, dtype=np.float64)

    def shares(sample: list[np.ndarray]) -> np.ndarray:
        pooled = np.sort(np.concatenate(sample, axis=-1), axis=-1)  # (..., N)
        rows = pooled.reshape(-1, pooled.shape[-1])
        above = np.stack([row.size - np.searchsorted(row, taus, side="right") for row in rows])
        return above.reshape(*pooled.shape[:-1], taus.size) / pooled.shape[-1]  # (..., K)

    value = shares(tasks)
    if rng is None or not _varies(tasks):
        return Profile(taus, value, None, None)
    low, high = _interval(_resample([tasks], lambda sample: shares(sample[0]), rng, repetitions), confidence)
    return Profile(taus, value, low, high)


# -- bootstrap --------------------------------------------------------------------------------------------------------


def bootstrap(
    scores: Scores,
    statistic: str,
    rng: np.random.Generator,
    *,
    repetitions: int = REPETITIONS,
    confidence: float = 0.95,
) -> Estimate:
    """Return a statistic with its stratified percentile bootstrap interval.

    Runs are sampled with replacement within each task. Tasks with a single run add no spread, and make the interval too
    narrow where they are common. One task with the returns of many episodes gives the interval of a mean return.

    Args:
        scores: Of all tasks.
        statistic: A key of STATISTICS.
        rng: For the resamples.
        repetitions: Number of resamples.
        confidence: Share of the resamples within the interval.

    Source: Agarwal et al. (2021), section 4.1.
    """
    return _bootstrap(scores, [statistic], rng, repetitions, confidence)[statistic]


def bootstrap_improvement(
    ours: Scores,
    theirs: Scores,
    rng: np.random.Generator,
    *,
    repetitions: int = REPETITIONS,
    confidence: float = 0.95,
) -> Estimate:
    """Return the probability that a run of ours beats one of theirs: mean over tasks of P(X > Y) + P(X = Y) / 2.

    Per task this is the Mann-Whitney U statistic divided by the number of pairs. Both sides have the same tasks and are
    resampled within them.
    """
    x, y = _pair(ours, theirs)
    value = float(_probability_of_improvement(x, y))
    if not (_varies(x) or _varies(y)):
        return Estimate(value, None, None)
    samples = _resample([x, y], lambda sample: _probability_of_improvement(*sample), rng, repetitions)
    low, high = _interval(samples, confidence)
    return Estimate(value, float(low), float(high))


def bootstrap_share(
    hits: np.ndarray,
    counts: np.ndarray,
    rng: np.random.Generator,
    *,
    repetitions: int = REPETITIONS,
    confidence: float = 0.95,
) -> Estimate:
    """Return the share of all that was counted in E clusters, such as episodes, with its percentile bootstrap interval.

    Clusters are sampled with replacement, since what is counted within one is not independent.

    Args:
        hits: (E,).
        counts: (E,), of which `hits` are a part. Clusters without any do not count.
        rng: For the resamples.
        repetitions: Number of resamples.
        confidence: Share of the resamples within the interval.
    """
    hits, counts = hits[counts > 0], counts[counts > 0]
    value = float(hits.sum() / counts.sum())
    if len(counts) == 1:
        return Estimate(value, None, None)

    def share(sample: list[list[np.ndarray]]) -> np.ndarray:
        rows = sample[0][0]
        return hits[rows].sum(1) / counts[rows].sum(1)

    low, high = _interval(_resample([[np.arange(len(counts))]], share, rng, repetitions), confidence)
    return Estimate(value, float(low), float(high))


def aggregate(
    scores: Scores,
    rng: np.random.Generator | None,
    names: Sequence[str] | None = None,
    *,
    repetitions: int = REPETITIONS,
) -> dict[str, Estimate]:
    """Return the last lines of an Atari-100k table with their 95 % intervals.

    Args:
        scores: Of all tasks.
        rng: For the resamples; None computes no intervals.
        names: Keys of STATISTICS; None takes all.
        repetitions: Number of resamples.
    """
    return _bootstrap(scores, list(STATISTICS if names is None else names), rng, repetitions)


def _bootstrap(
    scores: Scores, names: list[str], rng: np.random.Generator | None, repetitions: int, confidence: float = 0.95
) -> dict[str, Estimate]:
    """Return statistics with their intervals, all of the same resamples."""
    tasks = by_task(scores)
    values = [float(STATISTICS[name](tasks)) for name in names]
    if rng is None or not _varies(tasks):
        return {name: Estimate(value, None, None) for name, value in zip(names, values, strict=True)}

    def compute(sample: list[list[np.ndarray]]) -> np.ndarray:
        return np.stack([STATISTICS[name](sample[0]) for name in names], axis=-1)  # (B, statistics)

    limits = _interval(_resample([tasks], compute, rng, repetitions), confidence)
    rows = zip(names, values, *(limit.tolist() for limit in limits), strict=True)
    return {name: Estimate(value, low, high) for name, value, low, high in rows}


# -- the statistics over (..., R) -------------------------------------------------------------------------------------


def _means(tasks: list[np.ndarray]) -> np.ndarray:
    return np.stack([task.mean(axis=-1) for task in tasks], axis=-1)  # (..., tasks)


def _mean(tasks: list[np.ndarray]) -> np.ndarray:
    return _means(tasks).mean(axis=-1)


def _median(tasks: list[np.ndarray]) -> np.ndarray:
    return np.median(_means(tasks), axis=-1)


def _iqm(tasks: list[np.ndarray]) -> np.ndarray:
    """Return the interquartile mean: the mean of the middle half of all runs of all tasks.

    It leaves out floor(N / 4) values at each end. A task with more runs has more weight.
    """
    pooled = np.sort(np.concatenate(tasks, axis=-1), axis=-1)  # (..., N)
    drop = pooled.shape[-1] // 4
    return pooled[..., drop : pooled.shape[-1] - drop].mean(axis=-1)


def _optimality_gap(tasks: list[np.ndarray]) -> np.ndarray:
    """Return 1 - mean over all runs of min(score, 1). Lower is better."""
    return 1.0 - np.minimum(np.concatenate(tasks, axis=-1), 1.0).mean(axis=-1)


def _superhuman(tasks: list[np.ndarray]) -> np.ndarray:
    """Return the number of tasks with a mean of at least 1, up to rounding."""
    return (_means(tasks) >= 1.0 - 1e-9).sum(axis=-1).astype(np.float64)


def _probability_of_improvement(ours: list[np.ndarray], theirs: list[np.ndarray]) -> np.ndarray:
    per_task = []
    for x, y in zip(ours, theirs, strict=True):
        x, y = x[..., :, None], y[..., None, :]  # (..., R ours, R theirs)
        per_task.append(((x > y) + 0.5 * (x == y)).mean(axis=(-2, -1)))
    return np.mean(per_task, axis=0)


STATISTICS: dict[str, Statistic] = {
    "mean": _mean,
    "median": _median,
    "iqm": _iqm,
    "optimality_gap": _optimality_gap,
    "superhuman": _superhuman,
}
OF_NORMALIZED = ("optimality_gap", "superhuman")
"""Statistics of human-normalized scores alone, where 1 has a meaning."""
OF_RUNS = ("iqm", "optimality_gap")
"""Statistics over single runs, which the means over the runs of each task do not give."""


# -- input and resampling ---------------------------------------------------------------------------------------------


def by_task(scores: Scores) -> list[np.ndarray]:
    """Return scores of any form as a list over tasks of float64 arrays (R,).

    Raises:
        UsageError: A task has no run, or a score is not finite.
    """
    if isinstance(scores, np.ndarray):
        if scores.ndim != 2:
            raise UsageError(f"scores have shape {scores.shape}; write them as (runs, tasks).")
        names, values = [str(task) for task in range(scores.shape[1])], list(scores.T)
    elif isinstance(scores, Mapping):
        names, values = list(scores), [scores[name] for name in scores]
    else:
        names, values = [str(task) for task in range(len(scores))], list(scores)
    if not values:
        raise UsageError("no scores to aggregate: evaluate at least one run on one task first.")
    tasks = [np.asarray(value, dtype=np.float64) for value in values]
    for name, task in zip(names, tasks, strict=True):
        if task.ndim != 1 or task.size == 0 or not np.isfinite(task).all():
            raise UsageError(f"task {name}: needs one finite score for each of one or more runs, got {task.tolist()}.")
    return tasks


def _pair(ours: Scores, theirs: Scores) -> tuple[list[np.ndarray], list[np.ndarray]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if set(ours) != set(theirs):
            alone = ", ".join(sorted(set(ours) ^ set(theirs)))
            raise UsageError(f"the two sides hold different tasks; only one of them has: {alone}")
        theirs = {name: theirs[name] for name in ours}
    x, y = by_task(ours), by_task(theirs)
    if len(x) != len(y):
        raise UsageError(f"the two sides hold different tasks: {len(x)} and {len(y)} of them.")
    return x, y


def _varies(tasks: list[np.ndarray]) -> bool:
    return any(task.size > 1 for task in tasks)


def _resample(
    sides: list[list[np.ndarray]],
    compute: Callable[[list[list[np.ndarray]]], np.ndarray],
    rng: np.random.Generator,
    repetitions: int,
) -> np.ndarray:
    """Return `compute` of `repetitions` stratified resamples of the sides: (B, ...)."""
    # Numbers of one resample, or pairs of them with two sides.
    size = sum(math.prod(sizes) for sizes in zip(*([task.size for task in tasks] for tasks in sides), strict=True))
    step = max(1, _CHUNK // size)
    values = []
    for start in range(0, repetitions, step):
        count = min(step, repetitions - start)
        sample = [
            [task[rng.integers(task.size, size=(count, task.size))] for task in tasks] for tasks in sides
        ]  # (B, R)
        values.append(compute(sample))
    return np.concatenate(values)


def _interval(samples: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    assert 0 < confidence < 1, confidence
    tail = (1 - confidence) / 2
    low, high = np.quantile(samples, [tail, 1 - tail], axis=0)
    return low, high
