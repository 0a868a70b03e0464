"""Random actions that are held for several decisions.

Single random actions cancel each other out: a random walk of 100 steps ends about 10 cells from its start. An action
that is held leads farther.

Source: temporally extended epsilon-greedy (Dabney, Ostrovski and Barreto 2021, ICLR, arXiv 2006.01782).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wmcli.controllers.base import Controller, State
from wmcli.nn.actions import no_action, random_actions, where_rows
from wmcli.nn.categorical import draw
from wmcli.nn.policies import build_policy
from wmcli.spaces import ActionSpace
from wmcli.world_models.base import WorldModel

LONGEST = 128  # decisions
EXPONENT = 2  # of the zeta distribution of the lengths, as in the paper's experiments on Atari


def draw_lengths(count: int, generator: torch.Generator) -> Tensor:
    """Draw lengths (count,) int64 from 1 to `LONGEST`, P(n) proportional to n^-2; the mean is 3.3."""
    weights = torch.arange(1, LONGEST + 1, dtype=torch.float64) ** -EXPONENT
    uniforms = torch.rand(count, dtype=torch.float64, generator=generator)
    return draw(weights.expand(count, -1).contiguous(), uniforms) + 1


class HeldActions:
    """Random actions in E environments, each held for a random number of decisions. Everything is on the CPU."""

    def __init__(self, space: ActionSpace, environments: int) -> None:
        self._space = space
        self._action = no_action(space, (environments,))
        self._left = torch.zeros(environments, dtype=torch.int64)  # decisions for which `_action` is held

    def replace(self, choice: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """Replace actions by those that are held.

        Args:
            choice: (E, ...), the policy's.
            epsilon: Probability that a random action begins, in each environment where none is held.
            generator: On the CPU. The number of draws does not depend on the holds.

        Returns:
            (E, ...).
        """
        count = (len(choice),)
        begins = (torch.rand(count, generator=generator) < epsilon) & (self._left == 0)
        action = random_actions(self._space, count, generator)
        self._action = where_rows(begins, action, self._action)
        left = torch.where(begins, draw_lengths(len(choice), generator), self._left)
        self._left = (left - 1).clamp(min=0)
        return where_rows(left > 0, self._action, choice)

    def end(self, rows: Tensor) -> None:
        """End the holds in the rows (E,) marked True."""
        self._left = self._left.masked_fill(rows, 0)

    def state(self) -> dict[str, Tensor]:
        """Return everything that changes."""
        return {"held_action": self._action, "held_left": self._left}

    def load(self, state: dict[str, Tensor]) -> None:
        """Resume exactly where `state` was returned."""
        self._action, self._left = state["held_action"].cpu(), state["held_left"].cpu()


class RandomController(Controller):
    """Acts at random in a world model in which nobody learned to act. It has no parameters and no state."""

    def __init__(self, space: ActionSpace) -> None:
        super().__init__()
        self._space = space
        self.distribution = build_policy(space)

    def decide(
        self, world_model: WorldModel, world_state: State, state: State, generator: torch.Generator | None = None
    ) -> tuple[Tensor, State]:
        """Return zeros (B, P)."""
        rows = len(world_model.features(world_state))
        return torch.zeros(rows, self.distribution.outputs), state

    def choose(
        self, parameters: Tensor, state: State, temperature: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw actions (B, ...) uniformly, at any temperature."""
        return random_actions(self._space, (len(parameters),), generator)
