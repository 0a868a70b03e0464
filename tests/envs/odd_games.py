"""An environment that does what it is told to, `odd_games:wm-test/Odd-v0`, in whatever process it is."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import gymnasium
import numpy as np

ODD = "odd_games:wm-test/Odd-v0"
FAULT, DEATH, TALK, OUTSIDE_TORCH, SLEEP = 1, 2, 3, 4, 5
"""Actions; 0 does nothing. OUTSIDE_TORCH is a fault where torch has been imported."""


class Odd(gymnasium.Env[np.ndarray, int]):
    """Episodes of 3 to 6 steps, by the seed."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (8, 8), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(6)  # type: ignore[assignment]
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(3, 7))
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if action == FAULT or (action == OUTSIDE_TORCH and "torch" in sys.modules):
            raise RuntimeError("told to")
        if action == DEATH:
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == TALK:
            print("said by the game")  # noqa: T201
            os.write(1, b"said below it\n")
        if action == SLEEP:
            time.sleep(120)
        self._left -= 1
        return self._frame(), 1.0, self._left == 0, False, {}

    def _frame(self) -> np.ndarray:
        return np.full((8, 8), self._left, np.uint8)


gymnasium.register("wm-test/Odd-v0", entry_point=Odd)
