"""Minari datasets, read and written in its HDF5 layout, without the minari package.

`data/metadata.json` has the spaces as text, `data/main_data.hdf5` a group `episode_N` for each episode: `observations`
with T + 1 rows, `actions`, `rewards`, `terminations` and `truncations` with T rows. Dicts are groups. Images of 32
pixels and more are JPEG files in rows of bytes unless `jpeg_encoding` is false. Ours are never.

An episode whose closing observation is unknown gets the last one again, since Minari needs one. The metadata say so,
and our reader drops it.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image as Picture

from wmcli.exchange.convert import Raw, Stated, check_spaces, spaces_entry
from wmcli.exchange.episode import Recording
from wmcli.exchange.hdf5 import DEEPEST, dataset, opened, subgroup, values
from wmcli.exchange.safe import MAX_ARRAY, inside, load_library, read_json, refuse
from wmcli.spaces import (
    SEPARATOR,
    ActionSpace,
    Categories,
    Continuous,
    Discrete,
    Image,
    Vector,
    map_parts,
    parts_of,
)

if TYPE_CHECKING:
    import h5py

PREFIX = "minari:"
METADATA, MAIN = "data/metadata.json", "data/main_data.hdf5"
VERSION = "0.5.3"
"""Version of Minari's layout that we write."""
OURS = "wm"
"""Key of metadata.json for what only wm reads."""
SOURCE = ("dataset_id", "author", "algorithm_name", "code_permalink", "description", "license", "minari_version")
"""Keys of metadata.json that say where the data come from."""
JPEG = "jpeg (minari)"


def folder_of(name: str) -> Path:
    """Return the folder of a dataset `minari:ID`.

    Raises:
        UsageError: It is no name, or the dataset was not downloaded.
    """
    dataset_id = name.removeprefix(PREFIX)
    if not re.fullmatch(r"[\w-]+(/[\w-]+)*", dataset_id):
        raise refuse(name, "no name of a Minari dataset, such as minari:mujoco/hopper/expert-v0")
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")
    if not (root / dataset_id / METADATA).is_file():
        raise refuse(root / dataset_id, f"no such dataset; fetch it with: minari download {dataset_id}")
    return root / dataset_id


class Leaf(NamedTuple):
    """A part of an observation, or the action, as metadata.json describes it."""

    path: tuple[str, ...]
    """Names of the groups above the array, and its own."""
    shape: tuple[int, ...]
    """Of one row."""
    space: Any
    """Its space as a part of an observation; None: it is found from the data."""
    action: ActionSpace | None
    """Its space as an action; None: it is found from the data."""
    start: np.ndarray | int = 0
    """Number of the first category."""
    is_image: bool = False


