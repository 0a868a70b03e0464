"""How wrong generated frames of the grid world are, and the best that any model of it can do.

The task and its two errors are Drama's (Wang et al. 2024, arXiv 2410.08893, table 2 and appendix A.6); the world is
`wmcli/envs/grid_world.py`, whose rules stand here a second time, on cells alone. The geometric error of a frame is 1
where it is no board: a border cell is no wall, or inside there is not exactly one agent, one goal and floor else. The
logic error of a step is 1 where the agent is not where it must be. The paper's error is the mean of their two means.

Where the agent must be follows from the frame before and the action: `moved`. Only where that reaches the goal and the
agent is placed anew (`respawn` "both") does it not: there the real next frame tells, if there is one, and no model can
be right more often than once in nine. So errors belong beside those of the other steps alone: `hits`.

The floors are exact. Under random play agent and goal are a Markov chain of 72 states, the action is uniform, and the
next state is certain but after a hit; what is left of uncertainty, summed over a sequence, is the best possible loss. A
model below it has seen what it should predict.

Frames are cells (..., 25) integer, row by row: 0 floor, 1 wall, 2 agent, 3 goal; whatever else is wrong anywhere.
Actions (...) are 0 stay, 1 north, 2 east, 3 south, 4 west. `respawn`: what a hit places anew, "both" or the "goal".
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
INNER = tuple(SIDE * row + column for row in range(1, SIDE - 1) for column in range(1, SIDE - 1))  # cells not of wall
MOVES = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1))  # rows and columns of each action
# SUCCESSOR[action, cell]: where an agent comes from a cell; it never enters the wall
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
    """bool (...): the frame is no board."""
    inner = frames[..., INNER]
    border = np.delete(frames, INNER, axis=-1)
    holds = [(inner == kind).sum(-1) == count for kind, count in ((AGENT, 1), (GOAL, 1), (FLOOR, len(INNER) - 2))]
    return ~((border == WALL).all(-1) & np.logical_and.reduce(holds))


def agents(frames: np.ndarray) -> np.ndarray:
    """int64 (...): the agent's cell, -1 unless there is exactly one agent."""
    here = frames == AGENT
    return np.where(here.sum(-1) == 1, here.argmax(-1), -1)


def moved(previous: np.ndarray, action: np.ndarray) -> np.ndarray:
    """int64 (...): the cell to which `action` takes the agent of the frame `previous`, -1 where there is not one."""
    agent = agents(previous)
    return np.where(agent >= 0, SUCCESSOR[action, agent], -1)


def hits(previous: np.ndarray, action: np.ndarray) -> np.ndarray:
    """bool (...): `action` takes the agent of the frame `previous` to a goal."""
    to = moved(previous, action)
    return (to >= 0) & (np.take_along_axis(previous, to[..., None], -1)[..., 0] == GOAL)


def logic_errors(frames: np.ndarray, agent: np.ndarray) -> np.ndarray:
    """bool (...): a frame has not exactly one agent, or not in the cell `agent` (...) where it must be.

    `agent` is that of the real next frame (`agents`), or what the rules say of a generated one (`moved`). -1, no such
    cell, is an error whatever the frame: nothing follows from a frame without an agent.
    """
    found = agents(frames)
    return (found < 0) | (found != agent)


def errors(frames: np.ndarray, agent: np.ndarray) -> Errors:
    """The mean errors of generated frames (..., 25) whose agents must be in the cells `agent` (...)."""
    geometric, logic = float(geometric_errors(frames).mean()), float(logic_errors(frames, agent).mean())
    return Errors((geometric + logic) / 2, geometric, logic)


# -- floors -----------------------------------------------------------------------------------------------------------


class _Chain(NamedTuple):
    """Random play once it has forgotten its start. S states: agent and goal in two different inner cells."""

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
    """Share of the steps of random play that reach the goal: 16/345, whatever is placed anew."""
    chain = _chain(respawn)
    return float(chain.probability @ chain.hit)


def first_frame_entropy(respawn: Respawn) -> float:
    """Uncertainty of a frame of random play of which nothing is known (nats)."""
    probability = _chain(respawn).probability
    return float(-(probability * np.log(probability)).sum())


def best_loss(frames: int, respawn: Respawn) -> float:
    """Lowest possible mean cross entropy (nats per token) of a sequence of `frames` frames with their actions.

    The mean is over all tokens that are predicted from others before them: all 26 of each frame but the very first.
    Sequences are cut out of random play wherever.
    """
    anew = len(INNER) - 1 if respawn == "goal" else len(INNER) * (len(INNER) - 1)  # equally likely states after a hit
    after_a_step = hit_rate(respawn) * math.log(anew)
    total = first_frame_entropy(respawn) + frames * math.log(len(MOVES)) + (frames - 1) * after_a_step
    return total / (TOKENS * frames - 1)


def logic_floor(respawn: Respawn) -> float:
    """Lowest expected logic error when the real next frames tell where the agent must be."""
    return hit_rate(respawn) * (1 - 1 / len(INNER)) if respawn == "both" else 0.0
