"""Dynamic frequency-based sampling: windows that were drawn less often are likelier to be drawn (Drama: Wang et al.
2024, "Drama: Mamba-Enabled Model-Based Reinforcement Learning Is Sample and Parameter Efficient").

Per row of the memory two counters are kept of the windows drawn that start there: v for training the dynamics model, b
for imagination. Training prefers rows it has seldom started from; imagination prefers rows the dynamics model has
trained on, and that imagination itself has not used up. Temperatures and the scaling of b are those of the public code;
the paper has neither, and without the scaling b, which grows by far larger batches, would outweigh v.

N rows of the memory, W windows, B batch. Scores are logits of a softmax over all windows, float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from wmcli.experience.replay import Episodes
from wmcli.experience.sampler import Windows, WindowTable, in_rounds


class Settings(Protocol):
    """What the sampler is told: the section `training.dfs` says what each is."""

    @property
    def temperature(self) -> float: ...
    @property
    def imagination_temperature(self) -> float: ...
    @property
    def alpha(self) -> float: ...
    @property
    def beta(self) -> float: ...


def dynamics_scores(trained: np.ndarray, temperature: float) -> np.ndarray:
    """-v / temperature for counters v (W,)."""
    return -trained.astype(np.float64) / temperature


def imagination_scores(
    trained: np.ndarray, imagined: np.ndarray, ratio: float, alpha: float, beta: float, temperature: float
) -> np.ndarray:
    """[v - alpha b' - beta max(0, v - b')] / temperature for counters v, b (W,), where b' = ratio b.

    `ratio` is the batch of the dynamics model over that of imagination, so that v and b' grow equally fast. With alpha
    and beta 1 the score is min(0, v - b') / temperature.
    """
    v, b = trained.astype(np.float64), ratio * imagined.astype(np.float64)
    return (v - alpha * b - beta * np.maximum(0.0, v - b)) / temperature


def draw(scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` distinct indices, int64, drawn one after the other without replacement from softmax(scores).

    Exact, and without exponentials, by the Gumbel top-k trick (Kool et al. 2019, arXiv 1903.06059): the largest sums of
    a score and Gumbel noise. Should `count` exceed the number of candidates, each candidate comes once per full round
    and only the rest is drawn, so that there are always `count`.
    """
    every, rest = in_rounds(len(scores), count)
    keys = -(scores + rng.gumbel(size=len(scores)))
    chosen = np.argpartition(keys, rest)[:rest]
    return np.concatenate([every, chosen[np.argsort(keys[chosen])]])  # sorted: partitions differ between processors


class FrequencySampler:
    """Draws batches of windows by how often windows with the same first real frame were drawn.

    `kind` "dynamics" counts v and scores by `dynamics_scores`. "imagination" counts b and scores by
    `imagination_scores`, against the `trained` counters v (N,) of the dynamics model, which do not change; rows it did
    not know count 0. `ratio` is the dynamics model's batch over imagination's. Each window drawn adds 1 to the counter
    of the row of its first real frame. Windows of a batch are distinct, see `draw`.

    Runs, order, `length`, `minimum`, `pad` and `history` are as for `WindowSampler`. `rng` belongs to the sampler from
    here on: its state is saved and restored with it. Raises UsageError when there is no window at all.
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
        settings: Settings,
        ratio: float,
        trained: np.ndarray | None = None,
        rng: np.random.Generator,
    ) -> None:
        assert kind in ("dynamics", "imagination")
        assert (trained is not None) == (kind == "imagination"), "imagination is drawn against what was trained"
        self._table = WindowTable(runs, order, length=length, minimum=minimum, pad=pad, history=history)
        self._rows = self._table.first_rows(np.arange(len(self._table)))  # (W,): where each window is counted
        self._counts = np.zeros(len(order), np.int64)  # (N,)
        self._trained = None if trained is None else _for_rows(trained, len(order))
        self._settings = settings
        self._ratio = ratio
        self._rng = rng

    @property
    def windows(self) -> int:
        """How many different windows there are (W)."""
        return len(self._table)

    def batch(self, size: int) -> Windows:
        """The next `size` windows; they are counted."""
        numbers = draw(self._scores(), size, self._rng)
        np.add.at(self._counts, self._rows[numbers], 1)  # several windows may begin at one row, if padded on the left
        return self._table.windows(numbers)

    def state(self) -> dict[str, Any]:
        """All that the next batches depend on besides the experience and `trained`: plain JSON values and `counts`, a
        copy of the counters, int64 (N,)."""
        return {"rng": dict(self._rng.bit_generator.state), "windows": self.windows, "counts": self._counts.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where the sampler that gave `state` stood; it must have been made from the same experience."""
        same = state["windows"] == self.windows and len(state["counts"]) == len(self._counts)
        assert same, "the state is of a sampler over other experience"
        self._rng.bit_generator.state = state["rng"]
        self._counts = state["counts"].astype(np.int64)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of a finished training. Rows that came since count 0, and so do all if the sampler
        that gave `state` did not count."""
        if "counts" in state:
            self._counts = _for_rows(state["counts"], len(self._counts))

    def _scores(self) -> np.ndarray:
        of, own = self._settings, self._counts[self._rows]
        if self._trained is None:
            return dynamics_scores(own, of.temperature)
        trained = self._trained[self._rows]
        return imagination_scores(trained, own, self._ratio, of.alpha, of.beta, of.imagination_temperature)


def _for_rows(counts: np.ndarray, rows: int) -> np.ndarray:
    """Counters of the first rows of a memory, as int64 (rows,). Rows keep their numbers when a memory grows, so each
    keeps its count; those that `counts` does not know have 0."""
    known = counts[:rows].astype(np.int64)
    return np.concatenate([known, np.zeros(rows - len(known), np.int64)])
