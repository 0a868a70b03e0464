"""Spaces of observations and actions, as plain data.

An observation is one array, or a dict of named arrays, without further nesting. So it is a tree for
`torch.utils._pytree`, and its arrays are its *parts*. The same holds for its space, which has a part's space for each.
An action is one array. Axes in front of those below are batch and time.

| space | observation part | action |
|---|---|---|
| `Image(H, W, C)` | uint8 (H, W, C) | |
| `Vector(N)` | float32 (N,) | |
| `Categories(sizes)` | integers (K,), number k in 0 .. sizes[k] - 1 | the same: multi-discrete, multi-binary |
| `Discrete(A)` | | an integer (), 0 .. A - 1 |
| `Continuous(low, high)` | | float32 (N,), from -1 for `low` to 1 for `high` |

Integers are int32 on disk and int64 in tensors. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SEPARATOR = "."
"""Between the name of a column and that of an observation's part, and between the names of nested dicts."""


@dataclass(frozen=True)
class Image:
    """An image of H x W pixels and C channels, uint8."""

    height: int
    width: int
    channels: int = 3

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W, C)."""
        return self.height, self.width, self.channels

    dtype = np.uint8


@dataclass(frozen=True)
class Vector:
    """N numbers of any size, float32."""

    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,)."""
        return (self.size,)

    @property
    def encoded(self) -> int:
        """Length as the numbers that a network reads."""
        return self.size

    dtype = np.float32


@dataclass(frozen=True)
class Categories:
    """K integers, number k in 0 .. sizes[k] - 1."""

    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(K,)."""
        return (len(self.sizes),)

    @property
    def encoded(self) -> int:
        """Length as the numbers that a network reads: one-hot vectors one behind the other."""
        return sum(self.sizes)

    dtype = np.int32


@dataclass(frozen=True)
class Discrete:
    """One of A actions."""

    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """()."""
        return ()

    @property
    def encoded(self) -> int:
        """Length of an action as the numbers that a network reads: a one-hot vector."""
        return self.count

    dtype = np.int32


@dataclass(frozen=True)
class Continuous:
    """N numbers, scaled from `low` .. `high` in the environment to -1 .. 1 here."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,)."""
        return (len(self.low),)

    @property
    def encoded(self) -> int:
        """Length of an action as the numbers that a network reads: itself."""
        return len(self.low)

    dtype = np.float32


PartSpace = Image | Vector | Categories
ObservationSpace = PartSpace | dict[str, PartSpace]
ActionSpace = Discrete | Categories | Continuous
KINDS: dict[str, type] = {
    "image": Image,
    "vector": Vector,
    "categories": Categories,
    "discrete": Discrete,
    "continuous": Continuous,
}


@dataclass(frozen=True)
class Spaces:
    """The spaces of an environment."""

    observation: ObservationSpace
    action: ActionSpace

    @staticmethod
    def of(environment: Mapping[str, Any]) -> Spaces:
        """Return the spaces of `environment` in a manifest.

        Without an entry `observation`, it shows images of `size` pixels in three colors.
        """
        observation = environment.get("observation", environment["size"])
        return Spaces(to_observation_space(observation), to_action_space(environment["actions"]))

    @staticmethod
    def of_images(size: int, actions: int) -> Spaces:
        """Return those of square images in three colors and discrete actions."""
        return Spaces(Image(size, size), Discrete(actions))

    def describe(self) -> dict[str, Any]:
        """Return the entries of `environment` in a manifest, plain values for JSON: the inverse of `of`."""
        action = self.action.count if isinstance(self.action, Discrete) else _plain(self.action)
        seen = self.observation
        if isinstance(seen, Image) and seen.height == seen.width and seen.channels == 3:
            return {"actions": action}  # as all versions have written it
        return {"actions": action, "observation": map_parts(_plain, seen)}


def to_observation_space(value: int | Mapping[str, Any] | ObservationSpace) -> ObservationSpace:
    """Return a space from the side of a square image in three colors, from plain values, or as it is."""
    if isinstance(value, int):
        return Image(value, value)
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("kind"), str):
        return _space(value)
    return {name: _space(part) if isinstance(part, Mapping) else part for name, part in value.items()}


