"""Tasks of the DeepMind Control Suite as gymnasium environments: `dmc/DOMAIN-TASK`, such as `dmc/cartpole-balance`.

Observations are a dict of the suite's own vectors. An episode lasts as long as the suite's, 1000 steps of control for
most tasks, and ends as a truncation; a discount of 0 is a termination.

Source: Tassa et al. 2018, arXiv 1801.00690, and the package dm_control.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np

from wmcli.envs.checked import nearest
from wmcli.errors import UsageError

PREFIX = "dmc/"
PIXELS = 64  # of a side of rendered pictures, before they are resized


class ControlTask(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A task of the suite. All that follows `reset(seed=...)` depends on the seed alone.

    The linear-quadratic regulators draw their masses and springs when they are built. Here that is one system, that of
    seed 0.

    Args:
        task: Domain and task, with a hyphen between them.
        render_mode: "rgb_array" lets `render` return pictures.
        pixels: Side of these pictures.
        camera: Number of the camera that takes them.

    Raises:
        UsageError: The suite has no such task.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(self, task: str, render_mode: str | None = None, pixels: int = PIXELS, camera: int = 0) -> None:
        from dm_control import suite

        names = ["-".join(each) for each in suite.ALL_TASKS]
        if task not in names:
            near = nearest(task, names)
            hint = (
                f"did you mean '{PREFIX}{near}'?"
                if near
                else f"domains: {', '.join(dict.fromkeys(domain for domain, _ in suite.ALL_TASKS))}"
            )
            raise UsageError(f"environment.id: no task called '{PREFIX}{task}'; {hint}")
        self.render_mode = render_mode
        self._pixels, self._camera = pixels, camera
        self._control: Any = suite.load(*task.split("-"), task_kwargs={"random": 0})
        limit = self._control._step_limit
        self.max_steps = math.ceil(limit) if math.isfinite(limit) else None
        """Steps of an episode; None is unlimited."""
        action, seen = self._control.action_spec(), self._control.observation_spec()
        self.action_space = gymnasium.spaces.Box(action.minimum, action.maximum, action.shape, np.float64)
        self.observation_space = gymnasium.spaces.Dict(  # type: ignore[assignment]
            {name: gymnasium.spaces.Box(-np.inf, np.inf, spec.shape, np.float64) for name, spec in seen.items()}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._control.task.random.seed(seed)
        return dict(self._control.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Take one step of control."""
        after = self._control.step(action)
        ended = after.last()
        terminated = ended and after.discount == 0
        return dict(after.observation), float(after.reward or 0.0), terminated, ended and not terminated, {}

    def render(self) -> np.ndarray:
        """Return a picture (pixels, pixels, 3) uint8."""
        return self._control.physics.render(self._pixels, self._pixels, camera_id=self._camera)

    def close(self) -> None:
        """Free the simulation."""
        self._control.physics.free()
