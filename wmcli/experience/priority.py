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
from collections.abc import Mapping
from typing import Any

import numpy as np

from wmcli.experience.frequency import draw
from wmcli.experience.replay import Episodes
from wmcli.experience.sampler import Windows, WindowTable, in_rounds

NEW = 10.0
"""z of a window without a loss."""
SMALLEST = 1e-8
"""Smallest deviation that losses are divided by."""


class PrioritySampler:
    """Samples batches of distinct windows, a share of them by their last losses.

    The loss of a window is kept with the row of its first frame.

    Args:
        runs, order, length, minimum, history: See `WindowSampler`. Windows are padded on the right.
        share: Share of a batch that is sampled by priority, rounded up to whole windows.
        temperature: See above.
        rng: Random generator, owned by the sampler, which saves and restores its state.

    Raises:
        UsageError: There is no window.
    """

    def __init__(
        self,
        runs: Episodes,
        order: np.ndarray,
        *,
        length: int,
        minimum: int,
        history: int = 0,
        share: float,
        temperature: float,
        rng: np.random.Generator,
    ) -> None:
        # Windows that are padded on the left would share first frames.
        self._table = WindowTable(runs, order, length=length, minimum=minimum, pad="right", history=history)
        self._rows = self._table.first_rows(np.arange(len(self._table)))  # (W,): row that holds each window's loss
        self._losses = np.full(len(order), np.inf, np.float32)  # (N,): infinite where there is none
        self._share = share
        self._temperature = temperature
        self._rng = rng
        self._last = np.zeros(0, np.int64)  # numbers of the windows of the last batch

    @property
    def windows(self) -> int:
        """Number of different windows W."""
        return len(self._table)

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
        self._losses[self._rows[self._last]] = losses

    def state(self) -> dict[str, Any]:
        """Return the state: plain JSON values, and `losses`, a copy, float32 (N,)."""
        return {"rng": dict(self._rng.bit_generator.state), "windows": self.windows, "losses": self._losses.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a sampler over the same experience."""
        same = state["windows"] == self.windows and len(state["losses"]) == len(self._losses)
        assert same, "the state is of a sampler over other experience"
        self._rng.bit_generator.state = state["rng"]
        self._losses = state["losses"].astype(np.float32)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Copy the losses of an earlier training, if it had any. Newer rows have none."""
        if "losses" in state:
            rows = min(len(state["losses"]), len(self._losses))
            self._losses[:rows] = state["losses"][:rows]

    def _scores(self) -> np.ndarray:
        losses = self._losses[self._rows].astype(np.float64)
        is_new = np.isinf(losses)
        known = losses[~is_new]
        if len(known):
            losses = (losses - known.mean()) / max(known.std(), SMALLEST)
        return np.where(is_new, NEW, losses) / self._temperature