def to_action_space(value: int | Mapping[str, Any] | ActionSpace) -> ActionSpace:
    """Return a space from a number of actions, from plain values, or as it is."""
    if isinstance(value, int):
        return Discrete(value)
    return _space(value) if isinstance(value, Mapping) else value


def _plain(space: PartSpace | ActionSpace) -> dict[str, Any]:
    kind = next(name for name, each in KINDS.items() if isinstance(space, each))
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(space).items()}
    return {"kind": kind, **values}


def _space(values: Mapping[str, Any]) -> Any:
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return KINDS[str(arguments.pop("kind"))](**arguments)


# -- trees of parts ----------------------------------------------------------------------------------------------------


def parts_of(tree: Any) -> dict[str, Any]:
    """Return the parts of an observation, or of its space, by name. The name of a single part is empty."""
    return tree if isinstance(tree, dict) else {"": tree}


def join_parts(parts: Mapping[str, Any]) -> Any:
    """Return the observation with these parts: the inverse of `parts_of`."""
    return parts[""] if "" in parts else dict(parts)


def map_parts(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call a function on each part of observations or spaces of the same parts; return the tree of its results."""
    if not isinstance(tree, dict):
        return function(tree, *others)
    return {name: function(part, *(other[name] for other in others)) for name, part in tree.items()}


def stack_parts(trees: Sequence[Any]) -> Any:
    """Stack observations (T of them, arrays) into one tree of (T, ...)."""
    return map_parts(lambda *parts: np.stack(parts), *trees)


def row_of(tree: Any, row: int = 0) -> Any:
    """Return one row of an observation of (B, ...)."""
    return map_parts(lambda part: part[row], tree)


def first_part(tree: Any) -> Any:
    """Return the first part, for what all parts have in common, such as batch axes and device."""
    return next(iter(parts_of(tree).values()))


def bytes_of(tree: Any) -> int:
    """Return the memory of all parts. [bytes]"""
    return sum(part.nbytes for part in parts_of(tree).values())


def column_names(column: str, tree: Any) -> dict[str, Any]:
    """Return the parts by the names of their columns: `observation`, or `observation.NAME` for each."""
    return {f"{column}{SEPARATOR}{name}" if name else column: part for name, part in parts_of(tree).items()}


def from_columns(column: str, columns: Mapping[str, Any]) -> Any:
    """Return the tree of the columns called `column` or `column.NAME`: the inverse of `column_names`.

    Raises:
        KeyError: There are none.
    """
    if column in columns:
        return columns[column]
    prefix = f"{column}{SEPARATOR}"
    parts = {name.removeprefix(prefix): value for name, value in columns.items() if name.startswith(prefix)}
    if not parts:
        raise KeyError(column)
    return parts


def images_of(space: ObservationSpace) -> dict[str, Image]:
    """Return the images among the parts, by name."""
    return {name: part for name, part in parts_of(space).items() if isinstance(part, Image)}


def draw_part(space: PartSpace, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw random values (count, *space.shape) of an observation's part."""
    if isinstance(space, Vector):
        return rng.standard_normal((count, *space.shape), np.float32)
    high = 256 if isinstance(space, Image) else np.array(space.sizes)
    return rng.integers(0, high, (count, *space.shape), dtype=space.dtype)


def describe_parts(space: ObservationSpace) -> str:
    """Return an observation space in a few words, such as `64×64 + 12 numbers`."""

    def one(part: PartSpace) -> str:
        if isinstance(part, Image):
            return f"{part.height}×{part.width}" + (f"×{part.channels}" if part.channels != 3 else "")
        return f"{part.shape[0]} {'numbers' if isinstance(part, Vector) else 'categories'}"

    return " + ".join(one(part) for part in parts_of(space).values())


# -- actions -----------------------------------------------------------------------------------------------------------


def draw_actions(space: ActionSpace, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw uniformly random actions (*shape, *space.shape): integers, or float32 in [-1, 1)."""
    if isinstance(space, Continuous):
        return rng.uniform(-1, 1, (*shape, *space.shape)).astype(np.float32)
    high = space.count if isinstance(space, Discrete) else np.array(space.sizes)
    return rng.integers(high, size=(*shape, *space.shape))
