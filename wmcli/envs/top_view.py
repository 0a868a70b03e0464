"""Memory tasks from above: the board of an episode, and the walk of its script.

Axes: E episodes, T frames, O spheres, P pixels along a cell. Positions are cells, (x, y) with y to the south, from the
north-west corner of the board.

Source: figure 2 of S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wmcli.envs.memory_task import Task
from wmcli.envs.ray_caster import FLOOR_COLOR, RADIUS, SIDES, SPHERE_COLORS, WALL_COLORS

PIXELS = 16  # P of a maze
FACE = 5  # pixels of a wall in the color of its texture, along the side from which it is seen
WALL = (40, 40, 46)


class TopView(NamedTuple):
    """An episode from above."""

    board: np.ndarray
    """uint8 (rows P, columns P, 3): the board before the first action, without the agent."""
    cells: tuple[int, int]
    """Rows and columns."""
    position: np.ndarray
    """float (T, 2): where the agent is in each frame."""
    context: int
    """Leading frames that belong to the context."""
    jumps: np.ndarray
    """bool (T,): a teleport led to the frame."""


def top_view(task: Task, seed: int) -> TopView:
    """Play an episode by the task's script, and return it from above."""
    episodes = task.begin(np.array([seed], np.int64))
    board, script, position = episodes.board()[0], episodes.script(), []
    for action in script.T:
        position.append(episodes.position()[0])
        episodes.step(action)
    jumps = np.zeros(len(position), bool)
    if "TELEPORT" in task.meanings:
        jumps[1:] = script[0, :-1] == task.meanings.index("TELEPORT")
    return TopView(board, episodes.cells, np.stack(position), task.context, jumps)


def draw_maze(
    walls: np.ndarray, slots: np.ndarray, textures: np.ndarray, spheres: np.ndarray, colors: np.ndarray
) -> np.ndarray:
    """Draw mazes from above: floor, walls with their textures' colors where they are seen from, and spheres.

    Args:
        walls: bool (E, rows, columns).
        slots: int (rows, columns, 4): the texture seen from a cell to the east, south, west and north.
        textures: int (E, slots), numbers of WALL_COLORS.
        spheres: Centers (E, O, 2).
        colors: int (E, O), numbers of SPHERE_COLORS.

    Returns:
        uint8 (E, rows P, columns P, 3).
    """
    paints, sphere_paints = (np.array([*table.values()], np.uint8) for table in (WALL_COLORS, SPHERE_COLORS))
    rows, columns = walls.shape[1:]
    pictures = np.empty((len(walls), rows * PIXELS, columns * PIXELS, 3), np.uint8)
    y, x = (np.mgrid[: rows * PIXELS, : columns * PIXELS] + 0.5) / PIXELS
    for picture, wall, texture, centers, numbers in zip(pictures, walls, textures, spheres, colors, strict=True):
        picture[:] = np.where(wall.repeat(PIXELS, 0).repeat(PIXELS, 1)[..., None], WALL, FLOOR_COLOR)
        for row, column in np.argwhere(~wall):
            for side, (east, south) in enumerate(SIDES):
                beside = row + south, column + east
                if wall[beside]:
                    face = [slice(place * PIXELS, (place + 1) * PIXELS) for place in beside]
                    axis, onwards = (0, south) if south else (1, east)
                    begin = beside[axis] * PIXELS if onwards > 0 else (beside[axis] + 1) * PIXELS - FACE
                    face[axis] = slice(begin, begin + FACE)
                    picture[tuple(face)] = paints[texture[slots[row, column, side]]]
        for (middle_x, middle_y), number in zip(centers, numbers, strict=True):
            picture[(x - middle_x) ** 2 + (y - middle_y) ** 2 <= RADIUS**2] = sphere_paints[number]
    return pictures
