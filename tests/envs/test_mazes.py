"""Mazes: layout, labels against what is drawn and against world positions, the script's ways, seeds, gymnasium."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from wmcli.envs import mazes
from wmcli.envs.mazes import Maze
from wmcli.envs.memory_task import MemoryEnv, play
from wmcli.envs.ray_caster import EYE, RADIUS, SPHERE_COLORS, WALL_COLORS, RayCaster, axes, cast
from wmcli.envs.tasks import TASKS
from wmcli.envs.walking import BODY, FORWARD, LEFT, NOOP
from wmcli.errors import UsageError

NAMES = ("wm/Maze-9-v0", "wm/Maze-15-v0", "wm/MazeSmall-v0")
SMALL = TASKS["wm/MazeSmall-v0"]
SLOPE = np.tan(np.deg2rad(40))
on_every_maze = pytest.mark.parametrize("task", [TASKS[name] for name in NAMES], ids=NAMES)


def steps_by_hand(walls: np.ndarray, goal: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Steps from every cell (row, column) that the goal can be reached from, one cell after the other."""
    steps, queue = {goal: 0}, [goal]
    for row, column in queue:
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if not walls[cell] and cell not in steps:
                steps[cell] = steps[row, column] + 1
                queue.append(cell)
    return steps


def light(frames: np.ndarray) -> np.ndarray:
    frames = frames.astype(float)
    return frames / np.linalg.norm(frames, axis=-1, keepdims=True).clip(1)


def likeness(shown: np.ndarray, colors: dict[str, tuple[int, int, int]], number: np.ndarray) -> np.ndarray:
    """Cosine between pixels of length 1 and the colors of these numbers."""
    wanted = np.array(list(colors.values()), float)[number]
    return (shown * wanted).sum(-1) / np.linalg.norm(wanted, axis=-1)


# -- layout -----------------------------------------------------------------------------------------------------------


def test_lengths_and_sizes_are_those_of_memory_maze() -> None:
    for name, cells, objects in (("wm/Maze-9-v0", 9, 3), ("wm/Maze-15-v0", 15, 6)):
        task = TASKS[name]
        assert isinstance(task, Maze)
        assert (task.cells, task.objects, task.side, task.context, task.query) == (cells, objects, 64, 501, 500)
    assert (SMALL.context, SMALL.query, SMALL.side) == (60, 60, 32)
    with pytest.raises(UsageError, match="cells = 8"):
        Maze(cells=8)
    with pytest.raises(UsageError, match="objects = 7: .* 1 to 6 here"):
        Maze(cells=21, objects=7, rooms=9, largest=2)
    with pytest.raises(UsageError, match="objects = 2: .* 1 to 1 here"):
        Maze(cells=5, objects=2)


@on_every_maze
def test_every_free_cell_is_connected_and_none_is_a_dead_end(task: Maze) -> None:
    compact_states = task.begin(np.arange(60)).compact_state()
    walls = task.read(compact_states).walls
    sizes = []
    for maze in walls:
        assert maze[[0, -1]].all() and maze[:, [0, -1]].all()
        free = [tuple(cell) for cell in np.argwhere(~maze)]
        assert len(steps_by_hand(maze, free[0])) == len(free)
        for row, column in free:
            assert (~maze[[row + 1, row - 1, row, row], [column, column, column + 1, column - 1]]).sum() >= 2
        sizes.append(len(free))
        squares = sum(not maze[r : r + 3, c : c + 3].any() for r in range(len(maze)) for c in range(len(maze)))
        assert squares >= task.objects  # a room for each
    assert len({maze.tobytes() for maze in walls}) > 50 and min(sizes) >= 9 * task.objects


