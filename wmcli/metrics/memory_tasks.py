"""Scores of the memory measures.

Errors of frames are squared errors, summed over pixels and colors, of images in [0, 1]. Padding is left out.
E episodes, T frames, tiles of P x P pixels.

Source: S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064), its tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from wmcli.metrics.statistics import bootstrap


class Doors(NamedTuple):
    """Accuracy of imagined doors."""

    state: float
    """Share of the doors with the right state, locked or open, of any color."""
    whole: float
    """Share of the doors with the right state and color."""
    number: int
    """Doors in sight."""


def estimate(values: np.ndarray) -> dict[str, Any]:
    """Return the mean over episodes (E,) with its 95 % bootstrap interval, without NaN."""
    values = values[~np.isnan(values)]
    return bootstrap({"episodes": values}, "mean", np.random.default_rng(0))._asdict()


def over_episodes(error: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return each episode's mean error (E,) over the frames that count, NaN if none does. Both arguments: (E, T)."""
    total = counts.sum(1)
    return np.where(total > 0, (error * counts).sum(1) / np.maximum(total, 1), np.nan)


def curve(error: np.ndarray, counts: np.ndarray) -> dict[str, list[float | None]]:
    """Return the mean over episodes at each step, and its 95 % interval: mean ± 1.96 standard errors.

    Args:
        error: (E, T).
        counts: (E, T) bool.

    Returns:
        `mean`, `low` and `high`, T values each; None at steps where nothing counts.
    """
    total = counts.sum(0)
    safe = np.maximum(total, 1)
    mean = (error * counts).sum(0) / safe
    spread = np.sqrt((np.square(error - mean) * counts).sum(0) / np.maximum(total - 1, 1))
    half = 1.96 * spread / np.sqrt(safe)

    def to_list(values: np.ndarray) -> list[float | None]:
        return [float(value) if some else None for value, some in zip(values, total, strict=True)]

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


def doors(imagined: np.ndarray, real: np.ndarray, colors: int) -> Doors:
    """Return the accuracy of N > 0 imagined doors.

    Args:
        imagined: (N,), the number of each: its color if it is locked, `colors` more if it is open.
        real: (N,), likewise.
        colors: Number of colors.
    """
    same_state = (imagined >= colors) == (real >= colors)
    return Doors(float(same_state.mean()), float((imagined == real).mean()), len(real))
