"""Errors of generated grid worlds on boards made by hand, and the floors against published numbers and simulation."""

from __future__ import annotations

import numpy as np
import pytest

from wmcli.envs import grid_world as world
from wmcli.metrics import grid_world as metrics

GOOD = """
#####
#..A#
#...#
#G..#
#####
"""


def board(text: str) -> np.ndarray:
    """Cells (25,) from a picture; `?` is a token that is no cell."""
    return np.array([".#AG?".index(mark) for mark in "".join(text.split())])


def changed(**marks: str) -> np.ndarray:
    """GOOD with other marks: c7="A" puts an agent into cell 7."""
    cells = list("".join(GOOD.split()))
    for cell, mark in marks.items():
        cells[int(cell[1:])] = mark
    return board("".join(cells))


def played(respawn: str, steps: int = 3000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cells (steps + 1, 25), random actions (steps,) and rewards (steps,) of the environment."""
    env = world.GridWorld(respawn)
    frames, rewards = [env.reset(seed=1)[0]], []
    action = np.random.default_rng(0).integers(5, size=steps)
    for each in action.tolist():
        frame, reward, *_ = env.step(each)
        frames.append(frame)
        rewards.append(reward)
    return world.cells(np.stack(frames)), action, np.array(rewards)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_detects_a_board() -> None:
    good = [board(GOOD), changed(c8=".", c12="A"), changed(c16="A", c8="G")]
    bad = [
        changed(c0="."),  # a hole in the wall
        changed(c24="A", c8="."),  # the agent in the wall
        changed(c12="A"),  # two agents
        changed(c8="."),  # none
        changed(c12="G"),  # two goals
        changed(c16="."),  # none
        changed(c12="#"),  # a wall inside
        changed(c12="?"),
        changed(c4="?"),
    ]
    assert metrics.geometric_errors(np.stack(good)).tolist() == [False] * 3
    assert metrics.geometric_errors(np.stack(bad)).tolist() == [True] * len(bad)
    assert metrics.geometric_errors(np.stack(bad).reshape(3, 3, 25)).shape == (3, 3)


def test_where_the_agent_must_be() -> None:
    frame = board(GOOD)  # the agent in cell 8, a corner
    assert metrics.moved(np.stack([frame] * 5), np.arange(5)).tolist() == [8, 8, 8, 13, 7]
    two = changed(c12="A")
    assert metrics.agents(np.stack([frame, two, changed(c8=".")])).tolist() == [8, -1, -1]
    assert metrics.moved(two, np.array(0)) == -1 and not metrics.hits(two, np.array(0))
    beside = changed(c8=".", c17="A")  # the goal is in cell 16, west of it
    assert metrics.hits(np.stack([beside] * 5), np.arange(5)).tolist() == [False] * 4 + [True]
    generated = np.stack([frame, frame, two, changed(c8="."), changed(c12="#")])
    assert metrics.logic_errors(generated, np.array([8, 13, 8, -1, 8])).tolist() == [False, True, True, True, False]
    assert metrics.logic_errors(frame, np.array(-1))  # nothing follows from a frame without an agent


def test_the_error_is_the_mean_of_both_means() -> None:
    frames = np.stack([board(GOOD), board(GOOD), changed(c12="#"), changed(c0=".")])
    found = metrics.errors(frames.reshape(2, 2, 25), np.array([[8, 13], [8, 8]]))
    assert found == metrics.Errors(error=0.375, geometric=0.5, logic=0.25)


@pytest.mark.parametrize("respawn", ["both", "goal"])
def test_the_environment_itself_makes_no_errors_but_after_hits(respawn: str) -> None:
    frames, action, reward = played(respawn)
    hit, must = metrics.hits(frames[:-1], action), metrics.moved(frames[:-1], action)
    assert (hit == (reward == 1)).all() and hit.sum() > 50
    assert metrics.errors(frames[1:][~hit], must[~hit]) == (0, 0, 0)
    assert metrics.errors(frames[1:], metrics.agents(frames[1:])) == (0, 0, 0)
    after = metrics.errors(frames[1:][hit], must[hit])
    assert after.geometric == 0
    assert after.logic == 0 if respawn == "goal" else 0.75 < after.logic < 1  # 8/9


def test_the_rules_are_those_of_the_environment() -> None:
    assert (metrics.SIDE, metrics.MOVES) == (world.SIDE, world.MOVES)
    assert [metrics.FLOOR, metrics.WALL, metrics.AGENT, metrics.GOAL] == [0, 1, 2, 3]
    assert [world.FLOOR, world.WALL, world.AGENT, world.GOAL] == [0, 1, 2, 3]


# -- floors -----------------------------------------------------------------------------------------------------------


def test_floors_at_the_lengths_of_the_study() -> None:
    for respawn in ("both", "goal"):
        assert abs(metrics.hit_rate(respawn) - 16 / 345) < 1e-12
        assert round(metrics.first_frame_entropy(respawn), 4) == 4.2204
    assert round(metrics.best_loss(8, "goal"), 4) == 0.0858
    assert round(metrics.best_loss(64, "goal"), 4) == 0.0681
    assert round(metrics.best_loss(8, "both"), 4) == 0.0893
    assert round(metrics.best_loss(64, "both"), 4) == 0.0720
    assert abs(metrics.logic_floor("both") - 0.0412) < 5e-5 and metrics.logic_floor("goal") == 0


@pytest.mark.parametrize("respawn", ["both", "goal"])
def test_a_million_simulated_steps_agree(respawn: str) -> None:
    """Played on coordinates, apart from the tables of the code: 1000 worlds side by side."""
    rng, worlds, steps = np.random.default_rng(0), 1000, 1000
    moves = np.array([(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)])

    def other_than(agent: np.ndarray) -> np.ndarray:
        goal = rng.integers(8, size=agent.shape)
        return goal + (goal >= agent)

    agent = rng.integers(9, size=worlds)
    goal = other_than(agent)
    hits, visits = 0, np.zeros(81)
    for _ in range(steps):
        visits += np.bincount(9 * agent + goal, minlength=81)
        row, column = np.clip(np.stack((agent // 3, agent % 3)) + moves[rng.integers(5, size=worlds)].T, 0, 2)
        agent = 3 * row + column
        hit = agent == goal
        hits += int(hit.sum())
        if respawn == "both":
            agent = np.where(hit, rng.integers(9, size=worlds), agent)
        goal = np.where(hit, other_than(agent), goal)
    assert abs(hits / (worlds * steps) - metrics.hit_rate(respawn)) < 0.0007
    share = visits[visits > 0] / visits.sum()
    assert len(share) == 72
    assert abs(-(share * np.log(share)).sum() - metrics.first_frame_entropy(respawn)) < 0.003
