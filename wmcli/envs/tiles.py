"""Worlds of colored tiles: the pictures, the view of 5 x 5 tiles around an agent, and how an agent walks.

A tile is a code, one uint8. Pictures are those of MiniGrid (Chevalier-Boisvert et al. 2023, arXiv 2306.13831): shapes
on three points per pixel in either direction, whose mean is truncated to an integer. Squares fill their tile, as in
S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064), and the agent hides the tile below it.

The view is centered on the agent and never turned: north is up, and the triangle shows the agent's heading. Tiles
beyond the board are walls.

Axes: E boards, H rows and W columns of tiles. Headings are 0 east, 1 south, 2 west, 3 north.
"""

from __future__ import annotations

import numpy as np

from wmcli.envs.memory_task import Task

LEFT, RIGHT, FORWARD = range(3)  # the actions of `Boards.walk`
EAST, SOUTH, WEST, NORTH = range(4)
COLORS = {"green": (0, 255, 0), "blue": (0, 0, 255), "purple": (112, 39, 195), "yellow": (255, 255, 0)}
GREY = (100, 100, 100)
RED = (255, 0, 0)

# One code a tile; those that come in headings or colors are followed by the codes of the others.
EMPTY, WALL, AGENT = range(3)
SQUARE = AGENT + 4
KEY = SQUARE + len(COLORS)
LOCKED = KEY + len(COLORS)
OPEN = LOCKED + len(COLORS)
CODES = OPEN + len(COLORS)
DOORS = np.arange(LOCKED, CODES, dtype=np.uint8)
"""The codes of doors: locked in each color, then open in each color."""

VIEW = 5  # tiles in a row or column of a frame
PIXELS = 8  # in a row or column of a tile
SIDE = VIEW * PIXELS  # pixels in a row or column of a frame
_POINTS = 3  # in a row or column of a pixel
_EDGE = VIEW // 2 - 1  # rows of wall around a board: as far as the view of an agent in the outermost free cells reaches

_y, _x = (np.mgrid[: PIXELS * _POINTS, : PIXELS * _POINTS] + 0.5) / (PIXELS * _POINTS)  # points, in tiles


def _box(left: float, right: float, top: float, bottom: float) -> np.ndarray:
    return (_x >= left) & (_x <= right) & (_y >= top) & (_y <= bottom)


def _disc(x: float, y: float, radius: float) -> np.ndarray:
    return (_x - x) ** 2 + (_y - y) ** 2 <= radius**2


def _triangle(heading: int) -> np.ndarray:
    """Base at x = 0.12, 0.62 tall, and tip at x = 0.87; then turned right `heading` times."""
    east = (_x >= 0.12) & (np.abs(_y - 0.5) * (0.87 - 0.12) <= 0.31 * (0.87 - _x))
    return np.rot90(east, -heading)


