"""Dynamic frequency-based sampling: rarely sampled windows are more likely.

Each row of the replay has two counters of the sampled windows that start there: v for training the dynamics model, b
for imagination. Training prefers rows with small v. Imagination prefers rows with large v and small b. The temperatures
and the scaling of b are those of the public code; the paper has neither. Without the scaling b would outweigh v,
because its batches are far larger.

Axes: N rows of the replay, W windows, B batch. Scores are logits of a softmax over all windows, float64.

Source: Drama (Wang et al. 2024, arXiv 2410.08893).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from wmcli.experience.replay import Episodes
from wmcli.experience.sampler import RowMemorySampler, Windows, WindowTable, for_rows, in_rounds


class FrequencyParameters(Protocol):
    """Settings of the sampler; see the section `training.dfs`."""

    @property
    def temperature(self) -> float: ...
    @property
    def imagination_temperature(self) -> float: ...
    @property
    def alpha(self) -> float: ...
    @property
    def beta(self) -> float: ...


def dynamics_scores(trained: np.ndarray, temperature: float) -> np.ndarray:
    """Return -v / temperature for counters v (W,)."""
    return -trained.astype(np.float64) / temperature


def imagination_scores(
    trained: np.ndarray, imagined: np.ndarray, ratio: float, alpha: float, beta: float, temperature: float
) -> np.ndarray:
    """Return [v - alpha b' - beta max(0, v - b')] / temperature for counters v, b (W,), where b' = ratio b.

    With alpha = beta = 1 the score is min(0, v - b') / temperature.

    Args:
        trained: v.
        imagined: b.
        ratio: Batch size of the dynamics model over that of imagination, so that v and b' grow equally fast.
        alpha: Weight of b'.
        beta: Weight of the second term.
        temperature: Divides the score.
    """
    v, b = trained.astype(np.float64), ratio * imagined.astype(np.float64)
    return (v - alpha * b - beta * np.maximum(0.0, v - b)) / temperature


def draw(scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Sample `count` indices int64 without replacement from softmax(scores).

    If there are fewer candidates, each occurs once per full round and only the rest is sampled.

    Source: the Gumbel top-k trick (Kool et al. 2019, arXiv 1903.06059), which is exact and needs no exponentials. The
    negative logarithm of an exponential variate is a Gumbel variate, and drawn faster.
    """
    every, rest = in_rounds(len(scores), count)
    keys = rng.standard_exponential(len(scores))
    np.log(keys, out=keys)
    keys -= scores
    chosen = np.argpartition(keys, rest)[:rest]
    return np.concatenate([every, chosen[np.argsort(keys[chosen])]])  # sorted: partitions differ between processors


class FrequencySampler(RowMemorySampler):
    """Samples batches of distinct windows by the counters of their first real frames.

    Each sampled window adds 1 to the counter of the row of its first real frame.

    Args:
        runs, order, length, minimum, pad, history: See `WindowSampler`.
        kind: "dynamics" counts v and scores by `dynamics_scores`, "imagination" counts b and scores by
            `imagination_scores`.
        settings: Temperatures, alpha and beta.
        ratio: Batch size of the dynamics model over that of imagination.
        trained: Counters v of the dynamics model, for imagination. They stay constant; newer rows count 0.
        rng: Random generator, owned by the sampler, which saves and restores its state.

    Raises:
        UsageError: There is no window.
    """

    KEPT = "counts"
    EMPTY = np.int64(0)

    def __init__(
        self,
        runs: Episodes,
        order: np.ndarray,
        *,
        length: int,
        minimum: int,
        pad: Literal["left", "right"],
        history: int = 0,
        kind: Literal["dynamics", "imagination"],
        settings: FrequencyParameters,
        ratio: float,
        trained: np.ndarray | None = None,
        rng: np.random.Generator,
    ) -> None:
        assert kind in ("dynamics", "imagination")
        assert (trained is not None) == (kind == "imagination"), "imagination needs the counters of training"
        table = WindowTable(runs, order, length=length, minimum=minimum, pad=pad, history=history)
        super().__init__(table, rng)
        self._trained = None if trained is None else for_rows(trained, len(order), self.EMPTY)
        self._settings = settings
        self._ratio = ratio
        self._scores: np.ndarray | None = None  # (N,) of the rows; None until they are needed

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a sampler over the same experience."""
        super().load(state)
        self._scores = None

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Copy the numbers of an earlier training, if it had any. Newer rows are as never sampled."""
        super().continue_from(state)
        self._scores = None

    def batch(self, size: int) -> Windows:
        """Sample `size` windows and count them."""
        if self._scores is None:
            self._scores = self._score(np.arange(len(self._kept)))
        numbers = draw(self._scores[self._rows], size, self._rng)
        rows = self._rows[numbers]
        np.add.at(self._kept, rows, 1)  # windows that are padded on the left share rows
        self._scores[rows] = self._score(rows)  # the others stay as they are
        return self._table.windows(numbers)

    def _score(self, rows: np.ndarray) -> np.ndarray:
        settings, counts = self._settings, self._kept[rows]
        if self._trained is None:
            return dynamics_scores(counts, settings.temperature)
        return imagination_scores(
            self._trained[rows],
            counts,
            self._ratio,
            settings.alpha,
            settings.beta,
            settings.imagination_temperature,
        )
