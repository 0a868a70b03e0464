"""How agents move in a maze of cells: Memory Maze's actions and the motion measured in it (arXiv 2210.13383).

Turning follows the same rule as walking: a step moves by its own command and by the rest of earlier ones. In the end n
steps of turning sum to n times the steady rate. Speed follows the heading; walls do not reduce it.

Axes: E independent agents. Positions are cells, (x, y) with y to the south; headings are degrees from east to the left,
as in ray_caster.py. `walls` are bool (rows, columns), one maze for all, or (E, rows, columns), one for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wmcli.envs.ray_caster import axes

MEANINGS = ("NOOP", "FORWARD", "LEFT", "RIGHT", "FORWARD_LEFT", "FORWARD_RIGHT")
NOOP, FORWARD, LEFT, RIGHT, FORWARD_LEFT, FORWARD_RIGHT = range(6)
WALKS = np.array([0, 1, 0, 0, 1, 1])  # of each action
TURNS = np.array([0, 0, 1, -1, 1, -1])
BODY = 0.1  # cells from an agent's middle to where walls stop it: half the side of a square, as wide as the ball it is
REACH = 0.4  # cells: nearer than this a script takes a place for reached


@dataclass(frozen=True)
class Gait:
    """Lengths of steps. The defaults were measured in Memory Maze at its 4 steps per second."""

    walk: float = 0.25
    """Cells a step of steady walking."""
    glide: float = 0.138
    """Of these, cells owed to the speed at the step's beginning."""
    decay: float = 0.225
    """Factor of a step on the difference between speed and command: the n-th step of walking, from 0, covers
    walk - glide * decay^n cells."""
    turn: float = 18.4
    """Degrees a step of steady turning."""
    coast: float = 2.9
    """Of these, degrees owed to the step before."""

    @property
    def oblique(self) -> float:
        """Up to how many degrees beside an agent's heading a place may lie for a script to walk."""
        return max(45 - self.turn / 2, self.turn / 2)


MEASURED = Gait()
COARSE = Gait(walk=0.5, glide=0.0, decay=0.0, turn=45.0, coast=0.0)
"""Half a cell a step, eighths of a turn, nothing of either left over to the next step."""


class State(NamedTuple):
    """All that changes as agents move."""

    position: np.ndarray  # float64 (E, 2)
    heading: np.ndarray  # float64 (E,)
    speed: np.ndarray  # float64 (E,): 1 is steady walking
    swing: np.ndarray  # float64 (E,): the turn commanded by the step before, -1, 0 or 1


def standing(position: np.ndarray, heading: np.ndarray) -> State:
    """Agents that have not moved yet, at positions (E, 2) with headings (E,)."""
    still = np.zeros(len(heading))
    return State(position, heading, still, still)


def advance(gait: Gait, walls: np.ndarray, state: State, action: np.ndarray) -> State:
    """The states after one step of the actions (E,)."""
    command, walk = TURNS[action], WALKS[action]
    turned = (gait.turn - gait.coast) * command + gait.coast * state.swing
    covered = (gait.walk - gait.glide) * walk + gait.glide * state.speed
    forward, _ = axes(state.heading + turned / 2)
    return State(
        position=_slide(walls, state.position, forward * covered[:, None]),
        heading=(state.heading + turned) % 360,
        speed=gait.decay * state.speed + (1 - gait.decay) * walk,
        swing=command.astype(np.float64),
    )


def steer(gait: Gait, state: State, target: np.ndarray) -> np.ndarray:
    """The actions that bring agents nearer to `target` (E, 2): walk if that is roughly ahead, turn if half a step of
    turning or more is missing."""
    off = between(state.heading + gait.coast * state.swing, bearing(target - state.position))
    walk = np.abs(off) <= gait.oblique
    turn = np.where(np.abs(off) > gait.turn / 2, np.sign(off), 0)
    return np.select([turn > 0, turn < 0], [np.where(walk, FORWARD_LEFT, LEFT), np.where(walk, FORWARD_RIGHT, RIGHT)],
                     np.where(walk, FORWARD, NOOP))  # fmt: skip


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Between positions (..., 2)."""
    way = one - other
    return np.hypot(way[..., 0], way[..., 1])


def bearing(way: np.ndarray) -> np.ndarray:
    """The headings of ways (..., 2)."""
    return np.rad2deg(np.arctan2(-way[..., 1], way[..., 0]))


def between(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The turn from one heading to another, in [-180, 180)."""
    return (other - one + 180) % 360 - 180


def _slide(walls: np.ndarray, position: np.ndarray, way: np.ndarray) -> np.ndarray:
    """Move squares of half a side BODY from `position` (E, 2) by `way` (E, 2), less than a cell, until a wall.

    First in x, then in y.
    """
    position = position.copy()
    maze = () if walls.ndim == 2 else (np.arange(len(position)),)
    for axis in (0, 1):
        sign = np.sign(way[:, axis])
        target = position[:, axis] + way[:, axis]
        front = np.floor(target + sign * BODY).astype(np.int64)
        flanks = [np.floor(position[:, 1 - axis] + side).astype(np.int64) for side in (-BODY, BODY)]
        met = [walls[(*maze, flank, front) if axis == 0 else (*maze, front, flank)] for flank in flanks]
        edge = front + (sign < 0) - sign * (BODY + 1e-6)  # a little off, so that the wall is not touched
        position[:, axis] = np.where(met[0] | met[1], edge, target)
    return position
