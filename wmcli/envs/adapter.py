"""Any gymnasium environment with the observations and actions of `wmcli.spaces`.

H height, W width, C channels, S stacked frames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces as gym
from PIL import Image as Picture

from wmcli.errors import UsageError
from wmcli.spaces import (
    ActionSpace,
    Categories,
    Continuous,
    Discrete,
    Image,
    ObservationSpace,
    PartSpace,
    Spaces,
    Vector,
    join_parts,
)

MOST_CHANNELS = 64
FEW_CHANNELS = 16  # an image with so few on its first axis, and more pixels, has its channels there
IN_A_NAME = re.compile(r"[^A-Za-z0-9_ .-]")  # whatever a column cannot be called


class Part(NamedTuple):
    """A part of an observation, and how to take it out."""

    name: str
    path: tuple[Any, ...]
    """Keys and indices that lead to it."""
    space: PartSpace
    convert: Callable[[Any], np.ndarray]
    """From the environment's values to those of `space`, in memory of its own."""
    resizing: str | None
    """How an image is brought to size: `none`, `box`, `nearest` or `bilinear`."""


class Adapted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Brings observations and actions of an environment to the form of `wmcli.spaces`.

    Images are resized to size x size, those that are not square are stretched. Gray ones get three equal channels.
    Channels on the first axis, and stacked frames, become channels on the last. Other arrays of numbers become vectors,
    discrete parts categories. Nested observations become one dict, with dots in its names.

    Raises:
        UsageError: An observation or the actions are of another kind.
    """

    def __init__(self, env: gymnasium.Env, size: int) -> None:
        super().__init__(env)
        name = env.spec.id if env.spec else type(env.unwrapped).__name__
        self.parts = list(_parts(env.observation_space, size, name))
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names) or not names:
            raise UsageError(f"{name}: its observations have parts {', '.join(names)}; their names must differ.")
        action, self._to_action = _action(env.action_space, name)
        observation: ObservationSpace = join_parts({part.name: part.space for part in self.parts})
        self.spaces = Spaces(observation, action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """As the environment's own, with the observation converted."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._convert(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """As the environment's own, with action and observation converted."""
        observation, reward, terminated, truncated, info = self.env.step(self._to_action(action))
        return self._convert(observation), float(reward), terminated, truncated, info

    def _convert(self, observation: Any) -> Any:
        converted = {}
        for part in self.parts:
            value = observation
            for key in part.path:
                value = value[key]
            converted[part.name] = part.convert(value)
        return join_parts(converted)


# -- observations -----------------------------------------------------------------------------------------------------


def _parts(space: gymnasium.Space, size: int, env: str, path: tuple[Any, ...] = ()) -> Iterator[Part]:
    """Yield the parts of an observation space."""
    if isinstance(space, gym.Dict | gym.Tuple):
        inside = space.spaces.items() if isinstance(space, gym.Dict) else enumerate(space.spaces)
        for key, each in inside:
            yield from _parts(each, size, env, (*path, key))
        return
    name = IN_A_NAME.sub("_", ".".join(map(str, path)))
    if isinstance(space, gym.Box):
        images = space.dtype == np.uint8 and len(space.shape) > 1
        yield (_image if images else _vector)(space, size, env, name, path)
    elif isinstance(space, gym.Discrete | gym.MultiDiscrete | gym.MultiBinary):
        sizes, start = _categories(space)
        part = Categories(sizes)
        yield Part(name, path, part, lambda value: (np.asarray(value).reshape(-1) - start).astype(np.int32), None)
    else:
        raise _refused(env, name, space)


def _categories(space: gym.Discrete | gym.MultiDiscrete | gym.MultiBinary) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the sizes of the categories of a space, and the first value of each."""
    if isinstance(space, gym.Discrete):
        return (int(space.n),), np.array([space.start])
    if isinstance(space, gym.MultiDiscrete):
        return tuple(int(size) for size in space.nvec.reshape(-1)), np.asarray(space.start).reshape(-1)
    return (2,) * int(np.prod(space.shape)), np.zeros(1, np.int64)


def _vector(space: gym.Box, size: int, env: str, name: str, path: tuple[Any, ...]) -> Part:
    if len(space.shape) > 2 or 0 in space.shape:
        raise _refused(env, name, space)
    part = Vector(int(np.prod(space.shape)))
    return Part(name, path, part, lambda value: np.array(value, np.float32).reshape(-1), None)