@on_every_maze
def test_random_objects_lie_on_free_cells(task: Maze) -> None:
    content = task.read(task.begin(np.arange(200)).compact_state())
    for places in (content.position[:, None], content.objects):
        column, row = np.moveaxis(np.floor(places).astype(int), -1, 0)
        assert not content.walls[np.arange(200)[:, None], row, column].any()
    assert all(len(np.unique(each, axis=0)) == task.objects for each in content.objects)
    share = np.bincount(content.textures.reshape(-1), minlength=len(WALL_COLORS)) / content.textures.size
    assert np.abs(share - 1 / 8).max() < 0.05 and content.textures.shape == (200, 9)


@on_every_maze
def test_contents_round_trip_through_compact_states(task: Maze) -> None:
    compact_states = play(task, np.arange(3)).compact_states[:, ::13]
    content = task.read(compact_states)
    assert (task.write(content) == compact_states).all() and (
        task.write(task.read(compact_states[0, 0])) == compact_states[0, 0]
    ).all()
    aside = content._replace(objects=content.objects + 0.4)
    assert (task.write(aside) == compact_states).all()


# -- labels -----------------------------------------------------------------------------------------------------------


@on_every_maze
def test_the_walls_that_are_drawn_are_those_of_the_labels(task: Maze) -> None:
    """On the horizon, a walk along the middle ray in small steps over the labels' map comes to a wall cell, and the
    picture has the color of that cell's block there."""
    compact_states = np.concatenate(play(task, np.arange(8)).compact_states)[:: 121 if task.side == 64 else 11]
    content, walls = task.read(compact_states), task.labels(compact_states).walls.reshape(-1, task.cells, task.cells)
    assert walls.dtype == bool
    size, half = task.cells + 2, task.side // 2
    forward, right = axes(content.heading)
    ray = forward + 0.5 / half * SLOPE * right  # of the column right of the middle
    every = np.arange(len(compact_states))
    place, inside = content.position.astype(float), np.ones(len(compact_states), bool)
    while inside.any():
        place += 4e-3 * ray * inside[:, None]
        column, row = np.floor(place).astype(int).T
        inside = (np.minimum(row, column) >= 1) & (np.maximum(row, column) < size - 1)
        inside[inside] = ~walls[every[inside], row[inside] - 1, column[inside] - 1]
    block = np.stack([row, column], -1) * 3 // size
    named = content.textures[every, block[:, 0] * 3 + block[:, 1]]
    shown = light(task.draw(compact_states))[:, half - 1, half]  # just above the horizon no sphere reaches
    assert (likeness(shown, WALL_COLORS, named) > 0.99).mean() > 0.97  # steps may jump over a corner
    assert len(set(named.tolist())) == 8


def test_frames_of_many_mazes_at_once_are_those_of_each_alone() -> None:
    task = SMALL
    compact_states = play(task, np.arange(40)).compact_states[:, ::17].reshape(-1, 32)
    content, together = task.read(compact_states), task.draw(compact_states)
    colors = np.arange(task.objects)[None]
    for number in range(0, len(compact_states), 11):
        part = slice(number, number + 1)
        size = task.cells + 2
        block = np.arange(size) * 3 // size
        slots = np.zeros((size, size, 4), int)
        for row in range(1, size - 1):
            for column in range(1, size - 1):
                beside = ((row, column + 1), (row + 1, column), (row, column - 1), (row - 1, column))
                slots[row, column] = [block[r] * 3 + block[c] for r, c in beside]
        caster = RayCaster(content.walls[number], slots, task.side)
        alone = caster.draw(
            content.position[part], content.heading[part], content.textures[part], content.objects[part], colors
        )
        assert (alone[0] == together[number]).all()


