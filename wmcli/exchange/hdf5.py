"""HDF5 files, read: D4RL's flat arrays, or a group for each episode.

Only plain arrays of numbers inside the file are read: no links, no external or virtual storage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wmcli.exchange.convert import Raw, Stated, split_at
from wmcli.exchange.safe import MAX_CHUNK, check_size, damage, files_in, load_library, refuse
from wmcli.spaces import SEPARATOR

if TYPE_CHECKING:
    import h5py

SUFFIXES = (".hdf5", ".h5")
NAMES = {
    "observation": ("observation", "observations", "obs", "image"),
    "next": ("next_observation", "next_observations", "next_obs"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "terminated": ("terminated", "terminals", "terminations", "dones", "done"),
    "truncated": ("truncated", "timeouts", "truncations"),
}
"""Names that an array may have in files of others."""
DEEPEST = 8  # groups inside groups
MOST_PARTS = 256


def found_in(names: Sequence[str], where: str) -> dict[str, str]:
    """Return which array of a file holds what.

    Raises:
        UsageError: Observations, actions or rewards are missing.
    """
    found = {what: next((name for name in options if name in names), "") for what, options in NAMES.items()}
    missing = [what for what in ("observation", "action", "reward") if not found[what]]
    if missing:
        raise refuse(where, f"no {' and no '.join(missing)} in it, but {', '.join(sorted(names))[:120]}")
    return {what: name for what, name in found.items() if name}


def in_order(names: Sequence[str]) -> list[str]:
    """Sort names by the numbers in them, so that `demo_10` follows `demo_9`."""
    return sorted(
        names, key=lambda name: [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in _cut(name)]
    )


def _cut(name: str) -> list[str]:
    return re.split(r"([0-9]{1,18})", name)


class Hdf5:
    """A reader of one HDF5 file or a folder of them."""

    format = "hdf5"
    lossy: str | None = None

    def __init__(self, path: Path) -> None:
        self.name = path.stem if path.is_file() else path.resolve().name
        self.notes: list[str] = []
        self.source: dict[str, Any] = {}
        self.stated = Stated()
        self._episodes: list[tuple[Path, str, int, int]] = []  # file, group, first row, row behind the last
        files = [path] if path.is_file() else files_in(path, *SUFFIXES)
        if not files:
            raise refuse(path, "no HDF5 files in this folder")
        for file in files:
            self._find(file)
        if not self._episodes:
            raise refuse(path, "no episodes in it")

    def __len__(self) -> int:
        return len(self._episodes)

    def where(self, index: int) -> str:
        path, group, start, stop = self._episodes[index]
        return f"{path} {group}".rstrip(" /") + f" rows {start} to {stop - 1}"

    def read(self, index: int) -> Raw:
        path, name, start, stop = self._episodes[index]
        with opened(path) as file:
            group = subgroup(file, name, path)
            found = found_in(list(group), str(path))
            rows = (0, None) if name else (start, stop)  # of a group of its own all, so that wrong lengths show
            seen = parts_in(group, found["observation"], path, *rows)
            if "next" in found:
                after = parts_in(group, found["next"], path, stop - 1, stop)
                if set(after) != set(seen):
                    raise refuse(path, f"{found['next']} has other parts than {found['observation']}")
                if all(len(part) == stop - start for part in seen.values()):
                    seen = {part: np.concatenate([array, after[part]]) for part, array in seen.items()}
            columns = {what: values(group, found[what], path, *rows) for what in found if what in _COLUMNS}
        zeros = np.zeros(stop - start, bool)
        ends = (columns.get(what, zeros) for what in ("terminated", "truncated"))
        return Raw(seen, columns["action"], columns["reward"], *ends)

    def action(self, index: int) -> np.ndarray:
        path, name, start, stop = self._episodes[index]
        with opened(path) as file:
            group = subgroup(file, name, path)
            return values(group, found_in(list(group), str(path))["action"], path, start, stop)

    def _find(self, path: Path) -> None:
        with opened(path) as file:
            names = list(file)
            if any(name in names for name in NAMES["action"]):
                self._find_flat(path, file)
                return
            top = "data" if names == ["data"] or ("data" in names and "mask" in names) else ""  # robomimic's layout
            groups = in_order(list(subgroup(file, top, path)))
            for name in groups:
                place = f"{top}/{name}" if top else name
                group = subgroup(file, place, path)
                action = dataset(group, found_in(list(group), f"{path} {place}")["action"], path)
                self._episodes.append((path, place, 0, action.shape[0]))

    def _find_flat(self, path: Path, file: h5py.File) -> None:
        found = found_in(list(file), str(path))
        library = load_library("h5py", "data", f"{path}: reading HDF5")
        arrays = [name for name in found.values() if isinstance(_child(file, name, path), library.Dataset)]
        lengths = {dataset(file, name, path).shape[0] for name in arrays}
        if len(lengths) > 1:
            raise refuse(path, f"its arrays have {', '.join(map(str, sorted(lengths)))} rows")
        rows = lengths.pop()
        ended = np.zeros(rows, bool)
        for what in ("terminated", "truncated"):
            if what in found:
                flags = values(file, found[what], path).reshape(-1)
                if flags.shape != (rows,):
                    raise refuse(path, f"{found[what]} has {len(flags)} rows, but {found['action']} {rows}")
                ended |= flags != 0
        if rows:
            self._episodes += [(path, "", start, stop) for start, stop in split_at(ended)]


_COLUMNS = ("action", "reward", "terminated", "truncated")


# -- safe access -------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open a file to read. Raises UsageError if it is damaged, also later in the `with` block."""
    library = load_library("h5py", "data", f"{path}: reading HDF5")
    with damage(path), library.File(path, "r") as file:
        yield file


