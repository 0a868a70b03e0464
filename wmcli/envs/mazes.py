"""Mazes with a new layout in every episode, for probes of walls and object positions as in Memory Maze.

A maze is cells x cells, surrounded by walls; cells at even rows and columns are its *nodes*. Rectangular rooms are
placed with walls of one cell between them, at least as many as there are objects. A random spanning tree joins all
nodes, a few more walls between nodes are opened, and dead ends are filled until none is left. The result is rooms and
corridors with loops. Each of 3 x 3 blocks of the maze has a wall texture. Spheres, one of each color, lie on different
free cells and stop nobody.

The script walks to the middles of random free cells along shortest paths; some actions are replaced by random ones. The
script of Memory Maze is not public; this one and the layout are ours. Motion, camera and colors are shared with
rooms.py.

Source: Memory Maze (Pasukonis, Lillicrap and Hafner 2022, arXiv 2210.13383).

E episodes, T frames, K objects. Positions are cells, (x, y) with y to the south, from the corner of the outer wall, so
that the maze is (1, cells + 1) wide; headings degrees from east to the left.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from wmcli.envs.memory_task import EpisodeBatch, Task
from wmcli.envs.ray_caster import SPHERE_COLORS, WALL_COLORS, RayCaster, axes
from wmcli.envs.top_view import draw_maze
from wmcli.envs.walking import (
    MEANINGS,
    MEASURED,
    NOOP,
    REACH,
    Gait,
    advance,
    distance,
    standing,
    steer,
)
from wmcli.errors import UsageError

BLOCKS = 3  # along a maze, each with a wall texture
ATTEMPTS = 50  # at places for rooms
NOISE = 0.1  # share of the script's actions that are random
GOALS = 32  # free cells that the script has ready to go to, more than time allows, or else again from the first
AROUND = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])  # rows and columns to the neighbors of a cell
POSE = 12  # bytes of the pose in a compact state


class MazeContent(NamedTuple):
    """The content of compact states (..., S), as arrays."""

    position: np.ndarray
    """float32 (..., 2): the agent's, cells."""
    heading: np.ndarray
    """float32 (...): the agent's, degrees in [0, 360]."""
    walls: np.ndarray
    """bool (..., cells + 2, cells + 2), the outer walls included."""
    textures: np.ndarray
    """uint8 (..., 9): of each block, row by row, numbers of WALL_COLORS."""
    objects: np.ndarray
    """float32 (..., K, 2): where each sphere is, cells. Sphere k has color k of SPHERE_COLORS."""


class Labels(NamedTuple):
    """Labels of a frame for probes of its representation."""

    walls: np.ndarray
    """bool (..., cells * cells), row by row, without the outer walls: whether a cell is one."""
    pose: np.ndarray
    """float32 (..., 4): position (x, y) in half widths of the maze from its middle, in [-1, 1], and direction of view
    (x, y) of length 1."""
    objects: np.ndarray
    """float32 (..., K, 2): the way from the agent to each object, in cells ahead and to the right of its heading."""


