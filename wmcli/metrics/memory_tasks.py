"""What is measured of a model that had to remember (S4WM: Deng, Park and Ahn 2023, arXiv 2307.02064).

Errors of frames are squared errors summed over pixels and colors, of images in [0, 1], as in the paper's tables.
E episodes, T frames, tiles of P x P pixels. What was not counted (padding) is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from wmcli.metrics.statistics import bootstrap


class Doors(NamedTuple):
    """Shares of the doors in sight that were drawn as they are, and how many were in sight."""

    state: float
    """Locked or open, whatever the color."""
    whole: float
    """State and color."""
    number: int


def estimate(values: np.ndarray) -> dict[str, Any]:
    """Mean over episodes (E,) with its 95 % bootstrap interval, as plain values; NaN are left out."""
    values = values[~np.isnan(values)]
    return bootstrap({"episodes": values}, "mean", np.random.default_rng(0))._asdict()


def over_episodes(error: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Each episode's mean of (E, T) where bool `counts` (E, T): (E,), NaN where nothing counts."""
    total = counts.sum(1)
    return np.where(total > 0, (error * counts).sum(1) / np.maximum(total, 1), np.nan)


def curve(error: np.ndarray, counts: np.ndarray) -> dict[str, list[float | None]]:
    """Mean over episodes of each of T steps, and its 95 % interval (mean +- 1.96 standard errors); None where nothing
    counts."""
    total = counts.sum(0)
    safe = np.maximum(total, 1)
    mean = (error * counts).sum(0) / safe
    spread = np.sqrt((np.square(error - mean) * counts).sum(0) / np.maximum(total - 1, 1))
    half = 1.96 * spread / np.sqrt(safe)

    def known(values: np.ndarray) -> list[float | None]:
        return [float(value) if some else None for value, some in zip(values, total, strict=True)]

    return {"mean": known(mean), "low": known(mean - half), "high": known(mean + half)}


def nearest(pictures: np.ndarray, templates: np.ndarray) -> np.ndarray:
    """The template, 0..K-1, that each picture is nearest to in squared error: (..., P, P, 3) and (K, P, P, 3) of one
    scale to int64 (...)."""
    flat = pictures.reshape(*pictures.shape[:-3], 1, -1).astype(np.float32)
    return np.square(flat - templates.reshape(len(templates), -1).astype(np.float32)).sum(-1).argmin(-1)


def doors(found: np.ndarray, true: np.ndarray, colors: int) -> Doors:
    """Of N > 0 doors, numbered by color (locked) and `colors` higher (open): what was found in the place of each (N,)
    and what is there (N,)."""
    same_state = (found >= colors) == (true >= colors)
    return Doors(float(same_state.mean()), float((found == true).mean()), len(true))
