"""Crafter as a gymnasium environment: images of 64 x 64 pixels, 17 actions, 10,000 steps at most.

Source: Hafner 2021, arXiv 2109.06780, and the package crafter.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gymnasium
import numpy as np

SIDE = 64
STEPS = 10_000


class CrafterGame(gymnasium.Env[np.ndarray, int]):
    """The game with its reward: 1 for each achievement's first time, and a tenth of the change of health.

    `reset(seed=...)` builds the game anew, so that all that follows depends on the seed alone. Death is a termination,
    and the end of time a truncation. info: `achievements`, how often each was reached in the episode.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    max_steps = STEPS

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._game = self._new(0)
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self._game.action_names))  # type: ignore[assignment]

    def get_action_meanings(self) -> list[str]:
        """The name of each action."""
        return list(self._game.action_names)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._game = self._new(seed)
        return self._game.reset(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Take one step."""
        image, reward, over, info = self._game.step(int(action))
        dead = info["discount"] == 0
        return (
            image,
            float(reward),
            bool(over and dead),
            bool(over and not dead),
            {"achievements": info["achievements"]},
        )

    def render(self) -> np.ndarray:
        """Return the current picture (64, 64, 3) uint8."""
        return self._game.render()

    def _new(self, seed: int) -> Any:
        import crafter

        game = crafter.Env(area=(64, 64), view=(9, 9), size=(SIDE, SIDE), length=STEPS, seed=seed)
        world = type(game._world)
        game._world.__class__ = type("World", (world,), {"reset": _reset_in_order})
        return game


class _Members(dict[Any, None]):
    """A set in the order of additions."""

    def add(self, member: Any) -> None:
        self[member] = None

    def remove(self, member: Any) -> None:
        del self[member]


def _reset_in_order(world: Any, seed: int | None = None) -> None:
    """Reset a world, with the creatures of an area in the order in which they came there.

    The game draws which of them disappears from a set, whose order depends on addresses in memory.
    """
    super(type(world), world).reset(seed)
    world._chunks = defaultdict(_Members)
