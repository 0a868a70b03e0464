"""Observations of any kind as pictures: images as they are, vectors and categories as bars.

Axes: T time, H height, W width, C channels, N numbers. Equal inputs give equal pixels, so real and imagined
observations can be compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image as Picture

from wmcli.report.images import BACKGROUND, FAINT, LINE, MARKER
from wmcli.spaces import Categories, Image, ObservationSpace, PartSpace, first_part, parts_of

SIDE = 64  # height of a picture without images, and width of a panel of bars [pixels]
MOST_BARS = 32  # of a part; the numbers behind them are not drawn


def draw_observations(space: ObservationSpace, observation: Any) -> np.ndarray:
    """Draw observations, a tree of (T, ...), as pictures (T, H, W, 3) uint8, the parts side by side.

    Images of another height are scaled to that of the first one. A bar begins in the middle and shows a number x of a
    vector as tanh(symlog(x) / 2), or at the left and shows a category.
    """
    parts = parts_of(space)
    heights = [part.height for part in parts.values() if isinstance(part, Image)]
    height = heights[0] if heights else SIDE
    panels = [_draw(parts[name], np.asarray(values), height) for name, values in parts_of(observation).items()]
    if len(panels) == 1:
        return panels[0]
    gap = np.empty((len(first_part(observation)), height, 1, 3), np.uint8)
    gap[:] = LINE
    return np.concatenate([piece for panel in panels for piece in (panel, gap)][:-1], axis=2)


def _draw(space: PartSpace, values: np.ndarray, height: int) -> np.ndarray:
    if isinstance(space, Image):
        frames = _in_colors(values)
        if frames.shape[1] == height:
            return frames
        width = max(1, round(frames.shape[2] * height / frames.shape[1]))
        scaled = [Picture.fromarray(frame).resize((width, height), Picture.Resampling.NEAREST) for frame in frames]
        return np.stack([np.asarray(each) for each in scaled])
    if isinstance(space, Categories):
        return _bars(values / np.maximum(np.array(space.sizes) - 1, 1), height, start=0)
    values = values.astype(np.float64)
    return _bars(np.tanh(np.sign(values) * np.log1p(np.abs(values)) / 2), height, start=SIDE // 2)


def _in_colors(frames: np.ndarray) -> np.ndarray:
    """Return images (T, H, W, C) in three colors: the newest of stacked ones, the last channel of others in gray."""
    channels = frames.shape[-1]
    return frames[..., -3:] if channels % 3 == 0 else frames[..., -1:].repeat(3, -1)


def _bars(shares: np.ndarray, height: int, *, start: int) -> np.ndarray:
    """Draw shares (T, N) of the width from `start` to the right end as a row of pixels for each number."""
    shares = shares[:, :MOST_BARS]
    time, count = shares.shape
    panel = np.empty((time, height, SIDE, 3), np.uint8)
    panel[:] = BACKGROUND
    end = start + np.round(shares * (SIDE - 1 - start)).astype(int)
    low, high = np.minimum(start, end), np.maximum(start, end)
    column = np.arange(SIDE)
    drawn = (column >= low[..., None]) & (column <= high[..., None])  # (T, N, SIDE)
    edges = np.linspace(0, height, count + 1).round().astype(int)
    for number in range(count):
        rows = slice(edges[number], max(edges[number] + 1, edges[number + 1] - 1))
        panel[:, rows][drawn[:, None, number].repeat(len(range(*rows.indices(height))), 1)] = MARKER
    panel[:, :, start] = np.where(panel[:, :, start] == MARKER, MARKER, FAINT)
    return panel
