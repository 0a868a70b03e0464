"""`wm/GridWorld-v0`: the long-sequence task of Drama (Wang et al. 2024, arXiv 2410.08893, table 2 and appendix A.6).

A board of 5 x 5 cells: a wall around nine free cells. An agent and a goal start in two different random free cells. The
agent stays or moves one cell; walls stop it. Reaching the goal earns 1, every other step 0, and the game never ends. In
the frame after a hit, agent and goal have new random cells (`wm/GridWorld-v0`, the paper), or only the goal has one
(`wm/GridWorldGoal-v0`, the rule of alxndrTL/mamba.py, on which the paper builds). Random play hits in 16 of 345 steps.

A frame shows the whole state, and only the frame after a hit is random. So the rules can check a model's frames, and
its loss has a known minimum: see wmcli/metrics/grid_world.py.

Cells are 8 pixels. Frames stay exact, with one color per cell and equal cells, if `environment.size` is 10, 20 or a
multiple of 5 from 40 on. At other sizes the colors of neighboring cells mix.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np

GRID_WORLD_ID = "wm/GridWorld-v0"
GRID_WORLD_GOAL_ID = "wm/GridWorldGoal-v0"
ENDLESS = (GRID_WORLD_ID, GRID_WORLD_GOAL_ID)  # episodes that never end have no return
SIDE = 5  # cells in a row or column of the board, the wall included
INNER = SIDE - 2  # of these, free cells
CELL = 8  # pixels
FLOOR, WALL, AGENT, GOAL = range(4)  # content of a cell
COLORS = ((16, 16, 24), (120, 120, 120), (70, 150, 255), (255, 220, 60))  # of floor, wall, agent and goal
MOVES = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1))  # rows down and columns right of each action
Respawn = Literal["both", "goal"]


class GridWorld(gymnasium.Env[np.ndarray, int]):
    """Frames (40, 40, 3) uint8; actions 0 stay, 1 north, 2 east, 3 south, 4 west. Episodes never end.

    Args:
        respawn: Parts with a new cell after a hit: "both" agent and goal, or the "goal" alone.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, respawn: Respawn = "both") -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE * CELL, SIDE * CELL, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))  # type: ignore[assignment]
        self._respawn = respawn
        self._agent = 0  # inner cells, counted row by row
        self._goal = 1

    def get_action_meanings(self) -> list[str]:
        """The name of each action."""
        return ["STAY", "NORTH", "EAST", "SOUTH", "WEST"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Put agent and goal in new cells. The seed and the actions determine everything that follows."""
        super().reset(seed=seed)
        self._place_agent()
        self._place_goal()
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move the agent; if that leads to the goal, reward 1 and new cells."""
        (row, column), (down, right) = divmod(self._agent, INNER), MOVES[int(action)]
        self._agent = _clamp(row + down) * INNER + _clamp(column + right)
        hit = self._agent == self._goal
        if hit:
            if self._respawn == "both":
                self._place_agent()
            self._place_goal()
        return self._draw(), float(hit), False, False, {}

    def _place_agent(self) -> None:
        self._agent = int(self.np_random.integers(INNER**2))

    def _place_goal(self) -> None:
        """Uniformly over the inner cells where the agent is not."""
        self._goal = int(self.np_random.integers(INNER**2 - 1))
        self._goal += self._goal >= self._agent

    def _draw(self) -> np.ndarray:
        board = np.full((SIDE, SIDE, 3), COLORS[WALL], np.uint8)
        inner = board[1:-1, 1:-1]
        inner[:] = COLORS[FLOOR]
        inner[divmod(self._agent, INNER)] = COLORS[AGENT]
        inner[divmod(self._goal, INNER)] = COLORS[GOAL]
        return board.repeat(CELL, axis=0).repeat(CELL, axis=1)


def _clamp(inner: int) -> int:
    return min(max(inner, 0), INNER - 1)


def cells(frames: np.ndarray) -> np.ndarray:
    """Return the content of each cell, row by row: frames (..., H, W, 3) uint8 to (..., 25) int64 in 0..3.

    It is that of the color nearest to the cell's middle pixel, for frames of any exact size.
    """
    assert frames.shape[-2] == frames.shape[-3] and frames.shape[-2] % SIDE == 0, f"frames {frames.shape}"
    cell = frames.shape[-2] // SIDE
    middle = frames[..., cell // 2 :: cell, cell // 2 :: cell, None, :].astype(np.int64)  # (..., 5, 5, 1, 3)
    nearest = np.square(middle - COLORS).sum(-1).argmin(-1)
    return nearest.reshape(*frames.shape[:-3], SIDE**2)