def _child(group: h5py.Group, name: str, path: Path) -> Any:
    library = load_library("h5py", "data", f"{path}: reading HDF5")
    where = f"{path} {group.name}/{name}"
    link = group.get(name, getlink=True)
    if link is None:
        raise refuse(where, "is missing")
    if not isinstance(link, library.HardLink):
        raise refuse(where, "is a link; only data inside the file is read")
    return group[name]


def subgroup(group: h5py.Group, name: str, path: Path) -> h5py.Group:
    """Open a group, step by step. Raises UsageError if it is a link or no group."""
    library = load_library("h5py", "data", f"{path}: reading HDF5")
    for step in name.split("/") if name else ():
        group = _child(group, step, path)
        if not isinstance(group, library.Group):
            raise refuse(f"{path} {name}", "is no group")
    return group


def dataset(group: h5py.Group, name: str, path: Path, *, bytes_too: bool = False) -> h5py.Dataset:
    """Open an array of numbers with rows, and check its size.

    Args:
        group: The group that it is in.
        name: Its name there.
        path: The file.
        bytes_too: Accept rows of bytes of different lengths.

    Raises:
        UsageError: It is none, or lies elsewhere.
    """
    library = load_library("h5py", "data", f"{path}: reading HDF5")
    array, where = _child(group, name, path), f"{path} {group.name}/{name}".replace("//", "/")
    if not isinstance(array, library.Dataset) or not array.shape:
        raise refuse(where, "is no array with rows")
    if array.external or array.is_virtual:
        raise refuse(where, "lies in another file; only data inside the file is read")
    if bytes_too and library.check_vlen_dtype(array.dtype) == np.uint8:
        return array
    check_size(where, (min(1, array.shape[0]), *array.shape[1:]), array.dtype)
    if array.chunks is not None:
        check_size(f"{where}: a chunk", array.chunks, array.dtype, limit=MAX_CHUNK)
    return array


def values(group: h5py.Group, name: str, path: Path, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Read rows of an array. Raises UsageError if there are fewer, or too many for memory."""
    array = dataset(group, name, path)
    stop = array.shape[0] if stop is None else stop
    where = f"{path} {group.name}/{name}".replace("//", "/")
    if array.shape[0] < stop:
        raise refuse(where, f"has {array.shape[0]} rows, but {stop} are needed")
    share = (stop - start) / max(1, array.shape[0])
    check_size(where, (stop - start, *array.shape[1:]), array.dtype, int(share * array.id.get_storage_size()))
    return array[start:stop]


def parts_in(group: h5py.Group, name: str, path: Path, start: int, stop: int | None) -> dict[str, np.ndarray]:
    """Read rows of an observation: an array, or a group of arrays, by the names of its parts."""
    library = load_library("h5py", "data", f"{path}: reading HDF5")
    parts: dict[str, np.ndarray] = {}
    pending = [(group, name, "", 0)]
    while pending:
        group, name, part, depth = pending.pop(0)
        child = _child(group, name, path)
        if not isinstance(child, library.Group):
            parts[part] = values(group, name, path, start, stop)
            continue
        inner = [(child, each, f"{part}{SEPARATOR}{each}" if part else each, depth + 1) for each in child]
        pending = [*inner, *pending]
        if depth > DEEPEST or len(pending) > MOST_PARTS:
            raise refuse(path, f"is nested too deeply, or has more than {MOST_PARTS} parts")
    return parts