@on_every_maze
def test_objects_are_where_the_labels_say_from_the_pose_that_they_say(task: Maze) -> None:
    """The inverse transform: from pose and vectors to places in the world."""
    compact_states = play(task, np.arange(5)).compact_states
    labels, content = task.labels(compact_states), task.read(compact_states)
    assert labels.pose.shape == (*compact_states.shape[:2], 4) and labels.objects.shape[2:] == (task.objects, 2)
    place, (x, y) = labels.pose[..., :2], np.moveaxis(labels.pose[..., 2:], -1, 0)
    assert (np.abs(place) < 1).all() and np.allclose(np.hypot(x, y), 1)
    place = (place + 1) / 2 * task.cells + 1  # the outer wall is cell 0
    assert np.allclose(place, content.position, atol=1e-5)
    off = np.rad2deg(np.arctan2(-y, x)) - content.heading
    assert np.allclose((off + 180) % 360, 180, atol=1e-3)
    to_world = np.stack([np.stack([x, -y], -1), np.stack([y, x], -1)], -2)  # a quarter to the right of (x, y): (-y, x)
    world = place[..., None, :] + np.einsum("...ij,...kj->...ki", to_world, labels.objects)
    assert np.allclose(world, content.objects, atol=1e-4)


def test_turning_and_walking_move_the_objects_the_other_way() -> None:
    episodes = SMALL.begin(np.arange(30))
    before = SMALL.labels(episodes.compact_state())
    episodes.step(np.full(30, LEFT))
    turned = SMALL.labels(episodes.compact_state())
    angle = np.deg2rad(45)  # a turn to the left: what was ahead is to the right
    ahead, aside = np.moveaxis(before.objects, -1, 0)
    wanted = [ahead * np.cos(angle) - aside * np.sin(angle), ahead * np.sin(angle) + aside * np.cos(angle)]
    assert np.allclose(turned.objects, np.stack(wanted, -1), atol=1e-5)
    assert (turned.walls == before.walls).all() and np.allclose(turned.pose[:, :2], before.pose[:, :2])
    for _ in range(7):
        episodes.step(np.full(30, LEFT))
    episodes.step(np.full(30, FORWARD))
    walked = SMALL.labels(episodes.compact_state())
    gone = before.objects - walked.objects
    free = np.isclose(gone[:, 0, 0], 0.5, atol=1e-5)  # no wall before it
    assert free.sum() > 10 and np.allclose(gone[free], [0.5, 0], atol=1e-5)


def test_a_sphere_is_seen_where_the_labels_say() -> None:
    """An object in view, nothing before it: at its projection the picture has its color."""
    task = TASKS["wm/Maze-9-v0"]
    compact_states = np.concatenate(play(task, np.arange(12)).compact_states)[::9]
    content, (ahead, aside) = (
        task.read(compact_states),
        np.moveaxis(task.labels(compact_states).objects.astype(float), -1, 0),
    )
    sight = content.objects.astype(float) - content.position[:, None]
    frame, which = np.nonzero((ahead > EYE / SLOPE) & (ahead < 2.5) & (np.abs(aside) < 0.9 * SLOPE * ahead))
    others = np.linalg.norm(content.objects[frame, :, None] - content.objects[frame, None, :], axis=-1)
    alone = (others + 9 * np.eye(task.objects) > 4 * RADIUS).all((1, 2))
    open_to = cast(content.walls, content.position[frame].astype(float), sight[frame, which], frame).depth > 1
    frame, which = frame[alone & open_to], which[alone & open_to]
    column = np.floor(32 * (1 + aside[frame, which] / ahead[frame, which] / SLOPE)).astype(int)
    row = np.floor(32 * (1 + EYE / ahead[frame, which] / SLOPE)).astype(int)
    near = row < 63
    shown = light(task.draw(compact_states[frame[near]]))[np.arange(near.sum()), row[near] - 1, column[near]]
    clear = likeness(shown, SPHERE_COLORS, which[near]) > 0.995
    assert near.sum() > 60 and clear.mean() > 0.9  # now and then another one is before it


# -- the script -------------------------------------------------------------------------------------------------------


def test_ways_are_as_long_as_counted_by_hand() -> None:
    content = SMALL.read(SMALL.begin(np.arange(6)).compact_state())
    goals = np.floor(content.objects).astype(int)
    steps = mazes._steps_to(content.walls, goals)
    for number, maze in enumerate(content.walls):
        for which, (x, y) in enumerate(goals[number]):
            by_hand = steps_by_hand(maze, (y, x))
            assert {cell: steps[number, which][cell] for cell in by_hand} == by_hand
            assert (steps[number, which][maze] > max(by_hand.values())).all()


