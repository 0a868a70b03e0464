"""Tasks of the DeepMind Control Suite as gymnasium environments: `dmc/DOMAIN-TASK`, such as `dmc/cartpole-balance`.

Observations are a dict of the suite's own vectors. An episode lasts as long as the suite's, 1000 steps of control for
most tasks, and ends as a truncation; a discount of 0 is a termination.

Source: Tassa et al. 2018, arXiv 1801.00690, and the package dm_control.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

PREFIX = "dmc/"
PIXELS = 64  # of a side of rendered pictures, before they are resized


class ControlTask(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A task of the suite. `reset(seed=...)` builds the task anew, so that all that follows depends on the seed alone.

    Args:
        task: Domain and task, with a hyphen between them.
        render_mode: "rgb_array" lets `render` return pictures of the first camera.
        pixels: Side of these pictures.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(self, task: str, render_mode: str | None = None, pixels: int = PIXELS) -> None:
        self.render_mode = render_mode
        self._domain, _, self._task = task.partition("-")
        self._task = self._task.replace("-", "_")
        self._pixels = pixels
        self._control = self._load(0)
        action, seen = self._control.action_spec(), self._control.observation_spec()
        self.action_space = gymnasium.spaces.Box(action.minimum, action.maximum, action.shape, np.float64)
        self.observation_space = gymnasium.spaces.Dict(  # type: ignore[assignment]
            {name: gymnasium.spaces.Box(-np.inf, np.inf, spec.shape, np.float64) for name, spec in seen.items()}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._control = self._load(seed)
        return dict(self._control.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Take one step of control."""
        after = self._control.step(action)
        ended = after.last()
        terminated = ended and after.discount == 0
        return dict(after.observation), float(after.reward or 0.0), terminated, ended and not terminated, {}

    def render(self) -> np.ndarray:
        """Return a picture (pixels, pixels, 3) uint8."""
        return self._control.physics.render(self._pixels, self._pixels, camera_id=0)

    def close(self) -> None:
        """Free the simulation."""
        self._control.close()

    def _load(self, seed: int) -> Any:
        from dm_control import suite

        return suite.load(self._domain, self._task, task_kwargs={"random": seed})
