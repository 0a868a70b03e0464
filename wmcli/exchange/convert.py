"""From the arrays of a reader to episodes in wm's form: what the spaces are, and every check of every value.

Axes: T decisions; n observations, T or T + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image as Picture

from wmcli.envs.adapter import resize_filter
from wmcli.exchange.episode import Episode, Recording
from wmcli.exchange.safe import MAX_EPISODES, refuse
from wmcli.spaces import (
    ActionSpace,
    Categories,
    Continuous,
    Discrete,
    Image,
    PartSpace,
    Spaces,
    Vector,
    join_parts,
    parts_of,
)

CLOSE = 1e-4  # of the range: actions that are out of their bounds by no more are rounded to them
MOST_CATEGORIES = 1024  # larger numbers are quantities
MOST_ACTIONS = 65536
PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_ .-]{0,78}[A-Za-z0-9_ -])?")


class Raw(NamedTuple):
    """One episode as its file has it, except that outcomes follow their action."""

    observation: dict[str, np.ndarray]
    """Parts (n, ...) by name; the name of a single part may be empty."""
    action: np.ndarray
    """(T, ...)."""
    reward: np.ndarray
    """(T,)."""
    terminated: np.ndarray
    """(T,)."""
    truncated: np.ndarray
    """(T,)."""


@dataclass
class Stated:
    """What a source says about its spaces."""

    observation: dict[str, PartSpace] = field(default_factory=dict)
    """Of some parts or all."""
    action: ActionSpace | None = None
    spaces: Spaces | None = None
    """Of data that wm wrote, which is in its own form already."""


class Reader(Protocol):
    """A source of episodes. Making one reads what says where they are, not their arrays."""

    format: str
    name: str
    lossy: str | None
    notes: list[str]
    source: dict[str, Any]
    stated: Stated

    def __len__(self) -> int:
        """Return the number of episodes."""
        ...

    def where(self, index: int) -> str:
        """Return the place of an episode for messages."""
        ...

    def read(self, index: int) -> Raw:
        """Read an episode. Raises UsageError if it is damaged."""
        ...

    def action(self, index: int) -> np.ndarray:
        """Read only its actions."""
        ...


def recording_of(
    reader: Reader, *, size: int | None = None, parts: Sequence[str] = (), spaces: Spaces | None = None
) -> Recording:
    """Find the spaces of a source and return its episodes.

    Args:
        reader: The source.
        size: Height and width that images are resized to; None leaves them.
        parts: Names of the parts of the observation to read; all if empty.
        spaces: Those of an environment that the episodes must fit. Actions are scaled by its bounds.

    Raises:
        UsageError: There are no episodes, or the first one has parts without a space. Any of them, if its actions
            have none.
    """
    if not 0 < len(reader) <= MAX_EPISODES:
        raise refuse(reader.where(0) if len(reader) else reader.name, f"{len(reader)} episodes")
    notes = list(reader.notes)
    known = reader.stated.spaces if spaces is None else spaces
    first = reader.read(0)
    if not len(first.action):
        raise refuse(reader.where(0), "an episode without an action")
    chosen = _chosen(first.observation, parts, reader.where(0))
    single = len(chosen) == 1 and (known is None or not isinstance(known.observation, dict))
    if known is not None:
        observation, action = parts_of(known.observation), known.action
        if parts and spaces is None and set(chosen) <= set(observation):
            observation = {name: observation[name] for name in chosen}
        if not single and set(observation) != set(chosen):
            raise refuse(reader.where(0), f"parts {', '.join(chosen)}, not {', '.join(observation)}")
    else:
        stated = {} if reader.stated.observation is None else reader.stated.observation
        observation = {name: stated.get(name) or _part_of(reader, name, first, notes) for name in chosen}
        action = reader.stated.action or _action_of(reader, notes)
        if single:
            observation = {"": next(iter(observation.values()))}
    if size is not None:
        observation = {
            name: Image(size, size, part.channels) if isinstance(part, Image) else part
            for name, part in observation.items()
        }
    found = Spaces(join_parts(observation), action)
    is_ours = reader.stated.spaces is not None

    def read(index: int) -> Episode:
        raw, where = reader.read(index), reader.where(index)
        seen = {name: raw.observation[name] for name in _chosen(raw.observation, chosen, where)}
        seen = {"": next(iter(seen.values()))} if single else seen
        return _episode(raw, seen, found, size, is_ours, where)

    return Recording(
        slug(reader.name), reader.format, found, len(reader), read, reader.lossy, tuple(notes), reader.source
    )


def split_at(ended: np.ndarray) -> list[tuple[int, int]]:
    """Return the first row and the row behind the last of each run of rows, of which only the last may be set."""
    stops = np.flatnonzero(ended) + 1
    if not len(stops) or stops[-1] < len(ended):
        stops = np.append(stops, len(ended))
    return list(zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True))


def slug(name: str) -> str:
    """Return a name of letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "recording"


