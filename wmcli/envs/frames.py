"""Any gymnasium environment that shows images, as size x size x 3 uint8 frames and actions 0 .. n-1.

H height, W width, C color channel.
"""

from __future__ import annotations

from typing import Any, SupportsInt

import gymnasium
import numpy as np
from gymnasium import spaces
from PIL import Image

from wmcli.errors import UsageError


class Frames(gymnasium.Wrapper[np.ndarray, int, Any, Any]):
    """Resizes and copies observations, and numbers actions from 0.

    Gray images (H, W) or (H, W, 1) get three equal channels. Images that are not square are stretched.

    Raises:
        UsageError: Observations are no uint8 images, or actions are not discrete.
    """

    def __init__(self, env: gymnasium.Env, size: int) -> None:
        super().__init__(env)
        name = env.spec.id if env.spec else type(env.unwrapped).__name__
        height, width = _image_shape(env.observation_space, name)[:2]
        actions = env.action_space
        if not isinstance(actions, spaces.Discrete):
            raise UsageError(f"{name}: its actions are {_describe(actions)}; wm needs discrete actions.")
        self._size = size
        self._filter = resize_filter(height, width, size)
        self._first_action = int(actions.start)
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(int(actions.n))  # type: ignore[assignment]

    @property
    def resizing(self) -> str:
        """How frames are brought to size: `none`, `box`, `nearest` or `bilinear`."""
        return "none" if self._filter is None else self._filter.name.lower()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """As the environment's own, with the frame brought to size."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._frame(observation), info

    def step(self, action: SupportsInt) -> tuple[np.ndarray, float, bool, bool, dict]:
        """As the environment's own, with the frame brought to size."""
        observation, reward, terminated, truncated, info = self.env.step(self._first_action + int(action))
        return self._frame(observation), float(reward), terminated, truncated, info

    def _frame(self, image: np.ndarray) -> np.ndarray:
        if image.ndim == 2:
            image = image[:, :, None]
        if image.shape[2] == 1:
            image = image.repeat(3, axis=2)  # (H, W, 1) -> (H, W, 3)
        if self._filter is None:
            return image.copy()  # environments may draw the next frame into the same buffer
        return np.array(Image.fromarray(np.ascontiguousarray(image)).resize((self._size, self._size), self._filter))


def resize_filter(height: int, width: int, size: int) -> Image.Resampling | None:
    """Return the filter that resizes (height, width) to (size, size), or None for equal sizes.

    Box for integer reduction (the mean of each area), nearest for enlarging (no new colors), else Pillow's bilinear
    filter, which is antialiased.
    """
    if height == width == size:
        return None
    if height % size == 0 and width % size == 0:
        return Image.Resampling.BOX
    if height <= size and width <= size:
        return Image.Resampling.NEAREST
    return Image.Resampling.BILINEAR


def _image_shape(space: spaces.Space, name: str) -> tuple[int, ...]:
    if isinstance(space, spaces.Box) and space.dtype == np.uint8:
        shape = tuple(space.shape)
        if (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))) and min(shape) > 0:
            return shape
    raise UsageError(
        f"{name}: its observations are {_describe(space)}; wm needs images, "
        f"uint8 of shape (H, W), (H, W, 1) or (H, W, 3)."
    )


def _describe(space: spaces.Space) -> str:
    if isinstance(space, spaces.Dict):
        return f"a Dict of {', '.join(space.spaces)}"
    if isinstance(space, spaces.Box):
        return f"a Box of {space.dtype} {space.shape}"
    return f"a {type(space).__name__}"
