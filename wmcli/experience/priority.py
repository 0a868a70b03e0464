"""Prioritized replay of windows: what the world model predicts badly, and what is new, is trained on more often.

A share of every batch is sampled with probability proportional to exp(z / temperature), where z is the window's last
loss, standardized by the mean and the deviation of all windows that have one. A window that was never sampled has
z = 10, so new experience comes first. The rest of the batch is uniform.

Simulus takes the losses as they are. They are cross entropies near 1 there; other world models have losses of other
sizes, which also shrink in training.

Axes: N rows of the replay, W windows, B batch.

Source: Simulus (Cohen et al. 2025, arXiv 2502.11537), after Curious Replay (Kauvar et al. 2023, arXiv 2306.15934).
"""

from __future__ import annotations

import math

import numpy as np

from wmcli.experience.frequency import draw
from wmcli.experience.sampler import RowMemorySampler, Windows, WindowTable, in_rounds

NEW = 10.0
"""z of a window without a loss."""
SMALLEST = 1e-8
"""Smallest deviation that losses are divided by."""


class PrioritySampler(RowMemorySampler):
    """Samples batches of distinct windows, a share of them by their last losses.

    Args:
        table: The windows, padded on the right: padded on the left they would share first frames.
        share: Share of a batch that is sampled by priority, rounded up to whole windows.
        temperature: See above.
        rng: Random generator, owned by the sampler, which saves and restores its state.
    """

    KEPT = "losses"
    EMPTY = np.float32(np.inf)

    def __init__(self, table: WindowTable, *, share: float, temperature: float, rng: np.random.Generator) -> None:
        super().__init__(table, rng)
        self._share = share
        self._temperature = temperature
        self._last = np.zeros(0, np.int64)  # numbers of the windows of the last batch

    def batch(self, size: int) -> Windows:
        """Sample `size` windows, distinct if there are as many."""
        every, rest = in_rounds(self.windows, size)
        chosen = draw(self._scores(), math.ceil(self._share * rest), self._rng)
        others = np.delete(np.arange(self.windows), chosen)
        chosen = np.concatenate([chosen, self._rng.choice(others, rest - len(chosen), replace=False)])
        self._last = np.concatenate([every, chosen])
        return self._table.windows(self._last)

    def learn(self, losses: np.ndarray) -> None:
        """Store the losses (B,) of the last batch."""
        self._kept[self._rows[self._last]] = losses

    def _scores(self) -> np.ndarray:
        losses = self._kept[self._rows].astype(np.float64)
        is_new = np.isinf(losses)
        known = losses[~is_new]
        if len(known):
            losses = (losses - known.mean()) / max(known.std(), SMALLEST)
        return np.where(is_new, NEW, losses) / self._temperature
