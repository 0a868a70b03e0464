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
from wmcli.experience.sampler import Windows, WindowTable, in_rounds


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

    Source: the Gumbel top-k trick (Kool et al. 2019, arXiv 1903.06059), which is exact and needs no exponentials.
    """
    every, rest = in_rounds(len(scores), count)
    keys = -(scores + rng.gumbel(size=len(scores)))
    chosen = np.argpartition(keys, rest)[:rest]
    return np.concatenate([every, chosen[np.argsort(keys[chosen])]])  # sorted: partitions differ between processors


class FrequencySampler:
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
        self._table = WindowTable(runs, order, length=length, minimum=minimum, pad=pad, history=history)
        self._rows = self._table.first_rows(np.arange(len(self._table)))  # (W,): row that counts each window
        self._counts = np.zeros(len(order), np.int64)  # (N,)
        self._trained = None if trained is None else _for_rows(trained, len(order))
        self._settings = settings
        self._ratio = ratio
        self._rng = rng

    @property
    def windows(self) -> int:
        """Number of different windows W."""
        return len(self._table)

    def batch(self, size: int) -> Windows:
        """Sample `size` windows and count them."""
        numbers = draw(self._scores(), size, self._rng)
        np.add.at(self._counts, self._rows[numbers], 1)  # windows that are padded on the left share rows
        return self._table.windows(numbers)

    def state(self) -> dict[str, Any]:
        """Return the state: plain JSON values, and `counts`, a copy of the counters int64 (N,)."""
        return {"rng": dict(self._rng.bit_generator.state), "windows": self.windows, "counts": self._counts.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a sampler over the same experience."""
        same = state["windows"] == self.windows and len(state["counts"]) == len(self._counts)
        assert same, "the state is of a sampler over other experience"
        self._rng.bit_generator.state = state["rng"]
        self._counts = state["counts"].astype(np.int64)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Copy the counters of an earlier training, if it had any. Newer rows count 0."""
        if "counts" in state:
            self._counts = _for_rows(state["counts"], len(self._counts))

    def _scores(self) -> np.ndarray:
        settings, counts = self._settings, self._counts[self._rows]
        if self._trained is None:
            return dynamics_scores(counts, settings.temperature)
        return imagination_scores(
            self._trained[self._rows],
            counts,
            self._ratio,
            settings.alpha,
            settings.beta,
            settings.imagination_temperature,
        )


def _for_rows(counts: np.ndarray, rows: int) -> np.ndarray:
    """Return counters int64 (rows,). A growing replay does not renumber its rows; new rows count 0."""
    old = counts[:rows].astype(np.int64)
    return np.concatenate([old, np.zeros(rows - len(old), np.int64)])
