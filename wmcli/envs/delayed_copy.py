"""`wm/DelayedCopy-v0`: a game of memory. The right action is the sign of three frames ago.

Each frame shows one of three random signs: a bar in the left, middle or right third. The action (0 left, 1 middle,
2 right) for the sign 3 frames before earns 1, any other 0; the first 3 frames earn nothing. An episode is truncated
after 20 actions, so the best return is 17. Signs are independent, so any policy with a shorter memory has 17/3 = 5.67.
Actions influence only the reward of their own frame: the game needs memory and no foresight.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

DELAYED_COPY_ID = "wm/DelayedCopy-v0"
SIGNS = 3
DELAY = 3  # frames
STEPS = 20  # actions in an episode
THIRD = 8  # pixels
COLOR = (255, 220, 60)
BACKGROUND = (16, 16, 24)


class DelayedCopy(gymnasium.Env[np.ndarray, int]):
    """Frames (24, 24, 3) uint8; actions 0 left, 1 middle, 2 right."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self) -> None:
        side = SIGNS * THIRD
        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(SIGNS)  # type: ignore[assignment]
        self._shown: list[int] = []  # all signs of the episode, the current one last

    def get_action_meanings(self) -> list[str]:
        """The name of each action."""
        return ["LEFT", "MIDDLE", "RIGHT"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """A new episode; its signs depend on the seed alone."""
        super().reset(seed=seed)
        self._shown = []
        return self._show(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Compare the action with the sign of 3 frames before, then show another."""
        right = len(self._shown) > DELAY and int(action) == self._shown[-1 - DELAY]
        return self._show(), float(right), False, False, {}

    def _show(self) -> np.ndarray:
        sign = int(self.np_random.integers(SIGNS))
        self._shown.append(sign)
        side = SIGNS * THIRD
        frame = np.full((side, side, 3), BACKGROUND, np.uint8)
        frame[:, sign * THIRD : (sign + 1) * THIRD] = COLOR
        return frame