def _chosen(observation: Mapping[str, np.ndarray], parts: Iterable[str], where: str) -> list[str]:
    """Return the names of the parts to read."""
    missing = [name for name in parts if name not in observation]
    if missing or not observation:
        raise refuse(where, f"has no observation {', '.join(missing)}; it has {', '.join(observation) or 'none'}")
    for name in observation:
        if name and not PART.fullmatch(name):
            raise refuse(where, f"{name[:80]!r} cannot name a part of an observation; rename it")
    return list(parts) or list(observation)


# -- spaces ------------------------------------------------------------------------------------------------------------


def _part_of(reader: Reader, name: str, first: Raw, notes: list[str]) -> PartSpace:
    """Return the space of a part that the source does not state."""
    array, where = first.observation[name], f"{reader.where(0)}: observation {name}".rstrip()
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return Image(*_channels_last(array).shape[1:])
    if array.dtype.kind not in "biuf" or array.ndim > 3 or not array.ndim:
        raise refuse(where, f"{array.dtype} {array.shape[1:]} is neither an image in uint8 nor a vector")
    width = int(np.prod(array.shape[1:]))
    if array.dtype.kind == "b":
        return Categories((2,) * width)
    if array.dtype.kind == "f" or array.dtype == np.uint8:
        return Vector(width)
    lowest, largest = _range((_flat(reader.read(index).observation[name]) for index in range(len(reader))), width)
    if (lowest < 0).any() or (largest >= MOST_CATEGORIES).any():
        return Vector(width)
    notes.append(f"observation {name}: categories are counted from the data".replace(" :", ":"))
    return Categories(tuple(int(each) + 1 for each in largest))


def _action_of(reader: Reader, notes: list[str]) -> ActionSpace:
    """Return the space of actions of a source that does not state it, from all of them."""
    first, where = reader.action(0), reader.where(0)
    if first.ndim not in (1, 2) or first.dtype.kind not in "biuf" or 0 in first.shape[1:]:
        raise refuse(where, f"actions are {first.dtype} {first.shape[1:]}, not numbers or vectors of numbers")
    is_vector, width = first.ndim == 2, first[:1].size
    hot = is_vector and width > 1 and all(_is_one_hot(reader.action(index)) for index in range(len(reader)))
    if hot:
        notes.append("actions are one-hot vectors")
        return Discrete(width)
    lowest, largest = _range((_flat(reader.action(index)) for index in range(len(reader))), width)
    if first.dtype.kind in "biu":
        if (lowest < 0).any() or (largest >= MOST_ACTIONS).any():
            raise refuse(where, f"actions from {lowest.min():g} to {largest.max():g} are no numbers of actions")
        counts = tuple(int(each) + 1 for each in largest)
        notes.append(f"numbers of actions are counted from the data: {', '.join(map(str, counts))}")
        return Categories(counts) if is_vector and width > 1 else Discrete(counts[0])
    if not np.isfinite([lowest, largest]).all():
        raise refuse(where, "actions are not finite")
    return bounded(lowest, largest, notes)


def bounded(lowest: np.ndarray, largest: np.ndarray, notes: list[str]) -> Continuous:
    """Return the space of continuous actions without stated bounds, from the extremes of the data (N,)."""
    if max(-lowest.min(), largest.max()) <= 1:
        notes.append("actions lie within -1 and 1, which are taken as their bounds")
        lowest, largest = -np.ones_like(lowest), np.ones_like(largest)
    else:
        notes.append("bounds of actions are those of the data")
        still = lowest == largest
        lowest, largest = np.where(still, lowest - 1, lowest), np.where(still, largest + 1, largest)
    return Continuous(tuple(map(float, lowest)), tuple(map(float, largest)))


