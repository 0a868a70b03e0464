"""Ten small games besides Catch for the quick presets, known to gymnasium once this module is imported.

Frames are (64, 64, 3) uint8. Every object is at least 4 pixels wide and high, so it stays visible at 32x32. Two
consecutive frames tell all that matters: no game needs memory. Settings may be chosen on the games of `DEVELOPMENT`.
Those of `UNSEEN` are for a last run, after every choice. To train on one by hand:

    PYTHONPATH=tests/learning wm run rem-quick --run runs/reach --set environment.id=small_games:Reach-v0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import gymnasium
import numpy as np

DEVELOPMENT = ("Reach", "Bounce", "Dodge", "Gather", "Deliver")
UNSEEN = ("Cross", "Shoot", "Push", "Eat", "Jump")

Color = tuple[int, int, int]

WHITE, YELLOW, GREEN, RED, BLUE = (240, 240, 240), (230, 230, 0), (0, 220, 0), (200, 60, 60), (70, 150, 255)
STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))
"""Right, down, left, up, as (rows, columns): the first four actions of games on a board."""


class Reference(NamedTuple):
    """Mean returns of a game over 500 episodes."""

    random: float
    """Of uniformly random play."""
    scripted: float
    """Of the player in `scripted_players`."""

    def share(self, score: float) -> float:
        """The share of the way from random to scripted play that a score has come: 0 at random, 1 at scripted."""
        return (score - self.random) / (self.scripted - self.random)


REFERENCES = {
    "Reach": Reference(random=0.33, scripted=1.00),
    "Bounce": Reference(random=-0.55, scripted=2.00),
    "Dodge": Reference(random=3.09, scripted=12.00),
    "Gather": Reference(random=-0.27, scripted=2.64),
    "Deliver": Reference(random=0.75, scripted=15.05),
    "Cross": Reference(random=1.52, scripted=25.38),
    "Shoot": Reference(random=-0.29, scripted=6.96),
    "Push": Reference(random=0.11, scripted=1.00),
    "Eat": Reference(random=-0.02, scripted=10.57),
    "Jump": Reference(random=-0.55, scripted=5.72),
}
"""By game. `python tests/learning/scripted_players.py` measures them."""


class Rectangle(NamedTuple):
    """A part of a frame in one color, in pixels. Parts outside the frame are cut off."""

    top: int
    left: int
    height: int
    width: int
    color: Color


class Game(gymnasium.Env[np.ndarray, int], ABC):
    """The part that the games share; each says how it begins, what a move does and how it looks."""

    actions: int
    limit: int
    """Steps until an episode is cut off."""
    ground: np.ndarray
    """(64, 64, 3) uint8: a frame without objects."""

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

    def draw(self) -> np.ndarray:
        """(64, 64, 3) uint8."""
        frame = self.ground.copy()
        for top, left, height, width, color in self.objects():
            frame[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = color
        return frame

    @abstractmethod
    def begin(self) -> None:
        """Set the board up, by `np_random` alone."""

    @abstractmethod
    def move(self, action: int) -> tuple[float, bool]:
        """Reward, and whether the episode is over."""

    @abstractmethod
    def objects(self) -> Iterable[Rectangle]:
        """All that a frame shows, from back to front."""


def tile(place: Iterable[int], cell: int, size: int, color: Color) -> Rectangle:
    """A square in the middle of a cell.

    Args:
        place: Row and column of the cell.
        cell: Pixels of a cell's side; the board is as large as fits into the middle of the frame.
        size: Pixels of the square's side.
        color: Of the square.
    """
    top, left = (64 % cell // 2 + cell * int(each) + (cell - size) // 2 for each in place)
    return Rectangle(top, left, size, size, color)


def plain(color: Color) -> np.ndarray:
    """A frame of one color."""
    return np.full((64, 64, 3), color, np.uint8)


def framed(edge: Color, inside: Color) -> np.ndarray:
    """A frame with an edge of 2 pixels, which leaves 60 x 60 to cells of 10 or 12."""
    frame = plain(edge)
    frame[2:62, 2:62] = inside
    return frame


def striped(color: Color, stripe: Color) -> np.ndarray:
    """A frame with a thin line every 8 pixels."""
    frame = plain(color)
    frame[::8] = stripe
    return frame


def limited(value: int, low: int, high: int) -> int:
    """The value, or the limit that it exceeds."""
    return min(max(value, low), high)


# -- DEVELOPMENT ------------------------------------------------------------------------------------------------------


class Reach(Game):
    """Walk over a board of 6 x 6 cells to the goal, both in random places: +1 and the end."""

    actions = 4
    limit = 30
    ground = framed((60, 60, 80), (10, 10, 20))

    def begin(self) -> None:
        self.player, self.goal = (np.array(divmod(cell, 6)) for cell in self.np_random.permutation(36)[:2])

    def move(self, action: int) -> tuple[float, bool]:
        self.player = np.clip(self.player + STEPS[action], 0, 5)
        there = bool((self.player == self.goal).all())
        return float(there), there

    def objects(self) -> Iterable[Rectangle]:
        yield tile(self.goal, 10, 10, GREEN)
        yield tile(self.player, 10, 10, YELLOW)


class Bounce(Game):
    """Keep a ball of 4 pixels in the air with a paddle of 14: +1 for every bounce, -1 and the end for a miss."""

    actions = 3
    limit = 60
    ground = striped((90, 60, 20), (100, 70, 30))

    def begin(self) -> None:
        self.paddle = 30
        self.ball = np.array([8, int(self.np_random.integers(8, 56))])  # y, x
        self.speed = np.array([4, int(self.np_random.choice([-3, 3]))])

    def move(self, action: int) -> tuple[float, bool]:
        self.paddle = limited(self.paddle + 5 * (action - 1), 0, 50)
        self.ball = self.ball + self.speed
        if not 2 <= self.ball[1] <= 60:
            self.speed[1] *= -1
            self.ball[1] = limited(self.ball[1], 2, 60)
        if self.ball[0] < 4:
            self.speed[0] = 4
        if self.ball[0] < 54:
            return 0.0, False
        if not self.paddle - 3 <= self.ball[1] <= self.paddle + 16:
            return -1.0, True
        self.speed[0], self.ball[0] = -4, 54
        return 1.0, False

    def objects(self) -> Iterable[Rectangle]:
        yield Rectangle(int(self.ball[0]) - 2, int(self.ball[1]) - 2, 4, 4, (255, 255, 255))
        yield Rectangle(58, self.paddle, 4, 14, (80, 220, 80))


class Dodge(Game):
    """Every other step a rock begins to fall near the player: +1 if it lands beside the player, else -1 and the end."""

    actions = 3
    limit = 30
    ground = plain((20, 40, 20))

    def begin(self) -> None:
        self.player = 3
        self.rocks = [np.array([0, int(self.np_random.integers(8))])]  # row, column

    def move(self, action: int) -> tuple[float, bool]:
        self.player = limited(self.player + action - 1, 0, 7)
        for rock in self.rocks:
            rock[0] += 1
        landed = [column for row, column in self.rocks if row == 7]
        self.rocks = [rock for rock in self.rocks if rock[0] < 7]
        if self.time % 2 == 0:
            self.rocks.append(np.array([0, limited(self.player + int(self.np_random.integers(-1, 2)), 0, 7)]))
        hit = self.player in landed
        return (-1.0 if hit else float(len(landed))), hit

    def objects(self) -> Iterable[Rectangle]:
        for rock in self.rocks:
            yield tile(rock, 8, 8, RED)
        yield tile((7, self.player), 8, 8, WHITE)


class Gather(Game):
    """Coins and rocks fall, now and then resting for a step: +0.2 for a coin caught, -1 and the end for a rock."""

    actions = 3
    limit = 60
    ground = plain((30, 20, 50))

    def begin(self) -> None:
        self.player = int(self.np_random.integers(8))
        self.sky = np.zeros((7, 8), int)  # 1 a coin, -1 a rock
        for row in (0, 2, 4):
            self.sky[row, self.np_random.integers(8)] = 1

    def move(self, action: int) -> tuple[float, bool]:
        self.player = limited(self.player + action - 1, 0, 7)
        falls = self.np_random.random((7, 8)) < 0.75
        landed = np.where(falls[6], self.sky[6], 0)
        self.sky[6, falls[6]] = 0
        for row in reversed(range(6)):
            free = falls[row] & (self.sky[row + 1] == 0)
            self.sky[row + 1, free] = self.sky[row, free]
            self.sky[row, free] = 0
        column, kind = self.np_random.integers(8), self.np_random.choice([1, 1, -1, 0, 0])
        if not self.sky[0, column]:
            self.sky[0, column] = kind
        caught = landed[self.player]
        return (-1.0 if caught < 0 else 0.2 * float(caught)), bool(caught < 0)

    def objects(self) -> Iterable[Rectangle]:
        for place in np.argwhere(self.sky):
            yield tile(place, 8, 4, YELLOW) if self.sky[*place] > 0 else tile(place, 8, 8, RED)
        yield tile((7, self.player), 8, 8, WHITE)


class Deliver(Game):
    """Fetch a parcel on a board of 5 x 5 cells and bring it to the depot: +1, and the next parcel appears."""

    actions = 4
    limit = 100
    ground = framed((80, 60, 60), (20, 15, 10))

    def begin(self) -> None:
        cells = self.np_random.permutation(25)[:3]
        self.player, self.depot, self.parcel = (np.array(divmod(cell, 5)) for cell in cells)
        self.carries = False

    def move(self, action: int) -> tuple[float, bool]:
        self.player = np.clip(self.player + STEPS[action], 0, 4)
        if self.carries and (self.player == self.depot).all():
            self.carries, self.parcel = False, self.depot
            while (self.parcel == self.depot).all():
                self.parcel = self.np_random.integers(5, size=2)
            return 1.0, False
        self.carries = self.carries or bool((self.player == self.parcel).all())
        if self.carries:
            self.parcel = self.player
        return 0.0, False

    def objects(self) -> Iterable[Rectangle]:
        yield tile(self.depot, 12, 12, BLUE)
        if not self.carries:
            yield tile(self.parcel, 12, 8, GREEN)
        yield tile(self.player, 12, 8, RED if self.carries else WHITE)


# -- UNSEEN -----------------------------------------------------------------------------------------------------------


class Cross(Game):
    """Walk up over three lanes of cars again and again: +1 at the top, back to the bottom from there or when hit."""

    actions = 3
    limit = 150
    ground = framed((70, 110, 70), (50, 50, 50))
    speeds = np.array([4, -8, 8])
    """Pixels a step, of the lanes from top to bottom."""

    def begin(self) -> None:
        self.row = 4
        self.cars = 4 * self.np_random.integers(16, size=3)  # left edges; a lane is a circle

    def move(self, action: int) -> tuple[float, bool]:
        self.row = limited(self.row + action - 1, 0, 4)
        self.cars = (self.cars + self.speeds) % 64
        if self.row == 0:
            self.row = 4
            return 1.0, False
        if self.row < 4 and 16 < self.cars[self.row - 1] < 36:
            self.row = 4
        return 0.0, False

    def objects(self) -> Iterable[Rectangle]:
        for lane, left in enumerate(self.cars.tolist()):
            yield Rectangle(16 + 12 * lane, left, 8, 12, RED)
            if left > 52:
                yield Rectangle(16 + 12 * lane, left - 64, 8, 12, RED)
        yield Rectangle(4 + 12 * self.row, 28, 8, 8, YELLOW)


class Shoot(Game):
    """Targets fall, and a missile at a time flies: +1 for a target shot, -0.5 for one that reaches the ground.

    Actions: left, stay, right; the same three with a shot behind the move.
    """

    actions = 6
    limit = 50
    ground = plain((10, 10, 40))

    def begin(self) -> None:
        self.player = int(self.np_random.integers(8))
        self.missile: tuple[int, int] | None = None  # top, column
        self.targets = np.full(8, -1)  # the top of the target in each column, -1 for none
        self.targets[self.np_random.integers(8)] = 0

    def move(self, action: int) -> tuple[float, bool]:
        self.player = limited(self.player + action % 3 - 1, 0, 7)
        if self.missile:
            self.missile = (self.missile[0] - 12, self.missile[1]) if self.missile[0] > 0 else None
        elif action >= 3:
            self.missile = (44, self.player)
        self.targets[self.targets >= 0] += 4
        reward = -0.5 * float((self.targets == 56).sum())
        self.targets[self.targets == 56] = -1
        if self.missile:
            top, column = self.missile
            if self.targets[column] >= 0 and top < self.targets[column] + 8:
                self.targets[column], self.missile = -1, None
                reward += 1
        if self.np_random.random() < 0.15:
            column = int(self.np_random.integers(8))
            self.targets[column] = max(self.targets[column], 0)
        return reward, False

    def objects(self) -> Iterable[Rectangle]:
        for column, top in enumerate(self.targets.tolist()):
            if top >= 0:
                yield Rectangle(top, 8 * column, 8, 8, RED)
        if self.missile:
            yield Rectangle(self.missile[0], 8 * self.missile[1] + 2, 8, 4, YELLOW)
        yield tile((7, self.player), 8, 8, BLUE)


class Push(Game):
    """Push a block onto the goal on a board of 4 x 4 cells, within 20 steps: +1 and the end. It cannot be pulled."""

    actions = 4
    limit = 20
    ground = plain((30, 10, 30))

    def begin(self) -> None:
        """Block and goal are off the edge, where a block can be pushed every way: every board can be solved."""
        self.block = self.np_random.integers(1, 3, size=2)
        self.goal = self.player = self.block
        while (self.goal == self.block).all():
            self.goal = self.np_random.integers(1, 3, size=2)
        while any((self.player == taken).all() for taken in (self.block, self.goal)):
            self.player = self.np_random.integers(4, size=2)

    def move(self, action: int) -> tuple[float, bool]:
        self.player, self.block = self.pushed(self.player, self.block, action)
        there = bool((self.block == self.goal).all())
        return float(there), there

    @staticmethod
    def pushed(player: np.ndarray, block: np.ndarray, action: int) -> tuple[np.ndarray, np.ndarray]:
        """The player and the block after an action."""
        ahead = np.clip(player + STEPS[action], 0, 3)
        if (ahead != block).any():
            return ahead, block
        beyond = np.clip(block + STEPS[action], 0, 3)
        return (player, block) if (beyond == block).all() else (ahead, beyond)

    def objects(self) -> Iterable[Rectangle]:
        yield tile(self.goal, 16, 16, GREEN)
        yield tile(self.block, 16, 12, RED)
        yield tile(self.player, 16, 8, YELLOW)


class Eat(Game):
    """Three good and three bad bites wander over the board: +1 and -1 for eating one. Another appears elsewhere."""

    actions = 5
    limit = 40
    ground = plain((40, 30, 20))

    def begin(self) -> None:
        self.player = np.array([3, 3])
        self.bites = np.zeros((8, 8), int)  # 1 good, -1 bad
        for bite in (1, 1, 1, -1, -1, -1):
            self._place(bite)

    def move(self, action: int) -> tuple[float, bool]:
        if action < 4:
            self.player = np.clip(self.player + STEPS[action], 0, 7)
        eaten = int(self.bites[*self.player])
        self.bites[*self.player] = 0
        for place in np.argwhere(self.bites):
            to = np.clip(place + STEPS[self.np_random.integers(4)], 0, 7)
            if self.np_random.random() < 0.3 and not self.bites[*to] and (to != self.player).any():
                self.bites[*to], self.bites[*place] = self.bites[*place], 0
        if eaten:
            self._place(eaten)
        return float(eaten), False

    def objects(self) -> Iterable[Rectangle]:
        for place in np.argwhere(self.bites):
            yield tile(place, 8, 8, GREEN if self.bites[*place] > 0 else RED)
        yield tile(self.player, 8, 8, WHITE)

    def _place(self, bite: int) -> None:
        """On a free cell at least two steps away from the player."""
        far = np.abs(np.indices((8, 8)) - self.player[:, None, None]).sum(0) >= 2
        free = np.argwhere(far & (self.bites == 0))
        self.bites[*self.np_random.choice(free)] = bite


class Jump(Game):
    """Jump over hurdles: +1 for each passed, -0.1 for each jump, -1 and the end for running into one."""

    actions = 2
    limit = 80
    ground = plain((120, 170, 210))
    ground[52:] = (90, 70, 40)
    heights = (0, 10, 16, 18, 16, 10)
    """Pixels above the ground after each step of a jump."""

    def begin(self) -> None:
        self.flight = 0  # steps since the jump, 0 on the ground
        self.hurdles = [int(4 * self.np_random.integers(8, 15))]  # left edges, the nearest first

    def move(self, action: int) -> tuple[float, bool]:
        jumps = action == 1 and self.flight == 0
        self.flight = (self.flight + 1) % len(self.heights) if self.flight or jumps else 0
        self.hurdles = [left - 4 for left in self.hurdles]
        reward = -0.1 * jumps
        if self.hurdles and self.hurdles[0] <= 4:
            self.hurdles.pop(0)
            reward += 1
        if (not self.hurdles or self.hurdles[-1] <= 20) and self.np_random.random() < 0.25:
            self.hurdles.append(56)
        if self.hurdles and self.hurdles[0] < 20 and self.heights[self.flight] < 8:
            return -1.0, True
        return reward, False

    def objects(self) -> Iterable[Rectangle]:
        for left in self.hurdles:
            yield Rectangle(44, left, 8, 8, RED)
        yield Rectangle(44 - self.heights[self.flight], 12, 8, 8, (30, 30, 30))


GAMES: dict[str, type[Game]] = {
    game.__name__: game for game in (Reach, Bounce, Dodge, Gather, Deliver, Cross, Shoot, Push, Eat, Jump)
}

for name, game in GAMES.items():
    gymnasium.register(f"{name}-v0", entry_point=game)  # type: ignore[arg-type]
