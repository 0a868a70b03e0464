"""Two, Four and Ten Rooms and their teleport versions: the 3D memory tasks of S4WM (arXiv 2307.02064).

Rooms in a ring are joined by narrow corridors and seen from within, as in Memory Maze (arXiv 2210.13383). The layout is
fixed. An episode has two colored spheres per room and a texture for each of a room's four walls. In the context the
script turns around in a random room, walks to a few points of it, and on to the next room, until it is back in the
first one. In the query it makes the same round again on other paths.

In a teleport version the script takes the action TELEPORT in the last frame of the context, C - 1. It restores the
state, motion included, of frame tau, uniform in 0 .. C - 1 - R. Then the script repeats its actions from there. So
frame C + j equals frame tau + j, for j = 0 .. R, and the query has R + 1 frames. Other policies may teleport at any
time: to frame tau, or to frame 0 before frame tau. Up to frame C - 1 a seed gives the same episode with and without
teleport.

Room sizes, lengths and the script are ours where the paper is silent. Motion is Memory Maze's (walking.py). Spheres
stop nobody.

Axes: E episodes, P rooms, T steps. Positions are cells, (x, y) with y to the south; headings are degrees from east to
the left.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from wmcli.envs.memory_task import EpisodeBatch, Task
from wmcli.envs.ray_caster import SPHERE_COLORS, WALL_COLORS, RayCaster
from wmcli.envs.top_view import draw_maze
from wmcli.envs.walking import (
    COARSE,
    LEFT,
    MEANINGS,
    MEASURED,
    NOOP,
    REACH,
    RIGHT,
    Gait,
    State,
    advance,
    bearing,
    between,
    distance,
    standing,
    steer,
)
from wmcli.errors import UsageError

TELEPORT = len(MEANINGS)
OBJECTS = 2  # spheres a room
CORRIDOR_TEXTURE = list(WALL_COLORS).index("yellow")
SLACK = 5  # steps that a way may take longer than its length and bends say
PLACES = 6  # that the script has ready to go to in each room, more than time allows


class Budget(NamedTuple):
    """How long the script stays with each room, the way to the next one included."""

    rooms: int
    context: int
    """Steps a room in the context."""
    query: int
    """Steps a room in the query."""
    recall: int
    """Steps replayed after a teleport, R."""


@dataclass(frozen=True)
class RoomsSize:
    """Sizes of a task, for the paper's comparison or for a CPU."""

    room: int = 5
    """Cells along a room's wall."""
    corridor: int = 3
    """Cells between two rooms."""
    pixels: int = 64
    """Height and width of a frame."""
    gait: Gait = MEASURED
    """How far a step goes."""
    budgets: tuple[Budget, ...] = (Budget(2, 150, 100, 150), Budget(4, 125, 125, 250), Budget(10, 110, 90, 550))


FULL = RoomsSize()
SMALL = RoomsSize(
    room=3,
    corridor=1,
    pixels=32,
    gait=COARSE,
    budgets=(Budget(2, 30, 22, 30), Budget(4, 30, 22, 60), Budget(10, 30, 22, 150)),
)
"""Rooms of 3 x 3 cells, half a cell or an eighth of a turn a step."""


class Layout(NamedTuple):
    """A ring of P rooms; the next room after the last is the first."""

    walls: np.ndarray
    """bool (rows, columns)."""
    slots: np.ndarray
    """int (rows, columns, 4): whose wall is seen from a cell on each side, room * 4 + side; P * 4 for corridors."""
    middles: np.ndarray
    """(P, 2): positions of the rooms' middles."""


class RoomsContent(NamedTuple):
    """The content of compact states (..., S), as arrays. Room p of a task is always the same one."""

    position: np.ndarray
    """float32 (..., 2): the agent's, cells."""
    heading: np.ndarray
    """float32 (...): the agent's, degrees in [0, 360]."""
    textures: np.ndarray
    """uint8 (..., P, 4): of each room's east, south, west and north wall, numbers of WALL_COLORS."""
    objects: np.ndarray
    """float32 (..., P, 2, 2): where each room's two spheres are, cells."""
    colors: np.ndarray
    """uint8 (..., P, 2): of the spheres, numbers of SPHERE_COLORS."""


