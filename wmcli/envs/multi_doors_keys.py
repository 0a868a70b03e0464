"""Multi Doors Keys: remember the open doors and the unused keys.

The two-dimensional task of S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064, section 5.6, figure 2) in which memory has
to be kept up to date, drawn with the tiles of MiniGrid. K doors and K keys on a grid of 4 K + 1 x 9 cells, x to the
east and y to the south. A corridor, y = 3 .. 5; north of it K rooms behind doors at (x_i, 2), x_i = 2 + 4 i; south of
it K rooms with openings at (x_i, 6) and a key at (x_i, 7). Doors are locked at first. Their colors are drawn from four
with replacement, and the keys' are the same in another order.

PICKUP takes the key in front, any number of them; they are not drawn. TOGGLE at a locked door opens it and consumes one
key of its color, if there is one; open doors stay open. Opening a door earns 1: the paper has no reward here, and so
the script earns K in every episode. An episode ends with its last frame and not before.

The script walks along y = 4. Context: it starts at a random x_i and heading and visits all columns, the westernmost
first. In each it takes one step south, where the key comes into view, and back. At the end it returns to its start.
Query: in random order it takes each key and then tries two different random doors; at last it tries all doors in random
order. NOOP fills both phases up, to 14 K - 2 and 10 K^2 + 12 K + 50 frames: (40|176), (68|360) and (96|624) for 3, 5
and 7 keys. Every context fits. Fewer than 1 in 500 queries do not; their orders are sampled again.

Rows and pitch are those of the paper's figure. The paper's lengths, its start and the width of its corridor are
unknown. Without padding the script takes 14 K - 9 to 14 K - 6 actions of context, and on average 138, 289 and 482
actions of query for 3, 5 and 7 keys.

Axes: E parallel episodes, K doors, V visits of the script.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wmcli.envs import tiles
from wmcli.envs.memory_task import EpisodeBatch
from wmcli.envs.tiles import EAST, FORWARD, LEFT, NORTH, RIGHT, SOUTH, WEST, Boards, TileTask
from wmcli.errors import UsageError

PICKUP, TOGGLE, NOOP = range(3, 6)  # after the actions of `Boards.walk`
PITCH = 4  # cells from a door to the next
HEIGHT = 9  # cells
DOOR_ROW, TRAVEL_ROW, OPENING_ROW, KEY_ROW = 2, 4, 6, 7

# What the script does in a column: the heading that it takes, (action, times) of all that follows, the heading it has
# then. None: the one that it comes with.
_Visit = tuple[int | None, tuple[tuple[int, int], ...], int | None]
_LOOK: _Visit = (SOUTH, ((FORWARD, 1), (RIGHT, 2), (FORWARD, 1)), NORTH)
_COME: _Visit = (None, (), None)
_TAKE: _Visit = (SOUTH, ((FORWARD, 2), (PICKUP, 1), (RIGHT, 2), (FORWARD, 2)), NORTH)
_TRY: _Visit = (NORTH, ((FORWARD, 1), (TOGGLE, 1), (RIGHT, 2), (FORWARD, 1)), SOUTH)


@dataclass(frozen=True)
class MultiDoorsKeys(TileTask):
    """The task with `keys` keys and as many doors: 2 or more, else UsageError."""

    keys: int
    meanings: ClassVar[tuple[str, ...]] = ("LEFT", "RIGHT", "FORWARD", "PICKUP", "TOGGLE", "NOOP")
    padding: ClassVar[int | None] = NOOP

    def __post_init__(self) -> None:
        if self.keys < 2:
            raise UsageError(
                f"keys = {self.keys}: Multi Doors Keys tries two doors after each key, so it takes 2 keys or more; the "
                f"paper's are 3, 5 and 7"
            )

    @property
    def about(self) -> str:
        """One line for people."""
        return f"Multi Doors Keys, {self.keys} of each: a key is consumed by the door that it opens"

    @property
    def context(self) -> int:
        """14 K - 2."""
        return 14 * self.keys - 2

    @property
    def query(self) -> int:
        """10 K^2 + 12 K + 50."""
        return 10 * self.keys**2 + 12 * self.keys + 50

    def begin(self, seeds: np.ndarray) -> EpisodeBatch:
        """The episodes of these seeds, int64 (E,), at their first frames."""
        return _DoorsEpisodes(self, seeds)


class _DoorsEpisodes(EpisodeBatch):
    def __init__(self, task: MultiDoorsKeys, seeds: np.ndarray) -> None:
        keys = task.keys
        self._frames = task.context + task.query
        self._frame = 0
        self._held = np.zeros((len(seeds), len(tiles.COLORS)), np.int64)  # keys of each color
        generators = [np.random.default_rng(int(seed)) for seed in seeds]
        boards = np.repeat(_empty_board(keys)[None], len(seeds), axis=0)
        start = np.empty((len(seeds), 1), np.intp)
        heading = np.empty(len(seeds), np.intp)
        for episode, random in enumerate(generators):
            doors = random.integers(len(tiles.COLORS), size=keys)
            boards[episode, DOOR_ROW, 2::PITCH] = tiles.LOCKED + doors
            boards[episode, KEY_ROW, 2::PITCH] = tiles.KEY + random.permutation(doors)
            start[episode], heading[episode] = random.integers(keys), random.integers(4)
        self._boards = Boards(boards, TRAVEL_ROW, 2 + PITCH * start[:, 0], heading)
        self.cells = self._boards.cells

        sweep = np.concatenate([start, np.broadcast_to(np.arange(keys), (len(seeds), keys)), start], axis=1)
        context, heading = _runs(sweep, (_LOOK,) * keys + (_COME,), heading)
        tries = (_TAKE, _TRY, _TRY) * keys + (_TRY,) * keys
        orders = np.array([_draw_order(random, keys) for random in generators])
        while True:
            query, _ = _runs(np.concatenate([start, orders], axis=1), tries, heading)
            misfits = np.flatnonzero(query[..., 1].sum(axis=1) > task.query)
            if not misfits.size:
                break
            orders[misfits] = [_draw_order(generators[episode], keys) for episode in misfits]
        # An action leads to the next frame: the query's first one is taken in the context's last frame.
        self._script = np.concatenate([_fill(context, task.context - 1), _fill(query, task.query + 1)], axis=1)

    def compact_state(self) -> np.ndarray:
        return self._boards.view()

    def board(self) -> np.ndarray:
        return self._boards.draw()

    def position(self) -> np.ndarray:
        return self._boards.position()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        last = np.full(len(action), self._frame == self._frames - 1)
        self._frame = min(self._frame + 1, self._frames - 1)
        codes, held, ahead = self._boards.codes, self._held, self._boards.ahead()
        tile = codes[ahead].astype(np.intp)
        takes = ~last & (action == PICKUP) & (tile >= tiles.KEY) & (tile < tiles.LOCKED)
        held[takes, tile[takes] - tiles.KEY] += 1
        codes[ahead[takes]] = tiles.EMPTY
        opens = ~last & (action == TOGGLE) & (tile >= tiles.LOCKED) & (tile < tiles.OPEN)
        opens[opens] = held[opens, tile[opens] - tiles.LOCKED] > 0
        held[opens, tile[opens] - tiles.LOCKED] -= 1
        codes[ahead[opens]] += tiles.OPEN - tiles.LOCKED
        self._boards.walk(action, ~last)
        return opens.astype(np.float32), last

    def script(self) -> np.ndarray:
        return self._script.copy()


def _empty_board(keys: int) -> np.ndarray:
    """The walls that all episodes share, codes (9, 4 K + 1)."""
    board = np.full((HEIGHT, PITCH * keys + 1), tiles.EMPTY, np.uint8)
    board[[0, DOOR_ROW, OPENING_ROW, -1]] = board[:, [0, -1]] = tiles.WALL
    board[[DOOR_ROW - 1, KEY_ROW], ::PITCH] = tiles.WALL  # between rooms
    board[OPENING_ROW, 2::PITCH] = tiles.EMPTY
    return board


def _draw_order(random: np.random.Generator, keys: int) -> np.ndarray:
    """The columns that a query visits, (4 K,): after each key two different doors, then all doors."""
    rounds = [np.concatenate([[key], random.permutation(keys)[:2]]) for key in random.permutation(keys)]
    return np.concatenate([*rounds, random.permutation(keys)])


def _runs(columns: np.ndarray, visits: tuple[_Visit, ...], heading: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Plan a walk from the first of these columns (E, 1 + V), with `heading` (E,), to the others.

    Returns runs (E, R, 2) of an action and its number of repetitions, and the last heading (E,).
    """
    runs: list[tuple[np.ndarray | int, np.ndarray | int]] = []

    def turn(there: np.ndarray | int) -> np.ndarray:
        right = (there - heading) % 4
        runs.append((np.where(right == 3, LEFT, RIGHT), np.where(right == 3, 1, right)))
        return there + np.zeros_like(heading)

    for (faces, then, leaves), way in zip(visits, np.diff(columns).T, strict=True):
        heading = turn(np.where(way == 0, heading, np.where(way > 0, EAST, WEST)))
        runs.append((FORWARD, PITCH * np.abs(way)))
        if faces is not None:
            heading = turn(faces)
        runs.extend(then)
        if leaves is not None:
            heading = np.full_like(heading, leaves)
    columnwise = [np.broadcast_arrays(action, times, heading)[:2] for action, times in runs]
    return np.stack([np.stack(run, axis=-1) for run in columnwise], axis=1), heading


def _fill(runs: np.ndarray, length: int) -> np.ndarray:
    """Runs (E, R, 2) as actions int32 (E, length), with NOOP from where they end."""
    actions = np.pad(runs[..., 0], ((0, 0), (0, 1)), constant_values=NOOP).astype(np.int32)
    times = np.append(runs[..., 1], length - runs[..., 1].sum(axis=1, keepdims=True), axis=1)
    return np.repeat(actions.ravel(), times.ravel()).reshape(len(runs), length)