def _picture(*layers: tuple[np.ndarray, tuple[int, ...]]) -> np.ndarray:
    """Shapes in their colors, later ones over earlier ones, on a black tile with a gray line on top and left."""
    lines = _box(0, 0.031, 0, 1) | _box(0, 1, 0, 0.031)
    points = np.zeros((*_x.shape, 3), np.uint8)
    for shape, color in ((lines, GREY), *layers):
        points[shape] = color
    sums = points.reshape(PIXELS, _POINTS, PIXELS, _POINTS, 3).sum(axis=(1, 3), dtype=np.int64)
    return (sums // _POINTS**2).astype(np.uint8)


def _key(color: tuple[int, ...]) -> np.ndarray:
    shaft, teeth = _box(0.50, 0.63, 0.31, 0.88), _box(0.38, 0.50, 0.59, 0.66) | _box(0.38, 0.50, 0.81, 0.88)
    ring, hole = _disc(0.56, 0.28, 0.19), _disc(0.56, 0.28, 0.064)
    return _picture((shaft | teeth | ring, color), (hole, (0, 0, 0)))


def _locked(color: tuple[int, ...]) -> np.ndarray:
    dim = tuple(int(0.45 * value) for value in color)
    slot = _box(0.52, 0.75, 0.50, 0.56)
    return _picture((_box(0, 1, 0, 1), color), (_box(0.06, 0.94, 0.06, 0.94), dim), (slot, color))


def _open(color: tuple[int, ...]) -> np.ndarray:
    return _picture((_box(0.88, 1, 0, 1), color), (_box(0.92, 0.96, 0.04, 0.96), (0, 0, 0)))


_PAINTS = tuple(COLORS.values())
PICTURES = np.stack(
    [_picture(), _picture((_box(0, 1, 0, 1), GREY))]
    + [_picture((_triangle(heading), RED)) for heading in range(4)]
    + [_picture((_box(0, 1, 0, 1), color)) for color in _PAINTS]
    + [draw_one(color) for draw_one in (_key, _locked, _open) for color in _PAINTS]
)
"""The picture of each code, uint8 (codes, 8, 8, 3)."""
_PIXEL_ROWS = PICTURES.reshape(CODES * PIXELS, PIXELS * 3)


def draw(codes: np.ndarray) -> np.ndarray:
    """Views of tiles (..., 25) uint8, row by row, to frames (..., 40, 40, 3) uint8."""
    tiles = codes.reshape(*codes.shape[:-1], VIEW, 1, VIEW).astype(np.intp)
    rows = tiles * PIXELS + np.arange(PIXELS)[:, None]  # (..., row of tiles, row of pixels in it, column of tiles)
    return _PIXEL_ROWS.take(rows, axis=0).reshape(*codes.shape[:-1], SIDE, SIDE, 3)


class TileTask(Task):
    """A memory task whose compact states are the 25 tiles that an agent sees."""

    @property
    def side(self) -> int:
        """40 pixels."""
        return SIDE

    def draw(self, compact_states: np.ndarray) -> np.ndarray:
        """Tile codes (..., 25) uint8, row by row, to frames (..., 40, 40, 3) uint8."""
        return draw(compact_states)


def _walkable() -> np.ndarray:
    """For each code: an agent may stand there."""
    free = np.zeros(CODES, bool)
    free[EMPTY] = free[SQUARE:KEY] = free[OPEN:CODES] = True
    return free


_WALKABLE = _walkable()


class Boards:
    """E boards with an agent on each. A cell is a position in `codes`, the tiles of all boards in one row.

    `codes`: uint8 (E * (H + 2) * (W + 2),), each board with the wall around it. `agent`: the agents' cells, (E,).
    `heading`: (E,). `cells`: H and W.
    """

    def __init__(
        self, boards: np.ndarray, row: np.ndarray | int, column: np.ndarray | int, heading: np.ndarray | int
    ) -> None:
        """Boards uint8 (E, H, W), agents at (row, column), each (E,) or one number for all."""
        episodes, self._height, self._width = boards.shape
        self.cells = (self._height, self._width)
        padding = ((0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE))
        self.codes = np.pad(boards, padding, constant_values=WALL).reshape(-1)
        self.agent = self.cell(row, column) + np.zeros(episodes, np.intp)
        self.heading = heading + np.zeros(episodes, np.intp)
        line = self._width + 2 * _EDGE
        self._steps = np.array([1, line, -1, -line])
        reach = np.arange(VIEW) - VIEW // 2
        self._around = (reach[:, None] * line + reach).reshape(-1)

    def cell(self, row: np.ndarray | int, column: np.ndarray | int) -> np.ndarray:
        """The cell at (row, column) of each board, (E,)."""
        height, width = self._height + 2 * _EDGE, self._width + 2 * _EDGE
        corners = np.arange(0, self.codes.size, height * width)
        return corners + (row + _EDGE) * width + column + _EDGE

    def draw(self) -> np.ndarray:
        """Draw whole boards without the wall around them and without agents, uint8 (E, 8 H, 8 W, 3)."""
        codes = self.codes.reshape(-1, self._height + 2 * _EDGE, self._width + 2 * _EDGE)
        pictures = PICTURES[codes[:, _EDGE:-_EDGE, _EDGE:-_EDGE]]  # (E, H, W, 8, 8, 3)
        return pictures.swapaxes(2, 3).reshape(len(codes), self._height * PIXELS, self._width * PIXELS, 3)

    def position(self) -> np.ndarray:
        """Return the middles of the agents' cells (E, 2), (x, y) from the north-west corner of their board."""
        height, width = self._height + 2 * _EDGE, self._width + 2 * _EDGE
        row, column = np.divmod(self.agent % (height * width), width)
        return np.stack([column, row], -1) - _EDGE + 0.5

    def ahead(self) -> np.ndarray:
        """The cell in front of each agent, (E,)."""
        return self.agent + self._steps[self.heading]

    def walk(self, action: np.ndarray, moving: np.ndarray) -> None:
        """LEFT and RIGHT turn, FORWARD goes one cell unless something stands there; other actions (E,) do nothing, nor
        do agents that are not `moving`, bool (E,)."""
        ahead = self.ahead()
        forward = moving & (action == FORWARD) & _WALKABLE[self.codes[ahead]]
        self.agent = np.where(forward, ahead, self.agent)
        turn = (action == RIGHT).astype(np.intp) - (action == LEFT)
        self.heading = np.where(moving, (self.heading + turn) % 4, self.heading)

    def view(self) -> np.ndarray:
        """Return the view of each agent, codes (E, 25), row by row."""
        codes = self.codes.take(self.agent[:, None] + self._around)
        codes[:, VIEW * VIEW // 2] = AGENT + self.heading
        return codes