def _image(space: gym.Box, size: int, env: str, name: str, path: tuple[Any, ...]) -> Part:
    order = _channels_last(space.shape)
    if order is None:
        raise _refused(env, name, space)
    height, width, channels = order(np.empty(space.shape, np.uint8)).shape
    resample = resize_filter(height, width, size)
    shown = 3 if channels == 1 else channels

    def convert(value: np.ndarray) -> np.ndarray:
        image = order(value)
        if channels == 1:
            image = image.repeat(3, axis=2)  # (H, W, 1) -> (H, W, 3)
        if resample is None:
            return image.copy()  # environments may draw the next frame into the same buffer
        return resize(image, size, resample)

    how = "none" if resample is None else resample.name.lower()
    return Part(name, path, Image(size, size, shown), convert, how)


def _channels_last(shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return what brings images of a shape to (H, W, C), or None where it is none of an image."""
    if min(shape) == 0:
        return None
    if len(shape) == 2:
        return lambda image: image[:, :, None]
    if len(shape) == 3:
        first, last = shape[0], shape[2]
        if last in (1, 3):
            return lambda image: image
        if first <= FEW_CHANNELS and first < min(shape[1:]):
            return lambda image: np.moveaxis(image, 0, 2)
        return (lambda image: image) if last <= MOST_CHANNELS and last < min(shape[:2]) else None
    if len(shape) == 4 and shape[3] in (1, 3) and shape[0] * shape[3] <= MOST_CHANNELS:  # (S, H, W, C)
        return lambda image: np.moveaxis(image, 0, 2).reshape(*shape[1:3], -1)
    return None


def resize_filter(height: int, width: int, size: int) -> Picture.Resampling | None:
    """Return the filter that resizes (height, width) to (size, size), or None for equal sizes.

    Box for integer reduction (the mean of each area), nearest for enlarging (no new colors), else Pillow's bilinear
    filter, which is antialiased.
    """
    if height == width == size:
        return None
    if height % size == 0 and width % size == 0:
        return Picture.Resampling.BOX
    if height <= size and width <= size:
        return Picture.Resampling.NEAREST
    return Picture.Resampling.BILINEAR


def resize(image: np.ndarray, size: int, resample: Picture.Resampling) -> np.ndarray:
    """Resize an image (H, W, C) uint8 to (size, size, C)."""
    if image.shape[2] == 3:
        return np.array(Picture.fromarray(np.ascontiguousarray(image)).resize((size, size), resample))
    channels = [Picture.fromarray(np.ascontiguousarray(each)) for each in np.moveaxis(image, 2, 0)]
    return np.stack([np.asarray(each.resize((size, size), resample)) for each in channels], axis=2)


# -- actions ----------------------------------------------------------------------------------------------------------


def _action(space: gymnasium.Space, env: str) -> tuple[ActionSpace, Callable[[Any], Any]]:
    """Return the action space, and what converts its actions to the environment's."""
    if isinstance(space, gym.Discrete):
        first = int(space.start)
        return Discrete(int(space.n)), lambda action: first + int(action)
    if isinstance(space, gym.MultiDiscrete | gym.MultiBinary):
        sizes, start = _categories(space)
        return Categories(sizes), lambda action: (np.asarray(action) + start).astype(space.dtype).reshape(space.shape)
    if isinstance(space, gym.Box) and space.dtype is not None and space.dtype.kind == "f" and space.is_bounded():
        low, high = (bound.astype(np.float64).reshape(-1) for bound in (space.low, space.high))

        def scaled(action: Any) -> np.ndarray:
            share = (np.clip(np.asarray(action, np.float64), -1, 1) + 1) / 2
            value = np.clip(low + share * (high - low), low, high)
            return value.astype(space.dtype).reshape(space.shape)

        return Continuous(tuple(low.tolist()), tuple(high.tolist())), scaled
    remedy = ""
    if isinstance(space, gym.Box):
        remedy = "; bound them with a wrapper, as in --set environment.wrappers=[module:Class]"
    raise UsageError(
        f"{env}: its actions are {_describe(space)}; wm takes Discrete, MultiDiscrete, MultiBinary and bounded Boxes of"
        f" floats{remedy}."
    )


def _refused(env: str, name: str, space: gymnasium.Space) -> UsageError:
    where = f" {name}" if name else ""
    return UsageError(
        f"{env}: its observations{where} are {_describe(space)}; wm takes images (uint8 with 1 to {MOST_CHANNELS}"
        " channels), Boxes with up to two axes, Discrete, MultiDiscrete, MultiBinary, and dicts and tuples of these:"
        " convert it with a wrapper, as in --set environment.wrappers=[module:Class]."
    )


def _describe(space: gymnasium.Space) -> str:
    if isinstance(space, gym.Dict):
        return f"a Dict of {', '.join(space.spaces)}"
    if isinstance(space, gym.Box):
        return f"a Box of {space.dtype} {space.shape}" + ("" if space.is_bounded() else " without bounds")
    return f"a {type(space).__name__}"