@dataclass(frozen=True)
class Rooms(Task):
    """Rooms in a ring. Raises UsageError when `size` has no budget for that many rooms."""

    rooms: int = 2
    size: RoomsSize = FULL
    meanings: ClassVar[tuple[str, ...]] = MEANINGS

    def __post_init__(self) -> None:
        numbers = [budget.rooms for budget in self.size.budgets]
        if self.rooms not in numbers:
            raise UsageError(
                f"rooms = {self.rooms}: there is none but {', '.join(map(str, numbers))}; take one of these."
            )

    @property
    def about(self) -> str:
        return f"S4WM's {self.rooms} rooms: walls and spheres seen once and remembered on a second round"

    @property
    def budget(self) -> Budget:
        """How long the script stays."""
        return next(budget for budget in self.size.budgets if budget.rooms == self.rooms)

    @property
    def context(self) -> int:
        return self.rooms * self.budget.context + 1

    @property
    def query(self) -> int:
        return self.rooms * self.budget.query

    @property
    def side(self) -> int:
        return self.size.pixels

    @property
    def layout(self) -> Layout:
        """The maze of every episode. Not to be written to."""
        return _layout(self.rooms, self.size.room, self.size.corridor)

    def begin(self, seeds: np.ndarray) -> EpisodeBatch:
        return _RoomsWalk(self, seeds)

    def read(self, compact_states: np.ndarray) -> RoomsContent:
        """Decode compact states (..., S)."""
        lead = compact_states.shape[:-1]
        pose = np.ascontiguousarray(compact_states[..., :12]).view(np.float32)
        textures, objects = np.split(compact_states[..., 12:], [self.rooms * 4], axis=-1)
        objects = objects.reshape(*lead, self.rooms, OBJECTS, 3)
        return RoomsContent(
            position=pose[..., :2],
            heading=pose[..., 2],
            textures=textures.reshape(*lead, self.rooms, 4),
            objects=objects[..., :2] + np.float32(0.5),
            colors=objects[..., 2],
        )

    def draw(self, compact_states: np.ndarray) -> np.ndarray:
        content = self.read(compact_states.reshape(-1, compact_states.shape[-1]))
        count = len(content.heading)
        walls = np.full((count, self.rooms * 4 + 1), CORRIDOR_TEXTURE, np.uint8)
        walls[:, :-1] = content.textures.reshape(count, -1)
        frames = _ray_caster(self.rooms, self.size.room, self.size.corridor, self.side).draw(
            content.position,
            content.heading,
            walls,
            content.objects.reshape(count, -1, 2),
            content.colors.reshape(count, -1),
        )
        return frames.reshape(*compact_states.shape[:-1], *frames.shape[1:])

    def advance(self, state: State, action: np.ndarray) -> State:
        """The states after one step of the actions (E,), none of them TELEPORT."""
        return advance(self.size.gait, self.layout.walls, state, action)


@dataclass(frozen=True)
class TeleportRooms(Rooms):
    """Rooms whose query is a part of the context over again."""

    meanings: ClassVar[tuple[str, ...]] = (*Rooms.meanings, "TELEPORT")

    @property
    def about(self) -> str:
        return f"S4WM's {self.rooms} rooms with teleport: back to a frame seen before, and the same way again"

    @property
    def query(self) -> int:
        return self.budget.recall + 1


