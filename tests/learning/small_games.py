"""Three small games besides Catch that the quick presets must learn, known to gymnasium once this module is imported.

Frames are (64, 64, 3) uint8. Random play and the best return: Reach about 0.36 and 1, Bounce about -0.5 and 2 to 3,
Dodge about 3.3 and 12. To train on one by hand:

    PYTHONPATH=tests/learning wm run rem-quick --run runs/reach --set environment.id=small_games:Reach-v0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import numpy as np


class Game(gymnasium.Env[np.ndarray, int], ABC):
    """What the games share; each says how it begins, what a move does and how it looks."""

    actions: int
    limit: int
    """Steps until an episode is cut off."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(self.actions)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        self.begin()
        return self.draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        reward, ended = self.move(int(action))
        return self.draw(), reward, ended, self.time >= self.limit, {}

    @abstractmethod
    def begin(self) -> None:
        """Set the board up, by `np_random` alone."""

    @abstractmethod
    def move(self, action: int) -> tuple[float, bool]:
        """Reward, and whether the episode is over."""

    @abstractmethod
    def draw(self) -> np.ndarray:
        """(64, 64, 3) uint8."""


class Reach(Game):
    """Walk over a board of 6 x 6 cells to the goal, both in random places: +1 and the end."""

    actions = 4
    limit = 30

    def begin(self) -> None:
        self.player, self.goal = (np.array(divmod(cell, 6)) for cell in self.np_random.permutation(36)[:2])

    def move(self, action: int) -> tuple[float, bool]:
        self.player = np.clip(self.player + [(0, 1), (1, 0), (0, -1), (-1, 0)][action], 0, 5)
        there = bool((self.player == self.goal).all())
        return float(there), there

    def draw(self) -> np.ndarray:
        frame = np.full((64, 64, 3), (60, 60, 80), np.uint8)
        frame[2:62, 2:62] = (10, 10, 20)
        for (y, x), color in ((2 + 10 * self.goal, (0, 220, 0)), (2 + 10 * self.player, (230, 230, 0))):
            frame[y : y + 10, x : x + 10] = color
        return frame


class Bounce(Game):
    """Keep a ball of 4 pixels in the air with a paddle of 14: +1 for every bounce, -1 and the end for a miss."""

    actions = 3
    limit = 60

    def begin(self) -> None:
        self.paddle = 30
        self.ball = np.array([8, int(self.np_random.integers(8, 56))])  # y, x
        self.speed = np.array([4, int(self.np_random.choice([-3, 3]))])

    def move(self, action: int) -> tuple[float, bool]:
        self.paddle = min(max(self.paddle + 5 * (action - 1), 0), 50)
        self.ball = self.ball + self.speed
        if not 2 <= self.ball[1] <= 60:
            self.speed[1] *= -1
            self.ball[1] = min(max(self.ball[1], 2), 60)
        if self.ball[0] < 4:
            self.speed[0] = 4
        if self.ball[0] < 54:
            return 0.0, False
        if not self.paddle - 3 <= self.ball[1] <= self.paddle + 16:
            return -1.0, True
        self.speed[0], self.ball[0] = -4, 54
        return 1.0, False

    def draw(self) -> np.ndarray:
        frame = np.full((64, 64, 3), (90, 60, 20), np.uint8)
        frame[::8] = (100, 70, 30)
        y, x = np.maximum(self.ball - 2, 0)
        frame[y : self.ball[0] + 2, x : self.ball[1] + 2] = (255, 255, 255)
        frame[58:62, self.paddle : self.paddle + 14] = (80, 220, 80)
        return frame


class Dodge(Game):
    """Every other step a rock begins to fall near the player: +1 if it lands beside the player, else -1 and the end."""

    actions = 3
    limit = 30

    def begin(self) -> None:
        self.player = 3
        self.rocks = [np.array([0, int(self.np_random.integers(8))])]  # row, column

    def move(self, action: int) -> tuple[float, bool]:
        self.player = min(max(self.player + action - 1, 0), 7)
        for rock in self.rocks:
            rock[0] += 1
        landed = [column for row, column in self.rocks if row == 7]
        self.rocks = [rock for rock in self.rocks if rock[0] < 7]
        if self.time % 2 == 0:
            self.rocks.append(np.array([0, min(max(self.player + int(self.np_random.integers(-1, 2)), 0), 7)]))
        hit = self.player in landed
        return (-1.0 if hit else float(len(landed))), hit

    def draw(self) -> np.ndarray:
        board = np.full((8, 8, 3), (20, 40, 20), np.uint8)
        for row, column in self.rocks:
            board[row, column] = (200, 60, 60)
        board[7, self.player] = (240, 240, 240)
        return board.repeat(8, axis=0).repeat(8, axis=1)


for game in (Reach, Bounce, Dodge):
    gymnasium.register(f"{game.__name__}-v0", entry_point=game)
