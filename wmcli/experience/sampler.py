"""Which windows of experience a batch is made of: index arithmetic alone, in numpy.

B batch, L time (frames of a window), E episodes, W windows.

Every window lies inside one episode and has `length` frames. At the end of an episode that runs short it is padded:
right padding keeps the window's start, left padding its end, and at least `minimum` frames are real. So an episode of n
frames has max(0, n - minimum + 1) windows, and those shorter than `minimum` have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from wmcli.errors import UsageError
from wmcli.experience.memory import Episodes


class Windows(NamedTuple):
    """A batch of windows, as rows of the memory."""

    rows: np.ndarray  # int64 (B, L): where padded, the nearest real row of the window
    valid: np.ndarray  # bool (B, L): False where padded


class WindowSampler:
    """Draws batches of windows.

    `sampling` "windows" (REM, Cohen et al. 2024): uniform over all windows, without replacement until each was drawn
    once, then anew; a batch that reaches over the end is filled from the next round, so every batch has the size asked
    for. "episodes" (IRIS, Micheli et al. 2023): an episode uniformly, then a window of it uniformly, which favours the
    windows of short episodes.

    `rng` belongs to the sampler from here on: its state is saved and restored with it. Raises UsageError when there is
    no window at all.
    """

    def __init__(
        self,
        episodes: Episodes,
        order: np.ndarray,
        *,
        length: int,
        minimum: int,
        pad: Literal["left", "right"],
        sampling: Literal["windows", "episodes"],
        rng: np.random.Generator,
    ) -> None:
        assert 1 <= minimum <= length
        usable = episodes.length >= minimum
        if not usable.any():
            longest = int(episodes.length.max(initial=0))
            raise UsageError(
                f"no episode of the experience has {minimum} frames in a row (the longest has {longest}); "
                f"collect more with: wm collect"
            )
        self._start = episodes.start[usable]
        self._frames = episodes.length[usable]
        self._behind = np.cumsum(self._frames - minimum + 1)  # (E,): windows up to and with each episode
        self._order = order
        self._length = length
        self._minimum = minimum
        self._pad = pad
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
        return int(self._behind[-1])

    def batch(self, size: int) -> Windows:
        """The next `size` windows."""
        if self._sampling == "windows":
            window = self._next(size)
            episode = np.searchsorted(self._behind, window, side="right")
            offset = window - (self._behind[episode] - self._counts(episode))
        else:
            episode = self._rng.integers(len(self._frames), size=size)
            offset = self._rng.integers(self._counts(episode))
        # frame within the episode at which the window begins: below 0 where it is padded on the left
        begin = offset if self._pad == "right" else offset + self._minimum - self._length
        frame = begin[:, None] + np.arange(self._length)  # (B, L)
        last = self._frames[episode][:, None] - 1
        rows = self._order[self._start[episode][:, None] + np.clip(frame, 0, last)]
        return Windows(rows, (frame >= 0) & (frame <= last))

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

    def _counts(self, episode: np.ndarray) -> np.ndarray:
        return self._frames[episode] - self._minimum + 1

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
