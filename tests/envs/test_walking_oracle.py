"""Memory Maze's own physics beside our motion: the same actions, in one hall. Needs the package (extra `oracle`).

Nothing is rendered, so no display or GL is needed. Displacements are those of a step, in cells and degrees.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from wmcli.envs.walking import (
    BODY,
    FORWARD,
    FORWARD_LEFT,
    FORWARD_RIGHT,
    LEFT,
    MEANINGS,
    MEASURED,
    NOOP,
    RIGHT,
    advance,
    between,
    standing,
)

os.environ.setdefault("MUJOCO_GL", "disabled")  # it is read when dm_control is first imported
pytest.importorskip("memory_maze")

from dm_control.mujoco.engine import Physics
from memory_maze import tasks

CELLS = 9
MIDDLE = CELLS / 2 + 1
Walk = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def hall() -> Any:
    """Memory Maze's 9 x 9 with one room that fills it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Physics, "render", lambda *_, **__: np.zeros((64, 64, 3), np.uint8))
        env = tasks._memory_maze(
            CELLS, 1, 1000, max_rooms=1, room_min_size=CELLS, room_max_size=CELLS, global_observables=True, seed=1
        )
        assert env.reset().observation["maze_layout"].all()
        yield env


@pytest.fixture
def walk(hall: Any) -> Walk:
    def walk(actions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Displacements (T, 3) of each step, x and y in cells and the turn, from rest in the middle, looking east:
        theirs and ours."""
        hall.task._walker.set_pose(hall.physics, position=(0, 0, 0))  # all its joints to 0, which looks east
        hall.physics.data.qvel[:] = 0
        hall.physics.forward()
        walls = np.ones((CELLS + 2, CELLS + 2), bool)
        walls[1:-1, 1:-1] = False
        state = standing(np.full((1, 2), MIDDLE), np.zeros(1))
        theirs, ours = [(MIDDLE, MIDDLE, 0.0)], [(MIDDLE, MIDDLE, 0.0)]
        for action in actions:
            seen = hall.step(action).observation
            (x, y), (east, north) = seen["agent_pos"], seen["agent_dir"]
            theirs.append((x + 1, CELLS + 1 - y, np.rad2deg(np.arctan2(north, east))))
            state = advance(MEASURED, walls, state, np.array([action]))
            ours.append((*state.position[0], state.heading[0]))
        steps = []
        for poses in (np.array(theirs), np.array(ours)):
            step = np.diff(poses, axis=0)
            step[:, 2] = between(poses[:-1, 2], poses[1:, 2])
            steps.append(step)
        return steps[0], steps[1]

    return walk


def length(steps: np.ndarray) -> np.ndarray:
    return np.hypot(steps[:, 0], steps[:, 1])


def test_actions_are_theirs_in_their_order(walk: Walk) -> None:
    """Each, held for four steps, turns and walks as ours of the same number does."""
    assert len(MEANINGS) == 6
    for action in range(6):
        theirs, ours = walk([action] * 4)
        assert np.sign(np.round(theirs[:, 2])).tolist() == np.sign(ours[:, 2]).tolist()
        assert ((length(theirs) > 0.05) == (length(ours) > 0.05)).all()


def test_walking_from_rest_steadily_and_after_release(walk: Walk) -> None:
    theirs, ours = walk([FORWARD] * 8 + [NOOP] * 5)
    np.testing.assert_allclose(theirs, ours, atol=0.002)
    assert theirs[7, 0] == pytest.approx(0.25, abs=0.0005) and theirs[8, 0] == pytest.approx(0.138, abs=0.001)
    assert theirs[-1, 0] < 0.001


@pytest.mark.parametrize("action", [LEFT, RIGHT])
def test_turning_steadily_and_after_release(walk: Walk, action: int) -> None:
    """Its first step falls short of ours by 1.4 degrees, which friction takes and does not give back on release."""
    theirs, ours = walk([action] * 6 + [NOOP] * 3)
    assert np.abs(theirs[0, 2]) == pytest.approx(np.abs(ours[0, 2]) - 1.4, abs=0.1)
    np.testing.assert_allclose(theirs[1:, 2], ours[1:, 2], atol=0.1)
    assert length(theirs).max() < 0.001


@pytest.mark.parametrize("action", [FORWARD_LEFT, FORWARD_RIGHT])
def test_walking_in_a_circle(walk: Walk, action: int) -> None:
    """Speed is slower to come while turning; once steady, steps are ours to a fiftieth."""
    theirs, ours = walk([action] * 10)
    assert np.abs(theirs[1:, 2] - ours[1:, 2]).max() < 0.2 and np.abs(theirs[0, 2] - ours[0, 2]) < 1.1
    assert np.abs(length(theirs) - length(ours)).max() < 0.03
    assert np.abs(length(theirs) - length(ours))[4:].max() < 0.005


def test_ten_seconds_of_anything_end_up_close_by(walk: Walk) -> None:
    """The first steps of turns are what adds up."""
    rng = np.random.default_rng(0)
    actions = np.repeat(rng.integers(6, size=14), rng.integers(1, 6, size=14))[:40].tolist()
    theirs, ours = walk(actions)
    turned = np.abs(theirs[:, 2] - ours[:, 2])
    assert turned.max() < 2.1 and np.median(turned) < 0.2
    assert np.abs(length(theirs) - length(ours)).max() < 0.04 and length(ours).sum() > 2


def test_walls_stop_the_middle_as_far_off(hall: Any, walk: Walk) -> None:
    theirs, ours = walk([FORWARD] * 22)
    for steps in (theirs, ours):
        assert MIDDLE + steps[:, 0].sum() == pytest.approx(CELLS + 1 - BODY, abs=0.005)
        assert abs(steps[-1, 0]) < 0.002
