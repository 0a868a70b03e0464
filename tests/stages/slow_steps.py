"""An environment that turns slow, or breaks, in the middle of a run: `slow_steps:wm-test/SlowSteps-v0`.

The variables are read by every process anew, and each counts its own steps.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import gymnasium
import numpy as np

from wmcli.envs.processes import SEED_CHECK_STEPS

SLOW_STEPS = "slow_steps:wm-test/SlowSteps-v0"
SLOW_AFTER = "WM_TEST_SLOW_AFTER"
"""Steps after which each takes SECONDS."""
BREAKS_AFTER = "WM_TEST_BREAKS_AFTER"
"""Steps after which the next one fails."""
SECONDS = 0.1
SEED_CHECK = 2 * SEED_CHECK_STEPS
"""Steps before the first one that counts, in the process that makes the first collect."""

_steps = 0


class SlowSteps(gymnasium.Env[np.ndarray, int]):
    """Episodes of 9 steps. Frames (16, 16, 3) show the sum of the actions in their upper left pixel."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)  # type: ignore[assignment]
        self._time = self._sum = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._time, self._sum = 0, int(self.np_random.integers(9))
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        global _steps
        _steps += 1
        if _steps > int(os.environ.get(BREAKS_AFTER, _steps)):
            raise OSError(errno.EIO, "the game is damaged", "cartridge")
        if _steps > int(os.environ.get(SLOW_AFTER, _steps)):
            time.sleep(SECONDS)
        self._time += 1
        self._sum += int(action)
        return self._frame(), float(action == 1), self._time == 9, False, {}

    def _frame(self) -> np.ndarray:
        frame = np.zeros((16, 16, 3), np.uint8)
        frame[0, 0] = self._sum
        return frame


gymnasium.register("wm-test/SlowSteps-v0", entry_point=SlowSteps)