class _RoomsWalk(EpisodeBatch):
    """E episodes, in step with each other."""

    def __init__(self, task: Rooms, seeds: np.ndarray) -> None:
        self._task = task
        self._frame = 0
        self.cells = task.layout.walls.shape
        draws = [_RandomRooms.of(task, int(seed)) for seed in seeds]
        self._begin = np.array([draw.begin for draw in draws])
        self._return_to = np.array([draw.return_to for draw in draws])
        self._places = np.stack([draw.places for draw in draws])  # (E, 2 P, PLACES, 2)
        self._round = np.stack([draw.round for draw in draws])
        self._fidget = np.stack([draw.fidget for draw in draws])
        self._fixed = np.stack([draw.fixed for draw in draws])
        heading = np.array([draw.heading for draw in draws])
        self._start = standing(task.layout.middles[self._begin], heading)
        self._state = self._start
        self._remembered = self._start  # TELEPORT returns here

    def compact_state(self) -> np.ndarray:
        pose = np.concatenate([self._state.position, self._state.heading[:, None]], -1).astype(np.float32)
        return np.concatenate([pose.view(np.uint8), self._fixed], -1)

    def board(self) -> np.ndarray:
        content, walls = self._task.read(self.compact_state()), self._task.layout.walls
        count = len(content.heading)
        textures = np.full((count, self._task.rooms * 4 + 1), CORRIDOR_TEXTURE)
        textures[:, :-1] = content.textures.reshape(count, -1)
        every = np.broadcast_to(walls, (count, *walls.shape))
        objects, colors = content.objects.reshape(count, -1, 2), content.colors.reshape(count, -1)
        return draw_maze(every, self._task.layout.slots, textures, objects, colors)

    def position(self) -> np.ndarray:
        return self._state.position

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, task = len(action), self._task
        over = self._frame == task.context + task.query - 1
        if not over:
            self._remembered = _choose(self._return_to == self._frame, self._state, self._remembered)
            jumps = action == TELEPORT
            walked = task.advance(self._state, np.where(jumps, NOOP, action))
            self._state = _choose(jumps, self._remembered, walked)
            self._frame += 1
        return np.zeros(count, np.float32), np.full(count, over)

    def script(self) -> np.ndarray:
        task = self._task
        if not isinstance(task, TeleportRooms):
            return self._tour(2 * task.rooms)
        context = self._tour(task.rooms)[:, :-1]
        replay = np.take_along_axis(context, self._return_to[:, None] + np.arange(task.budget.recall), 1)
        jump, rest = np.full((len(context), 1), TELEPORT, np.int32), np.full((len(context), 1), NOOP, np.int32)
        return np.concatenate([context, jump, replay, rest], 1)

    def _tour(self, visits: int) -> np.ndarray:
        """Return the script's actions during a number of visits to rooms, and one NOOP, int32 (E, steps + 1).

        A visit starts in the middle of a room with one full turn. Then the script walks to random points while there is
        time for the next one and the way to the next room. In the next room's middle it looks left and right until the
        time of the visit is over.
        """
        task, layout, count = self._task, self._task.layout, len(self._begin)
        scan = math.ceil(360 / task.size.gait.turn)
        state = self._start
        actions: list[np.ndarray] = []
        for visit in range(visits):
            duration = task.budget.context if visit < task.rooms else task.budget.query
            here = layout.middles[(self._begin + visit) % task.rooms]
            there = layout.middles[(self._begin + visit + 1) % task.rooms]
            places = self._places[:, visit]
            for _ in range(scan):
                actions.append(self._round[:, visit])
                state = task.advance(state, actions[-1])
            target = here
            been = np.zeros((count, PLACES), bool)
            choosing, leaving, arrived = np.ones(count, bool), np.zeros(count, bool), np.zeros(count, bool)
            for left in range(duration - scan, 0, -1):
                if choosing.any():
                    fits = ~been & (_duration(task.size, state, places, here, there) <= left)
                    leaving |= choosing & ~fits.any(1)
                    chosen = (choosing & ~leaving)[:, None] & (np.arange(PLACES) == fits.argmax(1)[:, None])
                    been |= chosen
                    target = np.where(chosen.any(1)[:, None], (places * chosen[..., None]).sum(1), target)
                target = np.where(leaving[:, None], _ahead(task.size, state.position, here, there), target)
                actions.append(np.where(arrived, self._fidget[:, len(actions)], steer(task.size.gait, state, target)))
                state = task.advance(state, actions[-1])
                choosing = ~leaving & (distance(state.position, target) < REACH)
                arrived |= leaving & (distance(state.position, there) < REACH)
        actions.append(np.full(count, NOOP))
        return np.stack(actions, 1).astype(np.int32)


