"""Which windows of experience a batch is made of: index arithmetic alone, in numpy.

B batch, L time (frames of a window), E runs (episodes or whole streams, see `Memory.runs`), W windows.

Every window lies inside one run and has `length` frames. At the end of a run that falls short it is padded: right
padding keeps the window's start, left padding its end, and at least `minimum` frames are real. So a run of n frames has
max(0, n - minimum + 1) windows, and those shorter than `minimum` have none. Windows that run over the ends of episodes
are those of streams, with `minimum` equal to `length`. The first `history` frames of a window stand before its place in
the run, as far as the run reaches back; they count towards `length` and not towards `minimum`. With `whole` a run has
one window alone, from its first frame on, padded right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from wmcli.errors import UsageError
from wmcli.experience.replay import Episodes


class Windows(NamedTuple):
    """A batch of windows, as rows of the memory."""

    rows: np.ndarray  # int64 (B, L): where padded, the nearest real row of the window
    valid: np.ndarray  # bool (B, L): False where padded


class WindowTable:
    """All windows of some runs, numbered 0..W-1: run after run, and within a run in the order of time.

    Raises UsageError when there is no window at all.
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
                f"no stretch of the experience has {minimum} frames in a row (the longest has {longest}); "
                f"collect more with: wm collect"
            )
        self._order = order
        self._start = runs.start[usable]
        self._frames = runs.length[usable]
        self._length = length
        # From a window's place in its run to where it begins.
        self._shift = -history if pad == "right" else minimum - length
        # int64 (E,): windows of each run that has any
        self.counts = np.ones_like(self._frames) if whole else self._frames - minimum + 1
        self.before = np.cumsum(self.counts) - self.counts  # int64 (E,): number of the first window of each

    def __len__(self) -> int:
        """W."""
        return int(self.counts.sum())

    def windows(self, numbers: np.ndarray) -> Windows:
        """The windows with these numbers (B,)."""
        run, begin = self._locate(numbers)
        frame = begin[:, None] + np.arange(self._length)  # (B, L)
        last = self._frames[run][:, None] - 1
        rows = self._order[self._start[run][:, None] + np.clip(frame, 0, last)]
        return Windows(rows, (frame >= 0) & (frame <= last))

    def first_rows(self, numbers: np.ndarray) -> np.ndarray:
        """int64 (B,): the row of the first real frame of each of these windows (B,)."""
        run, begin = self._locate(numbers)
        return self._order[self._start[run] + np.maximum(begin, 0)]

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The run of each window (B,), and the frame of it at which the window begins (B,): below 0 where padded."""
        run = np.searchsorted(self.before, numbers, side="right") - 1
        return run, numbers - self.before[run] + self._shift


def in_rounds(windows: int, size: int) -> tuple[np.ndarray, int]:
    """What a batch of distinct windows is made of when it may be larger than there are windows: the numbers of those
    in it for sure, each window once per full round, and how many more are to be drawn."""
    rounds, rest = divmod(size, windows)
    return np.tile(np.arange(windows), rounds), rest


class WindowSampler:
    """Draws batches of windows.

    `sampling` "windows" (REM, Cohen et al. 2024): uniform over all windows, without replacement until each was drawn
    once, then anew; a batch that reaches over the end is filled from the next round, so every batch has the size asked
    for. "episodes" (IRIS, Micheli et al. 2023): an episode uniformly, then a window of it uniformly, which favors the
    windows of short episodes. "uniform" (Drama's ablation, Wang et al. 2024): each batch uniform over all windows and
    distinct in itself, whatever was drawn before; one larger than there are windows has each once per full round.

    `rng` belongs to the sampler from here on: its state is saved and restored with it. Raises UsageError when there is
    no window at all.
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
        assert sampling in ("windows", "episodes", "uniform"), f"{sampling} is not for this sampler"
        self._table = WindowTable(runs, order, length=length, minimum=minimum, pad=pad, history=history, whole=whole)
        self._sampling = sampling
        self._rng = rng
        self._round_start: Mapping[str, Any] = {}  # state of `rng` before the running round was shuffled
        self._round = np.zeros(0, np.int64)
        self._drawn = 0  # windows of this round that were given out
        if sampling == "windows":
            self._shuffle()

    @property
    def windows(self) -> int:
        """How many different windows there are (W)."""
        return len(self._table)

    def batch(self, size: int) -> Windows:
        """The next `size` windows."""
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
        """All that the next batches depend on besides the experience itself; plain JSON values."""
        rng = self._round_start if self._sampling == "windows" else self._rng.bit_generator.state
        return {"rng": dict(rng), "drawn": self._drawn, "windows": self.windows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where the sampler that gave `state` stood; it must have been made from the same experience."""
        assert state["windows"] == self.windows, "the state is of a sampler over other experience"
        self._rng.bit_generator.state = state["rng"]
        if self._sampling == "windows":
            self._shuffle()
        self._drawn = state["drawn"]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Training goes on with a sampler after the one that gave `state`: this one starts anew."""

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


class StreamSampler:
    """Walks through episodes: each batch has the next `length` frames of each of its streams, nothing between them.

    A stream takes an episode from its first frame to its last, then the next one; all episodes are taken once, by
    whichever stream comes first, before any is taken again. The first episode of each stream begins at a random frame,
    so that streams do not move in step (pydreamer's Memory Maze runs). For truncated backpropagation through time.

    `rng` belongs to the sampler from here on. Raises UsageError when there is no episode.
    """

    def __init__(self, runs: Episodes, order: np.ndarray, *, length: int, rng: np.random.Generator) -> None:
        if not len(runs.length):
            raise UsageError("the experience has no episode; collect some with: wm collect")
        self._runs = runs
        self._order = order
        self._length = length
        self._rng = rng
        self._queue = np.zeros(0, np.int64)  # episodes still to be taken in this round
        self._episode = np.zeros(0, np.int64)  # (B,): the one that each stream is in
        self._frame = np.zeros(0, np.int64)  # (B,): its next frame there

    def batch(self, size: int) -> Windows:
        """The next frames of `size` streams, as many in every call: rows int64 (B, L), all valid."""
        if not len(self._episode):
            self._episode = np.array([self._next() for _ in range(size)])
            self._frame = self._rng.integers(self._runs.length[self._episode])
        assert len(self._episode) == size, f"{len(self._episode)} streams were begun, not {size}"
        rows = np.stack([self._walk(stream) for stream in range(size)])
        return Windows(rows, np.ones(rows.shape, bool))

    def state(self) -> dict[str, Any]:
        """Where each stream stands, which episodes are still to come, and the generator."""
        return {
            "rng": dict(self._rng.bit_generator.state),
            "queue": self._queue,
            "episode": self._episode,
            "frame": self._frame,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where the sampler that gave `state` stood; it must have been made from the same experience."""
        self._rng.bit_generator.state = state["rng"]
        self._queue, self._episode, self._frame = (
            state[name].astype(np.int64) for name in ("queue", "episode", "frame")
        )

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Training goes on with a sampler after the one that gave `state`: this one starts anew."""

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