def _is_one_hot(action: np.ndarray) -> bool:
    return action.ndim == 2 and bool(
        ((action == 1).sum(1) == 1).all() and (np.count_nonzero(action, axis=1) == 1).all()
    )


def _range(arrays: Iterator[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest value of each of `width` columns, float64."""
    lowest, largest = np.full(width, np.inf), np.full(width, -np.inf)
    for array in arrays:
        if array.size and array.shape[1] == width:  # `read` refuses others
            lowest, largest = np.minimum(lowest, array.min(0)), np.maximum(largest, array.max(0))
    return lowest, largest


def _flat(array: np.ndarray) -> np.ndarray:
    """(n, ...) to (n, K)."""
    return array.reshape(len(array), -1) if len(array) else array.reshape(0, 1)


# -- values ------------------------------------------------------------------------------------------------------------


def _episode(
    raw: Raw, seen: dict[str, np.ndarray], spaces: Spaces, size: int | None, is_ours: bool, where: str
) -> Episode:
    time = len(raw.action)
    if not time:
        raise refuse(where, "an episode without an action")
    lengths = {len(part) for part in seen.values()}
    if len(lengths) != 1 or not lengths <= {time, time + 1}:
        raise refuse(where, f"{', '.join(map(str, sorted(lengths)))} observations for {time} actions")
    reward = _numbers(raw.reward, (time,), f"{where}: reward").astype(np.float32)
    terminated, truncated = (
        _flags(getattr(raw, name), time, f"{where}: {name}") for name in ("terminated", "truncated")
    )
    if (terminated | truncated)[:-1].any():
        raise refuse(where, "ends before its last action")
    if lengths == {time + 1} and not (terminated[-1] or truncated[-1]):
        truncated[-1] = True  # what follows is known, so the recording was cut off there
    wanted = parts_of(spaces.observation)
    if set(seen) != set(wanted):
        raise refuse(where, f"parts {', '.join(seen)}, not {', '.join(wanted)}")
    parts = {name: _part(seen[name], space, size, f"{where}: observation {name}") for name, space in wanted.items()}
    action = _action(raw.action, spaces.action, is_ours, f"{where}: action")
    return Episode(join_parts(parts), action, reward, terminated, truncated)


def _part(array: np.ndarray, space: PartSpace, size: int | None, where: str) -> np.ndarray:
    if isinstance(space, Image):
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise refuse(where, f"{array.dtype} {array.shape[1:]} is no image in uint8")
        image = _channels_last(array)
        image = resized(image, size) if size is not None else image
        if image.shape[1:] != space.shape:
            raise refuse(where, f"images are {image.shape[1:]}, not {space.shape}; to resize them: --size")
        return image
    flat = _numbers(array, None, where)
    flat = flat.reshape(len(flat), -1)
    if flat.shape[1:] != space.shape:
        raise refuse(where, f"{flat.shape[1]} numbers, not {space.shape[0]}")
    if isinstance(space, Vector):
        with np.errstate(over="ignore"):
            vector = flat.astype(np.float32)
        if not np.isfinite(vector).all():
            raise refuse(where, "numbers too large for float32")
        return vector
    return _categories(flat, np.array(space.sizes), where)


def _action(action: np.ndarray, space: ActionSpace, is_ours: bool, where: str) -> np.ndarray:
    _numbers(action, None, where)
    if isinstance(space, Continuous):
        flat = action.reshape(len(action), -1)
        if flat.shape[1:] != space.shape:
            raise refuse(where, f"{flat.shape[1]} numbers, not {space.shape[0]}")
        return to_unit(flat, space, where) if not is_ours else to_unit(flat, _unit(space), where)
    if isinstance(space, Discrete):
        if action.ndim == 2 and action.shape[1] == space.count > 1:
            if not _is_one_hot(action):
                raise refuse(where, "no one-hot vectors")
            action = action.argmax(1)
        return _categories(action.reshape(len(action), -1), np.array([space.count]), where)[:, 0]
    return _categories(action.reshape(len(action), -1), np.array(space.sizes), where)


def _unit(space: Continuous) -> Continuous:
    return Continuous((-1.0,) * len(space.low), (1.0,) * len(space.low))


def to_unit(action: np.ndarray, space: Continuous, where: str) -> np.ndarray:
    """Scale actions (T, N) from their bounds to [-1, 1], float32.

    Raises:
        UsageError: Some are out of bounds by more than rounding.
    """
    low, high = np.array(space.low), np.array(space.high)
    scaled = action.astype(np.float64)
    if not ((low == -1) & (high == 1)).all():
        scaled = (scaled - low) / (high - low) * 2 - 1
    if np.abs(scaled).max() > 1 + CLOSE:
        row, number = np.argwhere(np.abs(scaled) > 1 + CLOSE)[0]
        limits = f"{low[number]:g} to {high[number]:g}"
        raise refuse(where, f"{action[row, number]:g} in row {row} is out of range, {limits}")
    return np.clip(scaled, -1, 1).astype(np.float32)


def _categories(values: np.ndarray, sizes: np.ndarray, where: str) -> np.ndarray:
    """Integers (n, K), checked against their numbers of values (K,), as int32."""
    if values.shape[1] != len(sizes):
        raise refuse(where, f"{values.shape[1]} numbers, not {len(sizes)}")
    whole = values.astype(np.int64)
    if values.dtype.kind == "f" and (whole != values).any():
        raise refuse(where, "holds fractions, not numbers of categories")
    if ((whole < 0) | (whole >= sizes)).any():
        row, number = np.argwhere((whole < 0) | (whole >= sizes))[0]
        raise refuse(where, f"{whole[row, number]} in row {row} is out of range, 0 to {sizes[number] - 1}")
    return whole.astype(np.int32)


def _numbers(array: np.ndarray, shape: tuple[int, ...] | None, where: str) -> np.ndarray:
    """Finite numbers (n, ...)."""
    if shape is not None and array.shape != shape:
        if array.shape == (*shape, 1):
            return _numbers(array[..., 0], shape, where)
        raise refuse(where, f"shape {array.shape}, not {shape}")
    if array.dtype.kind not in "biuf":
        raise refuse(where, f"{array.dtype}, not numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise refuse(where, "holds NaN or infinity")
    return array


def _flags(array: np.ndarray, time: int, where: str) -> np.ndarray:
    """Booleans (T,), a copy."""
    numbers = _numbers(array, (time,), where)
    if not np.isin(numbers, (0, 1)).all():
        raise refuse(where, "holds other numbers than 0 and 1")
    return numbers.astype(bool)


def _channels_last(array: np.ndarray) -> np.ndarray:
    """Images (n, H, W), (n, H, W, C) or (n, C, H, W) as (n, H, W, C)."""
    if array.ndim == 3:
        return array[..., None]
    few = (1, 3, 4)
    return np.moveaxis(array, 1, -1) if array.shape[1] in few and array.shape[3] not in few else array


def resized(images: np.ndarray, size: int) -> np.ndarray:
    """Resize images (n, H, W, C), as environments do, to (n, size, size, C)."""
    height, width, channels = images.shape[1:]
    method = resize_filter(height, width, size)
    if method is None:
        return images

    def one(image: np.ndarray) -> np.ndarray:
        return np.array(Picture.fromarray(np.ascontiguousarray(image)).resize((size, size), method))

    if channels == 3:
        return np.stack([one(image) for image in images])
    return np.stack([np.stack([one(image[..., channel]) for channel in range(channels)], -1) for image in images])


def check_spaces(where: str, values: Any) -> Spaces:
    """Read the spaces that wm wrote into a recording. Raises UsageError if they are none."""
    try:
        spaces = Spaces.of({"size": 0, **values})
        for part in (*parts_of(spaces.observation).values(), spaces.action):
            values = vars(part).values()
            numbers = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
            fine = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
            whole = isinstance(part, Continuous) or all(isinstance(each, int) and each > 0 for each in numbers)
            if not numbers or not fine or not whole or not np.isfinite(numbers).all():
                raise ValueError(f"{part}")
        return spaces
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise refuse(where, f"describes no spaces: {error}") from None


def spaces_entry(spaces: Spaces) -> dict[str, Any]:
    """Return spaces as plain values: the inverse of `check_spaces`."""
    described = spaces.describe()
    return described if "observation" in described else {"size": parts_of(spaces.observation)[""].height, **described}