class _RandomRooms(NamedTuple):
    """All that is random in one episode, from its seed alone."""

    fixed: np.ndarray  # uint8 (10 P,): walls and spheres in a compact state
    begin: int  # the first room
    heading: float
    places: np.ndarray  # (2 P, PLACES, 2): where the script goes on each visit
    round: np.ndarray  # int (2 P,): LEFT or RIGHT, how it turns round on each visit
    fidget: np.ndarray  # int (C + Q of the version without teleport,): LEFT or RIGHT, where it has to wait
    return_to: int  # frame tau

    @staticmethod
    def of(task: Rooms, seed: int) -> _RandomRooms:
        generator = np.random.default_rng(seed)
        rooms, room, budget = task.rooms, task.size.room, task.budget
        textures = generator.integers(len(WALL_COLORS), size=(rooms, 4))
        shift = np.stack(np.divmod(np.arange(room**2), room)[::-1], -1) - room // 2  # cells from a room's middle
        around = np.flatnonzero(shift.any(-1))
        occupied = np.stack([_pair(generator, shift, around) for _ in range(rooms)])  # (P, 2)
        colors = np.stack([generator.choice(len(SPHERE_COLORS), OBJECTS, replace=False) for _ in range(rooms)])
        cells = np.floor(task.layout.middles)[:, None] + shift[occupied]
        objects = np.concatenate([cells, colors[..., None]], -1)
        begin = int(generator.integers(rooms))
        heading = 90.0 * generator.integers(4)
        turns = generator.integers(LEFT, RIGHT + 1, size=2 * rooms)
        visited = (begin + np.arange(2 * rooms)) % rooms
        free = [np.setdiff1d(around, occupied[number]) for number in visited]
        places = np.stack([shift[generator.choice(cells, PLACES, replace=False)] for cells in free])
        fidget = generator.integers(LEFT, RIGHT + 1, size=rooms * (budget.context + budget.query) + 1)
        return _RandomRooms(
            fixed=np.concatenate([textures.reshape(-1), objects.reshape(-1)]).astype(np.uint8),
            begin=begin,
            heading=heading,
            places=task.layout.middles[visited][:, None] + places,
            round=turns,
            fidget=fidget,
            return_to=int(generator.integers(task.context - budget.recall)),
        )


def _pair(generator: np.random.Generator, shift: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Two numbers of cells among those `around` a room's middle, the one not behind the other as seen from there."""
    one = generator.choice(around)
    east, south = shift[around].T
    behind = (east * shift[one, 1] == south * shift[one, 0]) & (shift[around] @ shift[one] > 0)
    return np.array([one, generator.choice(around[~behind])])


@functools.cache
def _layout(rooms: int, room: int, corridor: int) -> Layout:
    """Two rooms side by side, or two rows of rooms: the first one eastwards, the second one back."""
    across = 2 if rooms == 2 else rooms // 2
    pitch = room + corridor
    place = [(0, number) if number < across else (1, rooms - 1 - number) for number in range(rooms)]
    corner = np.array(place) * pitch + 1  # (P, 2): row and column of each room's first cell
    shape = corner.max(0) + room + 1
    walls = np.ones(shape, bool)
    slots = np.full((*shape, 4), rooms * 4)
    middles = corner + room // 2
    for here, there in zip(middles, np.roll(middles, -1, 0), strict=True):
        (top, left), (bottom, right) = np.minimum(here, there), np.maximum(here, there) + 1
        walls[top:bottom, left:right] = False
    for number, (row, column) in enumerate(corner):
        inner = (slice(row, row + room), slice(column, column + room))
        walls[inner] = False
        slots[inner] = number * 4 + np.arange(4)
    return Layout(walls, slots, middles[:, ::-1] + 0.5)


@functools.cache
def _ray_caster(rooms: int, room: int, corridor: int, pixels: int) -> RayCaster:
    layout = _layout(rooms, room, corridor)
    return RayCaster(layout.walls, layout.slots, pixels)


def _choose(first: np.ndarray, one: State, other: State) -> State:
    """Of each episode, the first state where `first` (E,), else the second."""
    return State(*(np.where(first.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(one, other, strict=True)))


def _ahead(size: RoomsSize, position: np.ndarray, here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the target points (E, 2) on the way to the next room's middle.

    First the cell before the corridor, then a point ahead on the line between the middles. It is nearer the farther the
    agent is off that line.
    """
    line = there - here
    length = np.abs(line).sum(-1, keepdims=True)
    line = line / length
    done = ((position - here) * line).sum(-1, keepdims=True)
    off = np.abs((position - here) * line[:, ::-1]).sum(-1, keepdims=True)
    return here + line * np.clip(np.maximum(done + 1 - off, size.room // 2), None, length)


def _duration(size: RoomsSize, state: State, places: np.ndarray, here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Steps that the way to each of `places` (E, n, 2) and on to the next room's middle will hardly exceed, (E, n)."""
    gait = size.gait
    line = (there - here) / np.abs(there - here).sum(-1, keepdims=True)
    door = (here + line * (size.room // 2))[:, None]
    ways = [places - state.position[:, None], door - places, (there - here)[:, None]]
    length = distance(places, state.position[:, None]) + distance(door, places) + distance(there[:, None], door)
    bearings = [state.heading[:, None], *(bearing(way) for way in ways)]
    bends = [np.abs(between(one, other)) for one, other in zip(bearings[:-1], bearings[1:], strict=True)]
    return length / gait.walk + sum(np.ceil((bend - gait.oblique).clip(0) / gait.turn) for bend in bends) + SLACK