class Minari:
    """A reader of the folder of one dataset."""

    format = "minari"

    def __init__(self, path: Path) -> None:
        self.path, where = path, str(path / METADATA)
        metadata = read_json(inside(path, METADATA))
        if metadata.get("data_format", "hdf5") != "hdf5":
            raise refuse(path, f"its data_format is {str(metadata['data_format'])[:40]!r}; only hdf5 is read")
        self.name = str(metadata.get("dataset_id", path.resolve().name))
        self.source = {key: metadata[key] for key in SOURCE if metadata.get(key)}
        if environment := _environment(metadata.get("env_spec")):
            self.source["environment"] = environment
        self.notes: list[str] = []
        self.lossy: str | None = None
        self._seen = {
            SEPARATOR.join(leaf.path) or "": leaf for leaf in _leaves(metadata, "observation_space", where, self.notes)
        }
        actions = _leaves(metadata, "action_space", where, self.notes)
        if len(actions) != 1 or actions[0].path:
            raise refuse(where, "actions of several parts; one Box, Discrete, MultiDiscrete or MultiBinary is read")
        self._action = actions[0]
        self._repeated: set[int] = set()
        self.stated = Stated({name: leaf.space for name, leaf in self._seen.items() if leaf.space}, self._action.action)
        if isinstance(ours := metadata.get(OURS), dict):
            self._read_ours(ours, where)
        self._file = inside(path, MAIN)
        with opened(self._file) as file:
            found = [int(match[1]) for name in file if (match := re.fullmatch(r"episode_([0-9]{1,9})", name))]
            if not found:
                raise refuse(self._file, "no episodes in it")
            self._episodes = sorted(found)
            group = subgroup(file, f"episode_{self._episodes[0]}", self._file)
            if any(self._is_jpeg(group, leaf) for leaf in self._seen.values()):
                self.lossy = JPEG

    def __len__(self) -> int:
        return len(self._episodes)

    def where(self, index: int) -> str:
        return f"{self._file} episode_{self._episodes[index]}"

    def read(self, index: int) -> Raw:
        number = self._episodes[index]
        with opened(self._file) as file:
            group = subgroup(file, f"episode_{number}", self._file)
            seen = {name: self._part(group, leaf) for name, leaf in self._seen.items()}
            columns = [values(group, name, self._file) for name in ("rewards", "terminations", "truncations")]
            action = values(group, "actions", self._file)
        if number in self._repeated:
            seen = {name: part[:-1] for name, part in seen.items()}
        return Raw(seen, action - self._action.start if np.any(self._action.start) else action, *columns)

    def action(self, index: int) -> np.ndarray:
        with opened(self._file) as file:
            return values(subgroup(file, f"episode_{self._episodes[index]}", self._file), "actions", self._file)

    def _read_ours(self, ours: dict[str, Any], where: str) -> None:
        self.stated = Stated(spaces=check_spaces(where, ours.get("spaces")))
        self.source = ours["source"] if isinstance(ours.get("source"), dict) else {}
        self.name = str(ours.get("name", self.name))
        repeated = ours.get("repeated", [])
        if not isinstance(repeated, list) or not all(isinstance(index, int) for index in repeated):
            raise refuse(where, f"{OURS}: repeated is no list of episodes")
        self._repeated = set(repeated)

    def _part(self, group: h5py.Group, leaf: Leaf) -> np.ndarray:
        if self._is_jpeg(group, leaf):
            return self._decoded(group, leaf)
        at = subgroup(group, "/".join(("observations", *leaf.path)[:-1]), self._file)
        part = values(at, ("observations", *leaf.path)[-1], self._file)
        return part - leaf.start if np.any(leaf.start) else part

    def _stored(self, group: h5py.Group, leaf: Leaf) -> h5py.Dataset:
        at = subgroup(group, "/".join(("observations", *leaf.path)[:-1]), self._file)
        return dataset(at, ("observations", *leaf.path)[-1], self._file, bytes_too=leaf.is_image)

    def _is_jpeg(self, group: h5py.Group, leaf: Leaf) -> bool:
        """Whether an image is stored as files: rows of bytes of any length, or not in its shape."""
        if not leaf.is_image:
            return False
        stored = self._stored(group, leaf)
        return stored.dtype.kind == "O" or (stored.ndim == 2 and stored.shape[1:] != leaf.shape)

    def _decoded(self, group: h5py.Group, leaf: Leaf) -> np.ndarray:
        stored = self._stored(group, leaf)
        where = f"{self._file} {stored.name}"
        if stored.shape[0] * math.prod(leaf.shape) > MAX_ARRAY:
            raise refuse(where, f"{stored.shape[0]} images are too many for one episode")
        return np.stack([decoded(stored[row].tobytes(), leaf.shape, where, "JPEG") for row in range(stored.shape[0])])


def decoded(data: bytes, shape: tuple[int, ...], where: str, *formats: str) -> np.ndarray:
    """Decode an image file of known shape (H, W) or (H, W, C).

    Raises:
        UsageError: It is damaged, in another format or of another size.
    """
    try:
        with Picture.open(io.BytesIO(data), formats=formats) as picture:
            if (picture.height, picture.width) != shape[:2]:
                raise refuse(where, f"an image of {picture.height} x {picture.width} pixels, not {shape}")
            mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}.get(math.prod(shape[2:]))
            if mode is None or picture.mode not in ("L", "LA", "RGB", "RGBA", "P"):
                raise refuse(where, f"an image of mode {picture.mode}, not {shape}")
            pixels = np.array(picture if picture.mode == mode else picture.convert(mode))
    except (OSError, ValueError, SyntaxError, Picture.DecompressionBombError) as error:
        raise refuse(where, f"an image is damaged: {error}") from None
    return pixels.reshape(shape)


def _environment(spec: Any) -> str | None:
    """Return the gymnasium id in a serialized EnvSpec, which is text of JSON."""
    if not isinstance(spec, str) or len(spec) > 1 << 20:
        return None
    with suppress(ValueError, RecursionError, AttributeError):
        name = json.loads(spec).get("id")
        return str(name)[:100] if name else None
    return None


def _leaves(metadata: dict[str, Any], key: str, where: str, notes: list[str]) -> list[Leaf]:
    """Return the arrays of a space in metadata.json, which is text of JSON.

    Raises:
        UsageError: It is missing, or of a kind that is not read.
    """
    text = metadata.get(key)
    try:
        if not isinstance(text, str):
            raise refuse(where, f"has no {key}; let Minari write it anew")
        leaves = list(_parse(json.loads(text), (), notes))
    except RecursionError:
        raise refuse(where, f"{key} is nested too deeply") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise refuse(where, f"{key} cannot be read: {error!r}") from None
    if not leaves:
        raise refuse(where, f"{key} has no numbers")
    return leaves