@on_every_maze
def test_the_script_walks_through_the_maze_and_into_no_wall(task: Maze) -> None:
    content = task.read(play(task, np.arange(16)).compact_states)
    for corner in np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)]) * BODY:
        column, row = np.moveaxis(np.floor(content.position + corner).astype(int), -1, 0)
        assert not content.walls[np.arange(16)[:, None], np.arange(content.walls.shape[1]), row, column].any()
    code = np.floor(content.position[..., 0]) * 99 + np.floor(content.position[..., 1])
    been = np.array([len(np.unique(row)) for row in code]) / (~content.walls[:, 0]).sum((1, 2))
    assert been.mean() > {9: 0.7, 15: 0.5, 7: 0.5}[task.cells]


def test_without_slips_the_script_reaches_its_goals_one_after_the_other(monkeypatch) -> None:
    monkeypatch.setattr(mazes, "NOISE", 0.0)
    task = TASKS["wm/Maze-9-v0"]
    position = task.read(play(task, np.arange(8)).compact_states).position
    for number in range(8):
        draw, frame = mazes._RandomMaze.of(task, number), 0
        assert (draw.slips == -1).all()
        for goal in draw.goals[:8]:
            close = np.hypot(*(position[number, frame:] - goal - 0.5).T) < 0.4
            column, row = np.floor(position[number, frame]).astype(int)
            length = steps_by_hand(draw.walls, (goal[1], goal[0]))[row, column]
            assert close.any() and close.argmax() <= 4 * length + 7 * (length + 1) + 12  # with a bend in every cell
            frame += int(close.argmax())


def test_a_tenth_of_the_actions_are_slips() -> None:
    slips = np.concatenate([mazes._RandomMaze.of(TASKS["wm/Maze-9-v0"], seed).slips for seed in range(10)])
    assert abs((slips >= 0).mean() - 0.1) < 0.015 and set(slips) == {-1, *range(6)}
    script = SMALL.begin(np.arange(10)).script()
    slips = np.stack([mazes._RandomMaze.of(SMALL, seed).slips for seed in range(10)])
    assert (script == slips)[:, :-1][slips[:, :-1] >= 0].all() and (script[:, -1] == NOOP).all()


# -- seeds and frames -------------------------------------------------------------------------------------------------


@on_every_maze
def test_an_episode_follows_from_its_seed_whichever_stand_beside_it(task: Maze) -> None:
    together = play(task, np.array([5, 3, 5, 2**31 - 1]))
    assert together.compact_states.dtype == np.uint8 and together.action.shape == (4, task.context + task.query)
    assert (together.compact_states[0] == together.compact_states[2]).all()
    assert (together.compact_states[0] != together.compact_states[1]).any()
    for number, seed in ((1, 3), (3, 2**31 - 1)):
        alone = play(task, np.array([seed]))
        assert (alone.action[0] == together.action[number]).all()
        assert (alone.compact_states[0] == together.compact_states[number]).all()
    assert together.over.sum() == 4 and together.over[:, -1].all() and not together.reward.any()


def test_frames_from_compact_states_are_the_environments() -> None:
    env = MemoryEnv(SMALL)
    seed = np.random.Generator(np.random.PCG64(np.random.SeedSequence(11))).integers(2**31, size=1)
    played = play(SMALL, seed)
    frames = [env.reset(seed=11)[0]]
    for number, action in enumerate(played.action[0]):
        frame, _, terminated, _, _ = env.step(int(action))
        assert terminated == (number == 119)
        frames.append(frame)
    assert (np.stack(frames[:-1]) == SMALL.draw(played.compact_states)[0]).all()
    check_env(env, skip_render_check=True)
