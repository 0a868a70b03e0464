"""An environment whose episodes differ widely in length: `odd_lengths:wm-test/OddLengths-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

ODD_LENGTHS = "odd_lengths:wm-test/OddLengths-v0"
SHORT, LONG = 2, 50

STARTED: list[int] = []
"""Length of every episode that was started in this process, in that order."""


class OddLengths(gymnasium.Env[np.ndarray, int]):
    """Half of the episodes take 2 steps, half take 50, whatever is done; every step is worth 0.5. Frames (16, 16, 3)
    show the time in their upper left pixel and the length in the next."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)  # type: ignore[assignment]
        self._length = self._time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._time, self._length = 0, int(self.np_random.choice([SHORT, LONG]))
        STARTED.append(self._length)
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._time += 1
        return self._frame(), 0.5, self._time == self._length, False, {}

    def _frame(self) -> np.ndarray:
        frame = np.zeros((16, 16, 3), np.uint8)
        frame[0, 0], frame[0, 1] = self._time, self._length
        return frame


gymnasium.register("wm-test/OddLengths-v0", entry_point=OddLengths)