def _parse(space: dict[str, Any], path: tuple[str, ...], notes: list[str]) -> Iterator[Leaf]:
    kind = space["type"]
    if len(path) > DEEPEST:
        raise ValueError("nested too deeply")
    if kind == "Dict":
        for name, inner in space["subspaces"].items():
            yield from _parse(inner, (*path, str(name)), notes)
    elif kind == "Tuple":
        for number, inner in enumerate(space["subspaces"]):
            yield from _parse(inner, (*path, f"_index_{number}"), notes)
    elif kind == "Box":
        shape = tuple(int(each) for each in space["shape"])
        if space["dtype"] == "uint8" and len(shape) in (2, 3):
            yield Leaf(path, shape, None, None, is_image=True)
        else:
            low, high = (
                np.broadcast_to(np.array(space[end], np.float64), shape).reshape(-1) for end in ("low", "high")
            )
            finite = low.size > 0 and np.isfinite([low, high]).all() and (low < high).all()
            action = Continuous(tuple(low.tolist()), tuple(high.tolist())) if finite else None
            yield Leaf(path, shape, Vector(math.prod(shape)), action)
    elif kind == "Discrete":
        yield Leaf(path, (), Categories((int(space["n"]),)), Discrete(int(space["n"])), int(space.get("start", 0)))
    elif kind == "MultiDiscrete":
        sizes, start = np.array(space["nvec"], np.int64), np.array(space.get("start", 0), np.int64)
        counts = Categories(tuple(sizes.reshape(-1).tolist()))
        yield Leaf(path, sizes.shape, counts, counts, np.broadcast_to(start, sizes.shape))
    elif kind == "MultiBinary":
        shape = tuple(np.atleast_1d(space["n"]).tolist())
        counts = Categories((2,) * math.prod(shape))
        yield Leaf(path, shape, counts, counts)
    elif kind == "Text":
        notes.append(f"the text {'.'.join(path) or 'of the observation'} is left out")
    else:
        raise ValueError(f"a space of type {str(kind)[:40]}")


# -- writing -----------------------------------------------------------------------------------------------------------


def write_minari(recording: Recording, folder: Path) -> None:
    """Write a recording as a Minari dataset that reads back as the same bits. Actions are in [-1, 1]."""
    library = load_library("h5py", "data", "writing a Minari dataset")
    (folder / "data").mkdir()
    steps, repeated = 0, []
    with library.File(folder / MAIN, "w", track_order=True) as file:
        for index, episode in enumerate(recording):
            group = file.create_group(f"episode_{index}")
            group.attrs["id"], group.attrs["total_steps"] = index, len(episode)
            seen = episode.observation
            if not episode.has_closing:
                repeated.append(index)
                seen = map_parts(lambda part: np.concatenate([part, part[-1:]]), seen)
            arrays = {f"observations/{name}".rstrip("/"): part for name, part in parts_of(seen).items()}
            arrays |= {"actions": episode.action, "rewards": episode.reward}
            arrays |= {"terminations": episode.terminated, "truncations": episode.truncated}
            for name, array in arrays.items():
                packed = {"compression": "gzip", "compression_opts": 1} if array.dtype == np.uint8 else {}
                group.create_dataset(name, data=array, chunks=True, maxshape=(None, *array.shape[1:]), **packed)
            steps += len(episode)
    ours = {"spaces": spaces_entry(recording.spaces), "name": recording.name, "source": recording.source}
    metadata = {
        "dataset_id": f"wm/{re.sub('[^A-Za-z0-9_-]+', '-', recording.name)}-v0",
        "total_episodes": len(recording),
        "total_steps": steps,
        "dataset_size": round((folder / MAIN).stat().st_size / 1e6, 1),
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(_written(recording.spaces.observation)),
        "action_space": json.dumps(_written_action(recording.spaces.action)),
        "minari_version": VERSION,
        "description": f"Recorded experience {recording.name}, written by wm. Actions are scaled to -1 .. 1.",
        OURS: ours | ({"repeated": repeated} if repeated else {}),
    }
    (folder / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def _written(space: Any) -> dict[str, Any]:
    """Return the space of an observation as Minari writes it."""
    if isinstance(space, dict):
        return {"type": "Dict", "subspaces": {name: _written(part) for name, part in space.items()}}
    if isinstance(space, Image):
        return _box("uint8", space.shape, np.zeros(space.shape, int), np.full(space.shape, 255))
    if isinstance(space, Vector):
        largest = float(np.finfo(np.float32).max)  # JSON has no infinity
        return _box("float32", space.shape, np.full(space.shape, -largest), np.full(space.shape, largest))
    return {"type": "MultiDiscrete", "dtype": "int32", "nvec": list(space.sizes), "start": [0] * len(space.sizes)}


def _written_action(space: ActionSpace) -> dict[str, Any]:
    if isinstance(space, Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": 0, "n": space.count}
    if isinstance(space, Continuous):
        return _box("float32", space.shape, -np.ones(space.shape), np.ones(space.shape))
    return _written(space)


def _box(dtype: str, shape: tuple[int, ...], low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    return {"type": "Box", "dtype": dtype, "shape": list(shape), "low": low.tolist(), "high": high.tolist()}
