"""Action repeat and a time limit in decisions."""

from __future__ import annotations

from typing import Any

import gymnasium


class Pace(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action, with rewards summed, and cuts an episode off after a number of decisions.

    Args:
        env: The environment.
        action_repeat: Steps of the environment for each decision. An end stops the repeat.
        time_limit: Decisions until truncation; 0 for none.
    """

    def __init__(self, env: gymnasium.Env, action_repeat: int, time_limit: int) -> None:
        super().__init__(env)
        self._repeat, self._limit, self._decisions = action_repeat, time_limit, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """As the environment's own."""
        self._decisions = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Repeat an action; the observation is that of the last step."""
        total = 0.0
        for _ in range(self._repeat):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        self._decisions += 1
        truncated = truncated or (not terminated and 0 < self._limit <= self._decisions)
        return observation, total, terminated, truncated, info
