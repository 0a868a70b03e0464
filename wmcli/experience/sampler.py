"""Sampling of training windows: index arithmetic in numpy.

Axes: B batch, L time (frames of a window), E runs (episodes or whole streams, see `Replay.runs`), W windows.

A window has `length` frames of one run. It is padded at the end of a run: right padding keeps its start, left padding
its end, and at least `minimum` frames are real. So a run of n frames has max(0, n - minimum + 1) windows. Windows
across the ends of episodes are windows of streams, with `minimum` equal to `length`. The first `history` frames of a
window precede its position in the run, as far as the run has them; they count towards `length` and not towards
`minimum`. With `whole` a run has a single window, from its first frame on, padded right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from wmcli.errors import UsageError
from wmcli.experience.replay import Episodes


class Windows(NamedTuple):
    """A batch of windows, as rows of the replay."""

    rows: np.ndarray  # int64 (B, L): where padded, the nearest real row of the window
    valid: np.ndarray  # bool (B, L): False where padded


class WindowTable:
    """All windows of some runs, numbered 0..W-1: run after run, each in order of time.

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
        whole: bool = False,
    ) -> None:
        assert 1 <= minimum <= length - history
        usable = runs.length >= minimum
        if not usable.any():
            longest = int(runs.length.max(initial=0))
            raise UsageError(
                f"the experience has no {minimum} consecutive frames (the longest sequence has {longest});"
                " collect more with: wm collect"
            )
        self.replay_rows = len(order)  # N
        self._order = order
        self._start = runs.start[usable]
        self._frames = runs.length[usable]
        self._length = length
        # First frame of a window, relative to its position in the run.
        self._shift = -history if pad == "right" else minimum - length
        # int64 (E,): number of windows of each run with at least one
        self.counts = np.ones_like(self._frames) if whole else self._frames - minimum + 1
        self.before = np.cumsum(self.counts) - self.counts  # int64 (E,): number of the first window of each

    def __len__(self) -> int:
        """Return the number of windows W."""
        return int(self.counts.sum())

    def windows(self, numbers: np.ndarray) -> Windows:
        """Return the windows with these numbers (B,)."""
        run, begin = self._locate(numbers)
        frame = begin[:, None] + np.arange(self._length)  # (B, L)
        last = self._frames[run][:, None] - 1
        rows = self._order[self._start[run][:, None] + np.clip(frame, 0, last)]
        return Windows(rows, (frame >= 0) & (frame <= last))

    def first_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the row of the first real frame of each window (B,), int64 (B,)."""
        run, begin = self._locate(numbers)
        return self._order[self._start[run] + np.maximum(begin, 0)]

    def last_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the row of the last real frame of each window (B,), int64 (B,)."""
        run, begin = self._locate(numbers)
        return self._order[self._start[run] + np.minimum(begin + self._length, self._frames[run]) - 1]

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the run of each window (B,), and its first frame in the run (B,), below 0 if padded."""
        run = np.searchsorted(self.before, numbers, side="right") - 1
        return run, numbers - self.before[run] + self._shift


def in_rounds(windows: int, size: int) -> tuple[np.ndarray, int]:
    """Divide a batch that may be larger than the number of windows into full rounds and a rest.

    Returns the numbers of the windows in full rounds, and how many more to sample.
    """
    rounds, rest = divmod(size, windows)
    return np.tile(np.arange(windows), rounds), rest


class WindowSampler:
    """Samples batches of windows.

    Args:
        runs: Positions of episodes or streams.
        order: Position -> row, int64 (N,).
        length, minimum, pad, history, whole: See the top of this file.
        sampling: "windows" (REM, Cohen et al. 2024) is uniform without replacement; a batch at the end of a round takes
            the rest from the next one. "episodes" (IRIS, Micheli et al. 2023) samples an episode and then a window of
            it uniformly, so windows of short episodes are more likely. "uniform" (Drama's ablation, Wang et al. 2024)
            is uniform and distinct within each batch.
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
        whole: bool = False,
        sampling: Literal["windows", "episodes", "uniform"],
        rng: np.random.Generator,
    ) -> None:
        assert sampling in ("windows", "episodes", "uniform"), f"unknown sampling {sampling}"
        self._table = WindowTable(runs, order, length=length, minimum=minimum, pad=pad, history=history, whole=whole)
        self._sampling = sampling
        self._rng = rng
        self._round_start: Mapping[str, Any] = {}  # state of `rng` before the shuffle of this round
        self._round = np.zeros(0, np.int64)
        self._drawn = 0  # number of windows taken from this round
        if sampling == "windows":
            self._shuffle()

    @property
    def windows(self) -> int:
        """Number of different windows W."""
        return len(self._table)

    def batch(self, size: int) -> Windows:
        """Sample `size` windows."""
        if self._sampling == "windows":
            numbers = self._next(size)
        elif self._sampling == "episodes":
            episode = self._rng.integers(len(self._table.counts), size=size)
            numbers = self._table.before[episode] + self._rng.integers(self._table.counts[episode])
        else:
            every, rest = in_rounds(self.windows, size)
            numbers = np.concatenate([every, self._rng.choice(self.windows, rest, replace=False)])
        return self._table.windows(numbers)

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        rng = self._round_start if self._sampling == "windows" else self._rng.bit_generator.state
        return {"rng": dict(rng), "drawn": self._drawn, "windows": self.windows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a sampler over the same experience."""
        assert state["windows"] == self.windows, "the state is of a sampler over other experience"
        self._rng.bit_generator.state = state["rng"]
        if self._sampling == "windows":
            self._shuffle()
        self._drawn = state["drawn"]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Start anew: this sampler takes nothing from an earlier training."""

    def _shuffle(self) -> None:
        self._round_start = self._rng.bit_generator.state
        self._round = self._rng.permutation(self.windows)
        self._drawn = 0

    def _next(self, size: int) -> np.ndarray:
        parts = []
        while size > 0:
            if self._drawn == len(self._round):
                self._shuffle()
            part = self._round[self._drawn : self._drawn + size]
            self._drawn += len(part)
            size -= len(part)
            parts.append(part)
        return np.concatenate(parts)


class RowMemorySampler:
    """What samplers have in common that keep a number for every window, with the row of its first real frame.

    Args:
        table: The windows.
        rng: Random generator, owned by the sampler, which saves and restores its state.
    """

    KEPT: ClassVar[str]
    """Name of the numbers in the state."""
    EMPTY: ClassVar[np.generic]
    """The number of a row that was never sampled; its dtype is theirs."""

    def __init__(self, table: WindowTable, rng: np.random.Generator) -> None:
        self._table = table
        self._rows = table.first_rows(np.arange(len(table)))  # (W,): row that keeps each window's number
        self._kept = np.full(table.replay_rows, self.EMPTY)  # (N,)
        self._rng = rng

    @property
    def windows(self) -> int:
        """Number of different windows W."""
        return len(self._table)

    def state(self) -> dict[str, Any]:
        """Return the state: plain JSON values, and a copy of the numbers (N,)."""
        return {"rng": dict(self._rng.bit_generator.state), "windows": self.windows, self.KEPT: self._kept.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a sampler over the same experience."""
        same = state["windows"] == self.windows and len(state[self.KEPT]) == len(self._kept)
        assert same, "the state is of a sampler over other experience"
        self._rng.bit_generator.state = state["rng"]
        self._kept = state[self.KEPT].astype(self.EMPTY.dtype)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Copy the numbers of an earlier training, if it had any. Newer rows are as never sampled."""
        if self.KEPT in state:
            self._kept = for_rows(state[self.KEPT], len(self._kept), self.EMPTY)


def for_rows(kept: np.ndarray, rows: int, empty: np.generic) -> np.ndarray:
    """Return numbers of earlier rows for `rows` (N,): a growing replay does not renumber its rows."""
    old = kept[:rows].astype(empty.dtype)
    return np.concatenate([old, np.full(rows - len(old), empty)])


class StreamSampler:
    """Reads episodes in order, for truncated backpropagation: each batch has the next `length` frames of B streams.

    A stream reads an episode from its first frame to its last, then the next one. All episodes are read once, by any
    stream, before one is read again. The first episode of each stream starts at a random frame, so that streams are not
    synchronized.

    Args:
        runs: Positions of the episodes.
        order: Position -> row, int64 (N,).
        length: Frames of each stream in a batch.
        rng: Random generator, owned by the sampler, which saves and restores its state.

    Raises:
        UsageError: There is no episode.

    Source: pydreamer's runs on Memory Maze.
    """

    def __init__(self, runs: Episodes, order: np.ndarray, *, length: int, rng: np.random.Generator) -> None:
        if not len(runs.length):
            raise UsageError("the experience has no episode; collect some with: wm collect")
        self._runs = runs
        self._order = order
        self._length = length
        self._rng = rng
        self._queue = np.zeros(0, np.int64)  # episodes left in this round
        self._episode = np.zeros(0, np.int64)  # (B,): episode of each stream
        self._frame = np.zeros(0, np.int64)  # (B,): its next frame there

    def batch(self, size: int) -> Windows:
        """Return the next frames of `size` streams, the same number in every call: rows int64 (B, L), all valid."""
        if not len(self._episode):
            self._episode = np.array([self._next() for _ in range(size)])
            self._frame = self._rng.integers(self._runs.length[self._episode])
        assert len(self._episode) == size, f"the first batch had {len(self._episode)} streams, not {size}"
        rows = np.stack([self._walk(stream) for stream in range(size)])
        return Windows(rows, np.ones(rows.shape, bool))

    def state(self) -> dict[str, Any]:
        """Return the position of each stream, the remaining episodes and the state of the generator."""
        return {
            "rng": dict(self._rng.bit_generator.state),
            "queue": self._queue,
            "episode": self._episode,
            "frame": self._frame,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a sampler over the same experience."""
        self._rng.bit_generator.state = state["rng"]
        self._queue, self._episode, self._frame = (
            state[name].astype(np.int64) for name in ("queue", "episode", "frame")
        )

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Start anew: this sampler takes nothing from an earlier training."""

    def _next(self) -> int:
        if not len(self._queue):
            self._queue = self._rng.permutation(len(self._runs.length))
        episode, self._queue = int(self._queue[0]), self._queue[1:]
        return episode

    def _walk(self, stream: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        missing = self._length
        while missing:
            episode, frame = self._episode[stream], self._frame[stream]
            count = min(missing, int(self._runs.length[episode] - frame))
            start = self._runs.start[episode] + frame
            parts.append(self._order[start : start + count])
            missing -= count
            self._frame[stream] += count
            if self._frame[stream] == self._runs.length[episode]:
                self._episode[stream], self._frame[stream] = self._next(), 0
        return np.concatenate(parts)
