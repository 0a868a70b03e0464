"""`wm/Catch-v0`: the smallest game with pixels, actions and a delayed reward.

A board of 8 x 8 cells of 8 pixels. A ball of one cell starts in a random column of the top row and falls one row a
step; a paddle two cells wide starts in the middle of the bottom row and moves one cell a step. The episode ends after 7
steps, when the ball is in the bottom row: +1 if the paddle is under it, else -1; every reward before that is 0.

A blind policy catches 2 of the 8 columns wherever its paddle ends, so its mean return is exactly 2 * 2/8 - 1 = -0.5.
From the middle every column is at most 3 moves away, so the best return is always +1. Cells of 8 pixels stay whole when
a frame is resized to 32 or 16.

Source: Catch of bsuite (Osband et al. 2020, arXiv 1908.03568).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

CATCH_ID = "wm/Catch-v0"
CELLS = 8  # rows and columns of the board
CELL = 8  # pixels
PADDLE = 2  # cells
BALL_COLOR = (255, 220, 60)
PADDLE_COLOR = (70, 150, 255)
BACKGROUND = (16, 16, 24)


class Catch(gymnasium.Env[np.ndarray, int]):
    """Frames (64, 64, 3) uint8; actions 0 left, 1 stay, 2 right."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (CELLS * CELL, CELLS * CELL, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)  # type: ignore[assignment]
        self._row = CELLS - 1
        self._column = 0
        self._paddle = 0  # its leftmost cell

    def get_action_meanings(self) -> list[str]:
        """The name of each action."""
        return ["LEFT", "STAY", "RIGHT"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """A new ball at the top, in a column that depends on the seed alone."""
        super().reset(seed=seed)
        self._row = 0
        self._column = int(self.np_random.integers(CELLS))
        self._paddle = (CELLS - PADDLE) // 2
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move the paddle, then let the ball fall one row."""
        assert self._row < CELLS - 1, "the episode is over: reset first"
        self._paddle = min(max(self._paddle + int(action) - 1, 0), CELLS - PADDLE)
        self._row += 1
        landed = self._row == CELLS - 1
        caught = self._paddle <= self._column < self._paddle + PADDLE
        reward = (1.0 if caught else -1.0) if landed else 0.0
        return self._draw(), reward, landed, False, {}

    def _draw(self) -> np.ndarray:
        board = np.full((CELLS, CELLS, 3), BACKGROUND, np.uint8)
        board[-1, self._paddle : self._paddle + PADDLE] = PADDLE_COLOR
        board[self._row, self._column] = BALL_COLOR
        return board.repeat(CELL, axis=0).repeat(CELL, axis=1)
