"""The grid world: its rules on every board, chance, sizes at which frames are exact."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from wmcli.envs import EnvironmentSettings, Streams, list_environments, make, protocol
from wmcli.envs.grid_world import AGENT, COLORS, FLOOR, GOAL, GRID_WORLD_GOAL_ID, GRID_WORLD_ID, WALL, GridWorld, cells

PAIRS = [(agent, goal) for agent in range(9) for goal in range(9) if agent != goal]
STEPS = {0: (0, 0), 1: (-1, 0), 2: (0, 1), 3: (1, 0), 4: (0, -1)}  # stay, north, east, south, west: (row, column)
EXACT = [10, 20, *range(40, 205, 5)]


def where(frame: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    """(row, column) of agent and goal, 1..3 each, off the picture; everything else must be as it should."""
    board = cells(frame).reshape(5, 5)
    border = np.ones((5, 5), bool)
    border[1:-1, 1:-1] = False
    assert (board[border] == WALL).all() and (board[~border] == FLOOR).sum() == 7
    (agent,), (goal,) = np.argwhere(board == AGENT).tolist(), np.argwhere(board == GOAL).tolist()
    return tuple(agent), tuple(goal)


def put(env: GridWorld, agent: int, goal: int) -> None:
    env._agent, env._goal = agent, goal


@pytest.mark.parametrize("respawn", ["both", "goal"])
@pytest.mark.parametrize("action", STEPS)
def test_every_step_from_every_board(respawn, action) -> None:
    env = GridWorld(respawn)
    env.reset(seed=0)
    hits = 0
    for agent, goal in PAIRS:
        put(env, agent, goal)
        row, column = agent // 3 + 1 + STEPS[action][0], agent % 3 + 1 + STEPS[action][1]
        if row in (0, 4) or column in (0, 4):
            row, column = agent // 3 + 1, agent % 3 + 1  # against the wall
        target = (goal // 3 + 1, goal % 3 + 1)
        frame, reward, terminated, truncated, _ = env.step(action)
        assert reward == ((row, column) == target) and not terminated and not truncated
        now, new_goal = where(frame)
        hits += int(reward)
        if not reward:
            assert (now, new_goal) == ((row, column), target)
        elif respawn == "goal":
            assert now == target != new_goal
    assert hits == (0 if action == 0 else 6)  # of 9 cells, 6 have a free neighbor there


@pytest.mark.parametrize("respawn", ["both", "goal"])
def test_after_a_hit_and_a_reset_all_boards_are_equally_likely(respawn) -> None:
    env, rounds = GridWorld(respawn), 7200
    counts = {"reset": np.zeros((9, 9)), "hit": np.zeros((9, 9))}
    env.reset(seed=3)
    for _ in range(rounds):
        env.reset()
        counts["reset"][env._agent, env._goal] += 1
        put(env, 3, 4)
        assert env.step(2)[1] == 1.0
        counts["hit"][env._agent, env._goal] += 1
    possible = {"reset": np.ones((9, 9)), "hit": np.ones((9, 9))}
    if respawn == "goal":
        possible["hit"] = np.zeros((9, 9))
        possible["hit"][4] = 1
    for kind, seen in counts.items():
        np.fill_diagonal(possible[kind], 0)
        share = possible[kind] / possible[kind].sum()
        assert (seen[share == 0] == 0).all()
        assert (np.abs(seen - rounds * share) <= 4.5 * np.sqrt(rounds * share)).all()


def test_episodes_depend_on_seed_and_actions_alone() -> None:
    def play(env: gymnasium.Env, seed: int) -> list[bytes]:
        frames = [env.reset(seed=seed)[0]]
        for action in np.random.default_rng(1).integers(5, size=300):
            frames.append(env.step(int(action))[0])
        return [frame.tobytes() for frame in frames]

    env = GridWorld()
    first = play(env, 7)
    assert play(env, 7) == first == play(GridWorld(), 7)
    assert play(env, 8) != first
    streams = Streams(EnvironmentSettings(id=GRID_WORLD_ID, size=10, count=3), train=True, seed=5)
    for action in np.random.default_rng(0).integers(5, size=(200, 3)):
        after = streams.step(action)
        assert not after.terminated.any() and not streams.first.any()
    again = Streams.restore(EnvironmentSettings(id=GRID_WORLD_ID, size=10, count=3), True, streams.state())
    assert (again.observation == streams.observation).all()


@pytest.mark.parametrize("size", EXACT)
def test_frames_are_exact_at_the_sizes_named(size: int) -> None:
    env = make(EnvironmentSettings(id=GRID_WORLD_ID, size=size), train=True)
    native = GridWorld()
    for seed in range(5):
        frame, want = env.reset(seed=seed)[0], native.reset(seed=seed)[0]
        board = cells(want)
        assert (cells(frame) == board).all()
        pixels = np.array(COLORS, np.uint8)[board].reshape(5, 5, 3)
        assert (frame == pixels.repeat(size // 5, 0).repeat(size // 5, 1)).all()


@pytest.mark.parametrize("size", [15, 25, 30, 35])
def test_they_are_not_at_others(size: int) -> None:
    frame, _ = make(EnvironmentSettings(id=GRID_WORLD_ID, size=size), train=True).reset(seed=0)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > len(COLORS)


def test_cells_read_any_leading_axes_and_tolerate_a_tint() -> None:
    env = GridWorld()
    frames = np.stack([env.reset(seed=seed)[0] for seed in range(6)]).reshape(2, 3, 40, 40, 3)
    found = cells(frames)
    assert found.shape == (2, 3, 25) and found.dtype == np.int64
    noise = np.random.default_rng(0).integers(-30, 31, frames.shape)
    assert (cells((frames + noise).clip(0, 255).astype(np.uint8)) == found).all()


def test_two_ids_fix_the_rules_and_are_recorded() -> None:
    listed = {row["id"]: row for row in list_environments()}
    for identifier, respawn in ((GRID_WORLD_ID, "both"), (GRID_WORLD_GOAL_ID, "goal")):
        assert gymnasium.make(identifier).unwrapped._respawn == respawn
        block = protocol(EnvironmentSettings(id=identifier, size=10))
        assert block["id"] == identifier and block["actions"] == 5 and block["resize"] == "box"
        assert block["action_meanings"] == ["STAY", "NORTH", "EAST", "SOUTH", "WEST"]
        assert listed[identifier]["protocols"] == ["plain"]
