from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from wmcli.envs import tiles
from wmcli.envs.distracting_memory import DistractingMemory
from wmcli.envs.memory_task import MemoryEnv, Task
from wmcli.envs.multi_doors_keys import MultiDoorsKeys
from wmcli.envs.tiles import AGENT, EMPTY, KEY, LOCKED, OPEN, PICTURES, SQUARE, WALL, Boards

TASKS = (DistractingMemory(20), MultiDoorsKeys(3))
on_every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)


def cost(one: int, other: int) -> float:
    """What a frame's squared error, in units of [0, 1], has of one tile shown for the other."""
    return float(np.square(PICTURES[one] / 255 - PICTURES[other] / 255).sum())


def play(task: Task, seeds: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compact states (E, N, S), rewards and ends (E, N) of these actions (E, N)."""
    episodes = task.begin(seeds)
    steps = [(episodes.compact_state(), *episodes.step(action)) for action in actions.T]
    compact_states, rewards, ends = (np.stack(parts, axis=1) for parts in zip(*steps, strict=True))
    return compact_states, rewards, ends


def test_empty_floor_has_a_line_on_top_and_left_that_supersampling_makes_a_third_as_bright() -> None:
    expected = np.zeros((8, 8), np.uint8)
    expected[0] = expected[:, 0] = 33
    expected[0, 0] = 55
    assert (PICTURES[EMPTY] == expected[:, :, None]).all()


def test_walls_and_squares_fill_their_tile() -> None:
    assert (PICTURES[WALL] == 100).all()
    colors = [(0, 255, 0), (0, 0, 255), (112, 39, 195), (255, 255, 0)]
    assert (PICTURES[SQUARE : SQUARE + 4] == np.array(colors)[:, None, None]).all()


def test_wrong_doors_cost_as_in_the_published_errors() -> None:
    _, blue, purple, yellow = range(4)
    pairs = list(itertools.combinations(range(4), 2))
    costs = {pair: cost(LOCKED + pair[0], LOCKED + pair[1]) for pair in pairs}
    assert min(costs, key=costs.__getitem__) == (blue, purple) and costs[blue, purple] == pytest.approx(5.2, abs=0.05)
    assert max(costs, key=costs.__getitem__) == (blue, yellow) and costs[blue, yellow] == pytest.approx(58, abs=0.5)
    opened = [cost(LOCKED + color, OPEN + color) for color in range(4)]
    assert min(opened) == pytest.approx(10, abs=0.5) and max(opened) == pytest.approx(28, abs=0.5)
    assert tiles.DOORS.tolist() == list(range(LOCKED, LOCKED + 8)) and len(PICTURES) == OPEN + 4


def test_the_triangle_points_east_south_west_and_north() -> None:
    inner = PICTURES[AGENT : AGENT + 4, 1:-1, 1:-1, 0].astype(int)  # inside of the lines
    for heading in range(1, 4):  # turned to the right as often, which is clockwise
        assert (np.rot90(inner[0], -heading) == inner[heading]).all()
    assert (inner[0, :, -1] > 0).tolist() == [False, False, True, True, False, False]  # the tip
    assert (inner[0, :, 0] > 0).all()  # the base
    assert inner[0].sum() / 255 / 64 == pytest.approx(0.62 * 0.75 / 2, rel=0.05)  # half of base and height, in tiles


def test_pictures_are_those_of_minigrid() -> None:
    world = pytest.importorskip("minigrid.core.world_object")
    from minigrid.core.grid import Grid

    def rendered(thing=None, heading: int | None = None) -> np.ndarray:
        return np.asarray(Grid.render_tile(thing, agent_dir=heading, tile_size=8)).astype(np.uint8)

    expected = [rendered(), rendered(world.Wall())] + [rendered(heading=heading) for heading in range(4)]
    expected += [rendered(world.Goal(color)) for color in tiles.COLORS]  # it fills its tile
    expected += [rendered(world.Key(color)) for color in tiles.COLORS]
    expected += [rendered(world.Door(color, is_locked=True)) for color in tiles.COLORS]
    expected += [rendered(world.Door(color, is_open=True)) for color in tiles.COLORS]
    assert (np.stack(expected) == PICTURES).all()


def test_a_frame_is_its_tiles_side_by_side() -> None:
    codes = np.random.default_rng(0).integers(tiles.CODES, size=(3, 2, 25)).astype(np.uint8)
    frames = tiles.draw(codes)
    assert frames.shape == (3, 2, 40, 40, 3) and frames.dtype == np.uint8
    for place in range(25):
        row, column = divmod(place, 5)
        piece = frames[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        assert (piece == PICTURES[codes[:, :, place]]).all()
    assert (tiles.draw(codes[1, 1]) == frames[1, 1]).all()


def test_a_view_shows_the_tiles_around_the_agent_and_wall_beyond_the_edge() -> None:
    random = np.random.default_rng(1)
    boards = random.integers(tiles.CODES, size=(200, 4, 6)).astype(np.uint8)
    row, column, heading = random.integers(1, 3, 200), random.integers(1, 5, 200), random.integers(4, size=200)
    view = Boards(boards, row, column, heading).view()
    for episode, place in itertools.product(range(200), range(25)):
        down, right = row[episode] + place // 5 - 2, column[episode] + place % 5 - 2
        inside = 0 <= down < 4 and 0 <= right < 6
        expected = boards[episode, down, right] if inside else WALL
        assert view[episode, place] == (AGENT + heading[episode] if place == 12 else expected)


@pytest.mark.parametrize("code", range(tiles.CODES))
def test_floor_squares_and_open_doors_can_be_walked_on_and_nothing_else(code: int) -> None:
    board = np.full((1, 3, 4), code, np.uint8)
    boards = Boards(board, 1, 1, tiles.EAST)
    boards.walk(np.array([tiles.FORWARD]), np.array([True]))
    walked = boards.agent == boards.cell(1, 2)
    assert walked[0] == (code == EMPTY or SQUARE <= code < KEY or code >= OPEN)


@on_every_task
def test_episodes_side_by_side_are_those_alone_and_a_seed_makes_one_episode(task: Task) -> None:
    seeds = np.array([3, 11, 3, 2**31 - 1, 0])
    scripts = task.begin(seeds).script()
    assert scripts.shape == (5, task.context + task.query) and scripts.dtype == np.int32
    for actions in (scripts, np.random.default_rng(0).integers(len(task.meanings), size=scripts.shape)):
        actions[2] = actions[0]
        together = play(task, seeds, actions)
        assert together[0].dtype == np.uint8 and together[1].dtype == np.float32 and together[2].dtype == bool
        for episode in range(len(seeds)):
            alone = play(task, seeds[episode : episode + 1], actions[episode : episode + 1])
            assert all((one[episode] == other[0]).all() for one, other in zip(together, alone, strict=True))
        assert (together[0][0] == together[0][2]).all() and (together[0][0] != together[0][1]).any()
    played = task.begin(seeds)
    played.step(actions[:, 0])
    assert (played.script() == scripts).all()


@on_every_task
def test_gymnasium_accepts_the_task_and_shows_its_frames(task: Task) -> None:
    env = MemoryEnv(task)
    check_env(env, skip_render_check=True)
    frames = [env.reset(seed=5)[0]]
    seeds = gymnasium.utils.seeding.np_random(5)[0].integers(2**31, size=1)
    actions = task.begin(seeds).script()
    results = [env.step(int(action)) for action in actions[0]]
    frames += [result[0] for result in results]
    compact_states, rewards, ends = play(task, seeds, actions)
    assert (np.stack(frames[:-1]) == task.draw(compact_states)[0]).all() and (frames[-1] == frames[-2]).all()
    assert [result[1] for result in results] == rewards[0].tolist()
    assert [result[2] for result in results] == ends[0].tolist() == [False] * (len(results) - 1) + [True]
    assert env.get_action_meanings() == list(task.meanings)


@on_every_task
def test_an_episode_is_cut_off_after_its_frames_and_stands_still_from_then_on(task: Task) -> None:
    frames = task.context + task.query
    turning = np.zeros((2, frames + 5), np.int64)
    compact_states, rewards, ends = play(task, np.arange(2), turning)
    assert (ends == (np.arange(frames + 5) >= frames - 1)).all() and not rewards.any()
    assert (compact_states[:, frames - 1] != compact_states[:, frames - 2]).any()
    assert (compact_states[:, frames:] == compact_states[:, frames - 1 : frames]).all()
