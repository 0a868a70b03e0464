"""Environments that users write: `wrong_steps:wm-test/Faulty-v0`, `wm-test/Unseeded-v0`, `wm-test/Endless-v0`."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
from typing import Any

import gymnasium
import numpy as np

FAULTY = "wrong_steps:wm-test/Faulty-v0"
UNSEEDED = "wrong_steps:wm-test/Unseeded-v0"
ENDLESS = "wrong_steps:wm-test/Endless-v0"
FAULT_AT = 12  # the step of a game of Faulty that fails, counted from 1
EXITS = "WM_TEST_EXITS"
"""If set, the fault is `sys.exit(0)`, and the environment talks: from Python, from C, from a child process and at the
exit."""


class Endless(gymnasium.Env[np.ndarray, int]):
    """Frames (16, 16, 3) show the seed's number in the upper left pixel and the time in the next. Each step is worth
    1."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)  # type: ignore[assignment]
        self.time = self.number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time, self.number = 0, int(self.np_random.integers(256))
        return self.frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        return self.frame(), 1.0, False, False, {}

    def frame(self) -> np.ndarray:
        frame = np.zeros(self.observation_space.shape, np.uint8)
        frame[0, 0], frame[0, 1] = self.number, self.time % 256
        return frame


class Faulty(Endless):
    """Gives the reward NaN in step FAULT_AT of every game."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if EXITS in os.environ:
            print("a step")
            if self.time == 0:
                atexit.register(print, "an exit")
            ctypes.CDLL(None).puts(b"a step in C")
            os.system("echo a step in a shell")
            if self.time + 1 == FAULT_AT:
                raise SystemExit(0)
        observation, reward, *rest = super().step(action)
        return observation, reward if self.time != FAULT_AT else float("nan"), *rest


RESETS = itertools.count(int.from_bytes(os.urandom(4)))  # random numbers may be equal by chance


class Unseeded(Endless):
    """Episodes of 4 steps whose number does not follow the seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset()
        self.number = next(RESETS) % 256
        return self.frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self.time == 4, truncated, info


for environment in (FAULTY, UNSEEDED, ENDLESS):
    name = environment.partition(":")[2]
    gymnasium.register(name, entry_point=f"wrong_steps:{name.removeprefix('wm-test/').removesuffix('-v0')}")
