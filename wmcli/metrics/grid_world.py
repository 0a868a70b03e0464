"""Errors of generated frames of the grid world, and the lowest errors and loss that a model can reach.

The geometric error of a frame is 1 unless it is a board: walls around exactly one agent, one goal and floor. The logic
error of a step is 1 if the agent is not where it must be. The paper's error is the mean of their two means.

The frame before and the action determine the place of the agent (`moved`), except after a hit with `respawn` "both".
There the real next frame decides, and no model can be right more often than once in nine. Errors without these steps
are therefore reported too (`hits`).

The floors are exact. Under random play, agent and goal are a Markov chain of 72 states with uniform actions. Only the
state after a hit is uncertain. The best possible loss is the remaining entropy, summed over a sequence. A model with a
lower loss has access to its targets.

Frames are cells (..., 25) integer, row by row: 0 floor, 1 wall, 2 agent, 3 goal. Other values are errors anywhere.
Actions (...) are 0 stay, 1 north, 2 east, 3 south, 4 west. `respawn`: a hit moves "both" agent and goal, or the "goal".
The rules of `wmcli/envs/grid_world.py` are repeated here on cells.

Source: Drama (Wang et al. 2024, arXiv 2410.08893, table 2 and appendix A.6).
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import numpy as np

Respawn = Literal["both", "goal"]
SIDE = 5  # cells in a row or column
FLOOR, WALL, AGENT, GOAL = range(4)
TOKENS = SIDE**2 + 1  # a frame's cells and the action
INNER = tuple(SIDE * row + column for row in range(1, SIDE - 1) for column in range(1, SIDE - 1))  # free cells
MOVES = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1))  # rows and columns of each action
# SUCCESSOR[action, cell]: the cell an agent moves to; it never enters the wall
SUCCESSOR = np.array(
    [
        [SIDE * min(max(row + down, 1), SIDE - 2) + min(max(column + right, 1), SIDE - 2)]
        for down, right in MOVES
        for row in range(SIDE)
        for column in range(SIDE)
    ]
).reshape(len(MOVES), SIDE**2)


class Errors(NamedTuple):
    """Mean errors of generated frames, each between 0 and 1."""

    error: float
    """(geometric + logic) / 2: the paper's number."""
    geometric: float
    logic: float


# -- errors -----------------------------------------------------------------------------------------------------------


def geometric_errors(frames: np.ndarray) -> np.ndarray:
    """Return bool (...): the frame is not a board."""
    inner = frames[..., INNER]
    border = np.delete(frames, INNER, axis=-1)
    holds = [(inner == kind).sum(-1) == count for kind, count in ((AGENT, 1), (GOAL, 1), (FLOOR, len(INNER) - 2))]
    return ~((border == WALL).all(-1) & np.logical_and.reduce(holds))


def agents(frames: np.ndarray) -> np.ndarray:
    """Return int64 (...), the agent's cell, -1 unless there is exactly one agent."""
    here = frames == AGENT
    return np.where(here.sum(-1) == 1, here.argmax(-1), -1)


def moved(previous: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Return int64 (...), the cell to which actions move the agent of the previous frames, -1 without one agent."""
    agent = agents(previous)
    return np.where(agent >= 0, SUCCESSOR[action, agent], -1)


def hits(previous: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Return bool (...): the action moves the agent of the previous frame to a goal."""
    to = moved(previous, action)
    return (to >= 0) & (np.take_along_axis(previous, to[..., None], -1)[..., 0] == GOAL)


def logic_errors(frames: np.ndarray, agent: np.ndarray) -> np.ndarray:
    """Return bool (...): a frame has not exactly one agent, or has it in another cell.

    Args:
        frames: (..., 25).
        agent: (...), the right cell: of the real next frame (`agents`), or by the rules (`moved`). With -1 every frame
            is an error.
    """
    cell = agents(frames)
    return (cell < 0) | (cell != agent)


def errors(frames: np.ndarray, agent: np.ndarray) -> Errors:
    """Return the mean errors of frames (..., 25) whose agents must be in the cells `agent` (...)."""
    geometric, logic = float(geometric_errors(frames).mean()), float(logic_errors(frames, agent).mean())
    return Errors((geometric + logic) / 2, geometric, logic)


# -- floors -----------------------------------------------------------------------------------------------------------


class _Chain(NamedTuple):
    """The stationary distribution of random play. S states: agent and goal in two different inner cells."""

    probability: np.ndarray  # (S,) of each state
    hit: np.ndarray  # (S,): of reaching the goal in the next step


@functools.cache
def _chain(respawn: Respawn) -> _Chain:
    states = [(agent, goal) for agent in INNER for goal in INNER if agent != goal]
    number = {state: index for index, state in enumerate(states)}
    transition, hit = np.zeros((len(states), len(states))), np.zeros(len(states))
    chance = 1 / len(MOVES)
    for (agent, goal), index in number.items():
        for to in SUCCESSOR[:, agent].tolist():
            if to != goal:
                transition[index, number[to, goal]] += chance
                continue
            hit[index] += chance
            after = [state for state in states if respawn == "both" or state[0] == to]
            transition[index, [number[state] for state in after]] += chance / len(after)
    # p P = p and sum p = 1; one of the equations p (P - 1) = 0 follows from the others
    equations = transition.T - np.eye(len(states))
    equations[-1] = 1
    return _Chain(np.linalg.solve(equations, np.eye(len(states))[-1]), hit)


def hit_rate(respawn: Respawn) -> float:
    """Return the share of steps of random play that reach the goal: 16/345 under either rule."""
    chain = _chain(respawn)
    return float(chain.probability @ chain.hit)


def first_frame_entropy(respawn: Respawn) -> float:
    """Return the entropy of a frame of random play (nats)."""
    probability = _chain(respawn).probability
    return float(-(probability * np.log(probability)).sum())


def best_loss(frames: int, respawn: Respawn) -> float:
    """Return the lowest possible mean cross entropy (nats per token) of `frames` frames with their actions.

    The mean is over all 26 tokens of each frame, except the first token of the sequence. Sequences start anywhere in
    random play.
    """
    anew = len(INNER) - 1 if respawn == "goal" else len(INNER) * (len(INNER) - 1)  # equally likely states after a hit
    after_a_step = hit_rate(respawn) * math.log(anew)
    total = first_frame_entropy(respawn) + frames * math.log(len(MOVES)) + (frames - 1) * after_a_step
    return total / (TOKENS * frames - 1)


def logic_floor(respawn: Respawn) -> float:
    """Return the lowest expected logic error, if the real next frames decide where the agent must be."""
    return hit_rate(respawn) * (1 - 1 / len(INNER)) if respawn == "both" else 0.0
