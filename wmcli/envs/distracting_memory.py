"""Distracting Memory: choose the square at the end of the hallway that has the color at its beginning.

The two-dimensional memory task of S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064, section 5.5, figure 2), after the
Memory task of MiniGrid. A grid of W x 9 cells, x to the east and y to the south. A room in the west, x = 1 .. 3 and
y = 3 .. 5, holds the memory square at (3, 5). From it a hallway leads along y = 4 to a corridor across it at
x = s = W - 2, which has a target square at either end, (s, 2) and (s, 6), in two different colors of four. One of them
is the memory square's. Each cell x = 4 .. W - 5 of the hallway is a colored square with probability 1/2, to distract.

An agent at (s, 3) or (s, 5) has chosen the target next to it, and earns 1 if its color is that of the memory square,
else 0. That frame is the last. Agents walk over squares and hide the one below them.

The script starts in the middle of the hallway, x = s / 2, and looks east. Context: to s, to x = 1 and back to where it
started, 2 W - 1 frames. Query: to s again and to a target drawn uniformly, W / 2 + 1 frames.

Geometry and lengths are those of the authors' video of an episode with W = 100, with 199 frames of context and 51 of
query. One episode leaves open, and this file decides: the memory square is always at (3, 5); the probability and range
of the distractors; agents walk over all squares.

Axes: E parallel episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wmcli.envs import tiles
from wmcli.envs.memory_task import EpisodeBatch
from wmcli.envs.tiles import EAST, FORWARD, LEFT, RIGHT, Boards, TileTask
from wmcli.errors import UsageError

HEIGHT = 9  # cells
HALL = 4  # row of the hallway
MEMORY = (5, 3)  # row and column of the memory square
TARGETS = (2, 6)  # rows of the target squares; an episode ends between them and the hallway
SMALLEST = 12  # width; below, the start is in the room's doorway


@dataclass(frozen=True)
class DistractingMemory(TileTask):
    """The task on a grid `width` cells wide: an even number, 12 or more, else UsageError."""

    width: int
    meanings: ClassVar[tuple[str, ...]] = ("LEFT", "RIGHT", "FORWARD")

    def __post_init__(self) -> None:
        if self.width < SMALLEST or self.width % 2:
            raise UsageError(
                f"width = {self.width}: Distracting Memory starts in the middle of a hallway, so its width is an even "
                f"number, {SMALLEST} or more; the paper's are 100, 200 and 400"
            )

    @property
    def about(self) -> str:
        """One line for people."""
        return f"Distracting Memory, {self.width} cells wide: choose the square of the color seen at the beginning"

    @property
    def context(self) -> int:
        """2 W - 1."""
        return 2 * self.width - 1

    @property
    def query(self) -> int:
        """W / 2 + 1."""
        return self.width // 2 + 1

    def begin(self, seeds: np.ndarray) -> EpisodeBatch:
        """The episodes of these seeds, int64 (E,), at their first frames."""
        return _DistractingEpisodes(self, seeds)


class _DistractingEpisodes(EpisodeBatch):
    def __init__(self, task: DistractingMemory, seeds: np.ndarray) -> None:
        self._frames = task.context + task.query
        self._frame = 0  # of the episodes that are not over
        self._crossing = task.width - 2
        boards = np.repeat(_empty_board(task.width)[None], len(seeds), axis=0)
        cells = slice(4, task.width - 4)
        remembered = np.empty(len(seeds), np.intp)  # which of the targets has the memory square's color
        self._drawn = np.empty(len(seeds), np.intp)  # which the script goes to
        for episode, seed in enumerate(seeds):
            random = np.random.default_rng(int(seed))
            hall = boards[episode, HALL, cells]
            colors = random.integers(len(tiles.COLORS), size=hall.size)
            hall[:] = np.where(random.random(hall.size) < 0.5, tiles.SQUARE + colors, tiles.EMPTY)
            targets = tiles.SQUARE + random.permutation(len(tiles.COLORS))[: len(TARGETS)]
            remembered[episode], self._drawn[episode] = random.integers(len(TARGETS), size=2)
            boards[episode, TARGETS, self._crossing] = targets
            boards[episode, *MEMORY] = targets[remembered[episode]]
        self._boards = Boards(boards, HALL, self._crossing // 2, EAST)
        self.cells = self._boards.cells
        ends = np.stack([self._boards.cell(HALL - 1, self._crossing), self._boards.cell(HALL + 1, self._crossing)])
        self._ends = ends
        self._right = ends[remembered, np.arange(len(seeds))]

    def _arrived(self) -> np.ndarray:
        return (self._boards.agent == self._ends).any(axis=0)

    def compact_state(self) -> np.ndarray:
        return self._boards.view()

    def board(self) -> np.ndarray:
        return self._boards.draw()

    def position(self) -> np.ndarray:
        return self._boards.position()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        last = self._arrived() | (self._frame == self._frames - 1)
        self._boards.walk(action, ~last)
        self._frame = min(self._frame + 1, self._frames - 1)
        reward = ~last & (self._boards.agent == self._right)
        return reward.astype(np.float32), last

    def script(self) -> np.ndarray:
        start, crossing = self._crossing // 2, self._crossing
        runs = (
            (FORWARD, crossing - start),
            (RIGHT, 2),
            (FORWARD, crossing - 1),
            (LEFT, 2),
            (FORWARD, crossing - 1),  # the last step of the context and the way to the crossing
            (LEFT, 1),
            (FORWARD, 2),
        )
        common = np.repeat(*np.array(runs, np.int32).T).astype(np.int32)
        actions = np.tile(common, (len(self._drawn), 1))
        actions[self._drawn == 1, -3] = RIGHT
        return actions


def _empty_board(width: int) -> np.ndarray:
    """The walls that all episodes share, codes (9, W)."""
    board = np.full((HEIGHT, width), tiles.EMPTY, np.uint8)
    board[[0, -1]] = board[:, [0, -1]] = tiles.WALL
    board[[2, 6], 1:5] = board[[3, 5], 4] = tiles.WALL  # the room
    board[[3, 5], 5 : width - 3] = tiles.WALL  # the hallway
    board[:HALL, width - 3] = board[HALL + 1 :, width - 3] = tiles.WALL  # the corridor across
    return board
