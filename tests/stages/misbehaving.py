"""An environment that misbehaves in one step of every game: `misbehaving:wm-test/Misbehaving-v0`."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
from wrong_steps import Endless

MISBEHAVING = "misbehaving:wm-test/Misbehaving-v0"
AT = 12
"""The step, counted from 1 in each game."""
DOES = "WM_TEST_DOES"
"""What it does then; nothing without."""
ONCE = "WM_TEST_ONCE"
"""A file that must exist for it. The environment removes it, so that it happens once."""


class Misbehaving(Endless):
    """Endless, but a game has 15 steps."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        if self.time == AT and (ONCE not in os.environ or Path(os.environ[ONCE]).exists()):
            if ONCE in os.environ:
                Path(os.environ[ONCE]).unlink()
            getattr(self, os.environ.get(DOES, "nothing"))()
        return self.frame(), 1.0, self.time == 15, False, {}

    def nothing(self) -> None:
        pass

    def hang(self) -> None:
        time.sleep(120)

    def exit(self) -> None:
        os._exit(0)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def eat(self) -> None:
        np.zeros(1 << 50)

    def close_files(self) -> None:
        os.closerange(0, 1 << 16)

    def fork(self) -> None:
        os.fork()

    def other_actions(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(3)  # type: ignore[assignment]

    def other_frames(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def meddle(self) -> None:
        """Change whatever a process has one of."""
        import torch

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(2)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(7)
        os.chdir(tempfile.gettempdir())


gymnasium.register("wm-test/Misbehaving-v0", entry_point=Misbehaving)
