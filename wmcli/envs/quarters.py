"""`wm/Quarters-v0`: a small task with an image, numbers and a category, and with any kind of actions.

A board of 64 x 64 pixels has four quarters in four colors, in random order. A white puck of 8 pixels starts in the
middle with a random velocity. It keeps its velocity, a push changes it, and a wall stops it. The episode ends after 12
steps: +1 if the puck's center is in the quarter of the color that was named, else -1; every reward before that is 0.

The colors are in random order, so whoever does not know both them and the named one wins one episode of four: random
play has a mean return of exactly 2/4 - 1 = -0.5. Every quarter can be reached from every start, with any kind of
actions, so the best return is always +1.

Keyword arguments:

- `observed`: "all" is a dict: `image` has the board, `velocity` the puck's velocity, `color` the named color. "image"
  is the image alone, with the named color as its border. "vector" is six numbers: the puck's place, its velocity, and
  the direction of the named quarter.
- `actions`: "discrete" is nothing, or a push left, right, up or down. "multi-discrete" is left, nothing or right, and
  up, nothing or down. "continuous" is a push of any strength, right and down, each from -1 to 1.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

QUARTERS_ID = "wm/Quarters-v0"
SIDE = 64  # pixels
MIDDLE = SIDE / 2
BORDER = 4  # pixels
PUCK = 8  # pixels
NEAREST = BORDER + PUCK / 2  # of the puck's center to the edge of the board, pixels
STEPS = 12  # of an episode
FASTEST_START = 4.0  # pixels a step, along each axis
PUSH = 2.0  # pixels a step, at most, along each axis
# Red, green, blue and yellow, all dark: bright quarters would be nearly all there is to reconstruct.
COLORS = np.array([(80, 30, 30), (30, 66, 36), (30, 42, 84), (86, 72, 30)], np.uint8)
WHITE = (255, 255, 255)
BACKGROUND = (16, 16, 24)
PUSHES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], np.float64)  # right and down, of discrete actions
CORNERS = np.array([(-1, -1), (1, -1), (-1, 1), (1, 1)], np.float64)  # right and down, of the quarters

Observed = Literal["all", "image", "vector"]
Actions = Literal["discrete", "multi-discrete", "continuous"]


class Quarters(gymnasium.Env[Any, Any]):
    """The puck on the board. Places and velocities are (right, down).

    Args:
        observed: Parts to observe.
        actions: Kind of actions.
        render_mode: "rgb_array", for `render`.

    Raises:
        ValueError: An argument has another value.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self, observed: Observed = "all", actions: Actions = "discrete", render_mode: str | None = None
    ) -> None:
        image = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        seen: dict[str, gymnasium.Space] = {
            "all": spaces.Dict(
                {"image": image, "velocity": spaces.Box(-np.inf, np.inf, (2,)), "color": spaces.Discrete(len(COLORS))}
            ),
            "image": image,
            "vector": spaces.Box(-np.inf, np.inf, (6,)),
        }
        acted: dict[str, gymnasium.Space] = {
            "discrete": spaces.Discrete(len(PUSHES)),
            "multi-discrete": spaces.MultiDiscrete([3, 3]),
            "continuous": spaces.Box(-1, 1, (2,)),
        }
        for name, value, choices in (("observed", observed, seen), ("actions", actions, acted)):
            if value not in choices:
                raise ValueError(f"{name} = {value!r}: choose one of {', '.join(choices)}")
        self.observation_space, self.action_space = seen[observed], acted[actions]
        self.render_mode = render_mode
        self._observed, self._actions = observed, actions
        self._time = STEPS
        self._place = self._velocity = np.zeros(2)  # pixels, and pixels a step
        self._colors = np.arange(len(CORNERS))  # of each quarter
        self._target = 0  # quarter

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Place the puck in the middle. Velocity, colors and the named one depend on the seed alone."""
        super().reset(seed=seed)
        self._time = 0
        self._place = np.full(2, MIDDLE)
        self._velocity = self.np_random.uniform(-FASTEST_START, FASTEST_START, 2)
        self._colors = self.np_random.permutation(len(COLORS))
        self._target = int(self.np_random.integers(len(CORNERS)))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Push the puck, then let it move."""
        assert self._time < STEPS, "the episode is over: reset first"
        self._time += 1
        self._velocity = self._velocity + PUSH * self._push(action)
        free = self._place + self._velocity
        self._place = np.clip(free, NEAREST, SIDE - NEAREST)
        self._velocity = np.where(self._place == free, self._velocity, 0.0)
        ended = self._time == STEPS
        arrived = bool(((self._place >= MIDDLE) == (CORNERS[self._target] > 0)).all())
        reward = (1.0 if arrived else -1.0) if ended else 0.0
        return self._observe(), reward, ended, False, {}

    def render(self) -> np.ndarray:
        """Return the image of "image", (64, 64, 3) uint8: it shows all but the velocity."""
        return self._draw(COLORS[self._colors[self._target]])

    def _push(self, action: Any) -> np.ndarray:
        if self._actions == "discrete":
            return PUSHES[int(action)]
        if self._actions == "multi-discrete":
            return np.asarray(action, np.float64) - 1
        return np.clip(np.asarray(action, np.float64), -1, 1)

    def _observe(self) -> Any:
        velocity = (self._velocity / PUCK).astype(np.float32)
        if self._observed == "vector":
            place = ((self._place - MIDDLE) / MIDDLE).astype(np.float32)
            return np.concatenate([place, velocity, CORNERS[self._target].astype(np.float32)])
        if self._observed == "image":
            return self.render()
        return {"image": self._draw(BACKGROUND), "velocity": velocity, "color": int(self._colors[self._target])}

    def _draw(self, border: Any) -> np.ndarray:
        image = COLORS[self._colors].reshape(2, 2, 3).repeat(SIDE // 2, axis=0).repeat(SIDE // 2, axis=1)
        image[:BORDER] = image[-BORDER:] = image[:, :BORDER] = image[:, -BORDER:] = border
        left, top = (self._place - PUCK / 2).round().astype(int)
        image[top : top + PUCK, left : left + PUCK] = WHITE
        return image