@dataclass(frozen=True)
class Maze(Task):
    """A random maze with objects in it. Raises UsageError for an even size, or more objects than there are colors or
    places for rooms."""

    cells: int = 9
    """Along a side, odd."""
    objects: int = 3
    rooms: int = 6
    """At most so many."""
    smallest: int = 2
    largest: int = 3
    """Nodes along a room's side; n nodes are 2 n - 1 cells."""
    loops: float = 0.05
    """Share of the walls between two nodes that are opened although there is another way."""
    context: int = 501
    query: int = 500
    side: int = 64
    gait: Gait = MEASURED
    meanings: ClassVar[tuple[str, ...]] = MEANINGS

    def __post_init__(self) -> None:
        if self.cells % 2 == 0 or self.cells < 2 * self.largest - 1:
            raise UsageError(f"cells = {self.cells}: take an odd number, {2 * self.largest - 1} or more.")
        fit = ((self.cells + 1) // 2 // self.smallest) ** 2
        most = min(len(SPHERE_COLORS), self.rooms, fit)
        if not 1 <= self.objects <= most:
            raise UsageError(
                f"objects = {self.objects}: one of each color, as many rooms as objects: 1 to {most} here."
            )

    @property
    def about(self) -> str:
        return f"a new maze each time, {self.cells} x {self.cells} cells with {self.objects} objects: known to probes"

    def begin(self, seeds: np.ndarray) -> EpisodeBatch:
        return _MazeWalk(self, seeds)

    def read(self, compact_states: np.ndarray) -> MazeContent:
        """Decode compact states (..., S)."""
        lead, area = compact_states.shape[:-1], self.cells**2
        pose = np.ascontiguousarray(compact_states[..., :POSE]).view(np.float32)
        ends = np.cumsum([POSE, (area + 7) // 8, BLOCKS**2])
        inner, textures, objects = np.split(compact_states, ends, axis=-1)[1:]
        walls = np.ones((*lead, self.cells + 2, self.cells + 2), bool)
        walls[..., 1:-1, 1:-1] = np.unpackbits(inner, axis=-1, count=area).reshape(*lead, self.cells, self.cells)
        return MazeContent(
            position=pose[..., :2],
            heading=pose[..., 2],
            walls=walls,
            textures=textures,
            objects=objects.reshape(*lead, self.objects, 2) + np.float32(0.5),
        )

    def write(self, content: MazeContent) -> np.ndarray:
        """Return the compact states (..., S) of a content. Objects move to the middles of their cells."""
        lead = content.heading.shape
        pose = np.concatenate([content.position, content.heading[..., None]], -1).astype(np.float32)
        inner = np.packbits(content.walls[..., 1:-1, 1:-1].reshape(*lead, -1), axis=-1)
        cells = np.floor(content.objects).reshape(*lead, -1)
        parts = pose.view(np.uint8), inner, content.textures, cells
        return np.concatenate([part.astype(np.uint8) for part in parts], -1)

    def draw(self, compact_states: np.ndarray) -> np.ndarray:
        content = self.read(compact_states.reshape(-1, compact_states.shape[-1]))
        colors = np.broadcast_to(np.arange(self.objects), (len(content.heading), self.objects))
        caster = RayCaster(content.walls, _slots(self.cells), self.side)
        frames = caster.draw(content.position, content.heading, content.textures, content.objects, colors)
        return frames.reshape(*compact_states.shape[:-1], *frames.shape[1:])

    def labels(self, compact_states: np.ndarray) -> Labels:
        """Return the labels of the frames of compact states (..., S)."""
        content = self.read(compact_states)
        half = self.cells / 2
        forward, right = axes(content.heading)
        way = content.objects - content.position[..., None, :]
        ahead, aside = ((way * axis[..., None, :]).sum(-1) for axis in (forward, right))
        return Labels(
            walls=content.walls[..., 1:-1, 1:-1].reshape(*compact_states.shape[:-1], -1),
            pose=np.concatenate([(content.position - 1 - half) / half, forward], -1).astype(np.float32),
            objects=np.stack([ahead, aside], -1).astype(np.float32),
        )


class _MazeWalk(EpisodeBatch):
    """E episodes, in step with each other."""

    def __init__(self, task: Maze, seeds: np.ndarray) -> None:
        self._task = task
        self._frame = 0
        self.cells = (task.cells + 2, task.cells + 2)
        draws = [_RandomMaze.of(task, int(seed)) for seed in seeds]
        self._walls = np.stack([draw.walls for draw in draws])
        self._textures = np.stack([draw.textures for draw in draws])
        self._objects = np.stack([draw.objects for draw in draws])  # (E, K, 2)
        self._goals = np.stack([draw.goals for draw in draws])  # (E, GOALS, 2)
        self._slips = np.stack([draw.slips for draw in draws])  # (E, T)
        heading = np.array([draw.heading for draw in draws])
        self._start = standing(np.stack([draw.begin for draw in draws]) + 0.5, heading)
        self._state = self._start

    def compact_state(self) -> np.ndarray:
        state = self._state
        return self._task.write(MazeContent(state.position, state.heading, self._walls, self._textures, self._objects))

    def board(self) -> np.ndarray:
        content = self._task.read(self.compact_state())
        colors = np.broadcast_to(np.arange(self._task.objects), content.objects.shape[:2])
        return draw_maze(content.walls, _slots(self._task.cells), content.textures, content.objects, colors)

    def position(self) -> np.ndarray:
        return self._state.position

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, task = len(action), self._task
        over = self._frame == task.context + task.query - 1
        if not over:
            self._state = advance(task.gait, self._walls, self._state, action)
            self._frame += 1
        return np.zeros(count, np.float32), np.full(count, over)

    def script(self) -> np.ndarray:
        task, every = self._task, np.arange(len(self._goals))
        steps = _steps_to(self._walls, self._goals)
        state, actions, goal = self._start, [], np.zeros(len(every), np.int64)
        for slip in self._slips.T[:-1]:
            here = np.floor(state.position).astype(np.int64)
            beside = here[:, None] + AROUND[:, ::-1]  # (E, 4, 2)
            left = steps[every[:, None], goal[:, None], beside[..., 1], beside[..., 0]]
            target = self._goals[every, goal]
            arrived = (here == target).all(-1)
            onwards = np.where(arrived[:, None], target, beside[every, left.argmin(1)])
            actions.append(np.where(slip < 0, steer(task.gait, state, onwards + 0.5), slip))
            state = advance(task.gait, self._walls, state, actions[-1])
            goal = (goal + (distance(state.position, target + 0.5) < REACH)) % GOALS
        actions.append(np.full(len(every), NOOP))
        return np.stack(actions, 1).astype(np.int32)


class _RandomMaze(NamedTuple):
    """All that is random in one episode, from its seed alone. Cells are (x, y)."""

    walls: np.ndarray  # bool (cells + 2, cells + 2)
    textures: np.ndarray  # int (9,): of each block
    objects: np.ndarray  # int (K, 2): cells
    begin: np.ndarray  # int (2,): the first cell
    heading: float
    goals: np.ndarray  # int (GOALS, 2): cells
    slips: np.ndarray  # int (T,): the action in the place of the script's, -1 where it has its way

    @staticmethod
    def of(task: Maze, seed: int) -> _RandomMaze:
        generator = np.random.default_rng(seed)
        walls = np.ones((task.cells + 2, task.cells + 2), bool)
        walls[1:-1, 1:-1] = ~_passages(task, generator)
        textures = generator.integers(len(WALL_COLORS), size=BLOCKS**2)
        free = np.argwhere(~walls)[:, ::-1]
        objects = generator.choice(free, task.objects, replace=False)
        begin, *goals = generator.choice(free, 1 + GOALS)
        time = task.context + task.query
        noisy = generator.random(time) < NOISE
        return _RandomMaze(
            walls=walls,
            textures=textures,
            objects=objects,
            begin=begin,
            heading=90.0 * generator.integers(4),
            goals=np.stack(goals),
            slips=np.where(noisy, generator.integers(len(task.meanings), size=time), -1),
        )


def _passages(task: Maze, generator: np.random.Generator) -> np.ndarray:
    """Which cells of a new maze are free, bool (cells, cells)."""
    nodes = (task.cells + 1) // 2
    number = np.arange(nodes**2).reshape(nodes, nodes)
    rooms: list[tuple[slice, slice]] = []
    while len(rooms) < task.objects:
        rooms = _rooms(task, generator, nodes)
    free = np.zeros((task.cells, task.cells), bool)
    free[::2, ::2] = True
    joined = number.copy()
    for room in rooms:
        joined[room] = joined[room].min()
        free[tuple(slice(2 * part.start, 2 * part.stop - 1) for part in room)] = True
    root = joined.reshape(-1)  # of each node; nodes of one root are joined
    edges = generator.permutation(_edges(nodes))
    for (one, other), chance in zip(edges, generator.random(len(edges)), strict=True):
        if root[one] != root[other] or chance < task.loops:
            free[one // nodes + other // nodes, one % nodes + other % nodes] = True  # a node is at twice its place
            root[root == root[other]] = root[one]
    while (ends := free & (_neighbors(free) < 2)).any():
        free &= ~ends
    return free


def _rooms(task: Maze, generator: np.random.Generator, nodes: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the nodes of rooms that have none in common."""
    extent = generator.integers(task.smallest, task.largest, endpoint=True, size=(ATTEMPTS, 2))
    corner = generator.integers(nodes - extent, endpoint=True)
    occupied = np.zeros((nodes, nodes), bool)
    rooms: list[tuple[slice, slice]] = []
    for (top, left), (bottom, right) in zip(corner.tolist(), (corner + extent).tolist(), strict=True):
        room = slice(top, bottom), slice(left, right)
        if len(rooms) < task.rooms and not occupied[room].any():
            occupied[room] = True
            rooms.append(room)
    return rooms


@functools.cache
def _edges(nodes: int) -> np.ndarray:
    """All pairs of neighboring nodes, int (edges, 2), numbered row by row."""
    number = np.arange(nodes**2).reshape(nodes, nodes)
    beside = np.stack([number[:, :-1], number[:, 1:]], -1).reshape(-1, 2)
    below = np.stack([number[:-1], number[1:]], -1).reshape(-1, 2)
    return np.concatenate([beside, below])


def _neighbors(free: np.ndarray) -> np.ndarray:
    """How many of the four cells around each (rows, columns) are free."""
    padded = np.pad(free, 1).astype(np.int64)
    return padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]


def _steps_to(walls: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Return the number of steps from each cell to goals (E, G, 2), int16 (E, G, rows, columns).

    In mazes `walls` (E, rows, columns). Walls have a number above any path length.
    """
    free = ~walls[:, None]
    reached = np.zeros((*goals.shape[:2], *walls.shape[1:]), bool)
    episode, which = np.indices(goals.shape[:2])
    reached[episode, which, goals[..., 1], goals[..., 0]] = True
    steps = np.where(reached, 0, np.iinfo(np.int16).max).astype(np.int16)
    wave, number = reached, 0
    while wave.any():
        number += 1
        ahead = np.zeros_like(wave)  # the outer walls keep it from the borders
        ahead[..., 1:, :] |= wave[..., :-1, :]
        ahead[..., :-1, :] |= wave[..., 1:, :]
        ahead[..., 1:] |= wave[..., :-1]
        ahead[..., :-1] |= wave[..., 1:]
        wave = ahead & free & ~reached
        reached |= wave
        np.copyto(steps, np.int16(number), where=wave)
    return steps


@functools.cache
def _slots(cells: int) -> np.ndarray:
    """The block of the wall that is seen from each cell on each side, int (cells + 2, cells + 2, 4)."""
    size = cells + 2
    block = np.arange(size) * BLOCKS // size
    blocks = block[:, None] * BLOCKS + block
    return np.stack([np.roll(blocks, (-row, -column), (0, 1)) for row, column in AROUND], -1)
