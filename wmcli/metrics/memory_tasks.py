"""Scores of the memory measures.

Errors of frames are squared errors, summed over pixels and colors, of images in [0, 1]. Padding is left out.
E episodes, T frames, tiles of P x P pixels.

Source: S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064), its tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from wmcli.metrics.statistics import bootstrap, bootstrap_share


class Doors(NamedTuple):
    """Accuracy of imagined doors."""

    state: dict[str, Any]
    """Share of the doors with the right state, locked or open, of any color, as `estimate` returns it."""
    whole: dict[str, Any]
    """Share of the doors with the right state and color."""
    number: int
    """Doors in sight."""


def estimate(values: np.ndarray) -> dict[str, Any]:
    """Return the mean over episodes (E,) with its 95 % bootstrap interval.

    Args:
        values: NaN for an episode that does not count, infinity for one that diverged.

    Returns:
        `value`, `low` and `high`. Where episodes diverged there is no mean: these are None, and `diverged` is their
            number.
    """
    values = values[~np.isnan(values)]
    if diverged := int(np.isinf(values).sum()):
        return {"value": None, "low": None, "high": None, "diverged": diverged}
    return bootstrap({"episodes": values}, "mean", np.random.default_rng(0))._asdict()


def diverged_in(*estimates: Mapping[str, Any]) -> str:
    """Return "diverged in 3", the number of episodes over all estimates; empty if none diverged."""
    diverged = sum(each.get("diverged", 0) for each in estimates)
    return f"diverged in {diverged}" if diverged else ""


def over_episodes(error: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return each episode's mean error (E,) over the frames that count. Both arguments: (E, T).

    It is NaN if none does, and infinite if an error there is not finite.
    """
    total = counts.sum(1)
    mean = finite_or_infinite(np.where(counts, error, 0)).sum(1) / np.maximum(total, 1)
    return np.where(total > 0, mean, np.nan)


def finite_or_infinite(error: np.ndarray) -> np.ndarray:
    """Replace NaN, the error of a model that diverged, by infinity."""
    return np.where(np.isnan(error), np.inf, error)


def curve(error: np.ndarray, counts: np.ndarray) -> dict[str, list[float | None]]:
    """Return the mean over episodes at each step, and its 95 % interval: mean ± 1.96 standard errors.

    Args:
        error: (E, T).
        counts: (E, T) bool.

    Returns:
        `mean`, `low` and `high`, T values each; None at steps where nothing counts, or an error is not finite.
    """
    total = counts.sum(0)
    safe = np.maximum(total, 1)
    mean = np.where(counts, error, 0).sum(0) / safe
    known = (total > 0) & np.isfinite(mean)
    off = np.where(counts & known, error, 0) - np.where(counts & known, mean, 0)
    spread = np.sqrt(np.square(off).sum(0) / np.maximum(total - 1, 1))
    half = 1.96 * spread / np.sqrt(safe)

    def to_list(values: np.ndarray) -> list[float | None]:
        return [float(value) if some else None for value, some in zip(values, known, strict=True)]

    return {"mean": to_list(mean), "low": to_list(mean - half), "high": to_list(mean + half)}


def nearest(pictures: np.ndarray, templates: np.ndarray) -> np.ndarray:
    """Return the index of the template nearest to each picture in squared error.

    Args:
        pictures: (..., P, P, 3).
        templates: (K, P, P, 3), of the same scale.

    Returns:
        int64 (...), 0 to K - 1.
    """
    flat = pictures.reshape(*pictures.shape[:-3], 1, -1).astype(np.float32)
    return np.square(flat - templates.reshape(len(templates), -1).astype(np.float32)).sum(-1).argmin(-1)


def doors(imagined: np.ndarray, real: np.ndarray, episode: np.ndarray, colors: int) -> Doors:
    """Return the accuracy of N > 0 imagined doors, with 95 % bootstrap intervals over episodes.

    Args:
        imagined: (N,), the number of each: its color if it is locked, `colors` more if it is open.
        real: (N,), likewise.
        episode: (N,), the number of the episode of each.
        colors: Number of colors.
    """
    counts = np.bincount(episode)

    def share(right: np.ndarray) -> dict[str, Any]:
        hits = np.bincount(episode, weights=right)
        return bootstrap_share(hits, counts, np.random.default_rng(0))._asdict()

    return Doors(share((imagined >= colors) == (real >= colors)), share(imagined == real), len(real))
