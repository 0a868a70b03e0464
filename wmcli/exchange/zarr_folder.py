"""Zarr v3 folders, read: a segment of wm (docs/format.md), or a group for each episode.

Metadata are checked as plain JSON before zarr sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import zarr

from wmcli.exchange.convert import Raw, Stated, check_spaces
from wmcli.exchange.hdf5 import DEEPEST, found_in, in_order
from wmcli.exchange.safe import MAX_CHUNK, check_size, damage, inside, read_json, refuse
from wmcli.experience.segment import CLOSING, FORMAT, SKETCH, kind_of, read_segment, segment_about
from wmcli.spaces import SEPARATOR, Spaces, from_columns, parts_of

CODECS = {"bytes", "transpose", "gzip", "zstd", "blosc", "crc32c", "sharding_indexed"}
"""Codecs that unpack plain numbers and run no code of others."""
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
MOST_CHUNKS = 1_000_000
METADATA = "zarr.json"


class Zarr:
    """A reader of a zarr folder with a group for each episode; see `Segment` for wm's own layout."""

    format = "zarr"
    lossy: str | None = None

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name.removesuffix(".zarr")
        self.notes: list[str] = []
        self.source: dict[str, Any] = {}
        self.stated = Stated()
        read_json(inside(path, METADATA))
        self._groups = in_order([each.name for each in path.iterdir() if (each / METADATA).is_file()])
        self._found = {name: found_in(_arrays_below(path / name), str(path / name)) for name in self._groups}
        if not self._groups:
            raise refuse(path, "no group in it has a zarr.json")

    def __len__(self) -> int:
        return len(self._groups)

    def where(self, index: int) -> str:
        return str(self.path / self._groups[index])

    def read(self, index: int) -> Raw:
        group = self.path / self._groups[index]
        found = self._found[self._groups[index]]
        action = read_array(group, found["action"])
        zeros = np.zeros(len(action), bool)
        reward = read_array(group, found["reward"])
        ends = [read_array(group, found[what]) if what in found else zeros for what in ("terminated", "truncated")]
        return Raw(_parts(group, found["observation"]), action, reward, *ends)

    def action(self, index: int) -> np.ndarray:
        return read_array(self.path / self._groups[index], self._found[self._groups[index]]["action"])


class Part(NamedTuple):
    """Rows of one segment that belong to one episode."""

    segment: int
    rows: np.ndarray


class Segment:
    """A reader of segments of wm, the earlier ones first. Their episodes may continue from one to the next.

    Args:
        folders: The segments.
        name: Of the recording.
        spaces: Of the environment; None: those of the manifest beside the segment, or else found from the data.
        draw: Draws frames from compact states (n, S), where segments hold no others.
    """

    format = "wm"
    lossy: str | None = None

    def __init__(
        self,
        folders: Sequence[Path],
        name: str | None = None,
        spaces: Spaces | None = None,
        draw: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.folders, self.name = list(folders), name or folders[-1].resolve().parent.name
        self.notes: list[str] = []
        self.source: dict[str, Any] = {}
        self.stated = Stated(spaces=spaces or _spaces_beside(folders[-1]))
        self._draw = draw
        self._about = [_checked(folder) for folder in folders]
        self._columns = [read_segment(folder, *_SMALL) for folder in folders]
        self._loaded: tuple[int, dict[str, np.ndarray]] = (-1, {})
        self._find()

    def __len__(self) -> int:
        return len(self._episodes)

    def where(self, index: int) -> str:
        part = self._episodes[index][0]
        return f"{self.folders[part.segment]} from row {part.rows[0]}"

    def read(self, index: int) -> Raw:
        parts = self._episodes[index]
        pieces = [self._observation(part) for part in parts]
        last = parts[-1]
        seen = {name: [piece[name] for piece in pieces] for name in pieces[0]}
        ended = self._closing_rows[last.segment]
        if ended is not None and (row := ended.get(int(last.rows[-1]))) is not None:
            closing = self._parts(last.segment, CLOSING, np.array([row]))
            for name in seen:
                seen[name].append(closing[name])
        rows = {name: self._joined(name, parts) for name in ("action", "reward", "terminated", "truncated")}
        return Raw({name: np.concatenate(each) for name, each in seen.items()}, **rows)

    def action(self, index: int) -> np.ndarray:
        return self._joined("action", self._episodes[index])

    def _find(self) -> None:
        """Find the rows of each episode, in the order of their first rows."""
        running: dict[int, list[Part]] = {}
        self._episodes: list[list[Part]] = []
        self._closing_rows: list[dict[int, int] | None] = []
        cut = 0
        for number, columns in enumerate(self._columns):
            for stream in np.unique(columns["stream"]).tolist():
                rows = np.flatnonzero(columns["stream"] == stream)
                opens = np.flatnonzero(columns["first"][rows])
                for piece in np.split(rows, opens):
                    if not len(piece):
                        continue
                    if columns["first"][piece[0]] or stream not in running:
                        cut += not columns["first"][piece[0]]
                        running[stream] = []
                        self._episodes.append(running[stream])
                    running[stream].append(Part(number, piece))
            has = any(kind_of(name) == CLOSING for name in self._about[number]["columns"])
            ended = np.flatnonzero(columns["terminated"] | columns["truncated"])
            self._closing_rows.append({int(row): place for place, row in enumerate(ended)} if has else None)
        self._episodes.sort(key=lambda parts: (parts[0].segment, int(parts[0].rows[0])))
        if cut:
            self.notes.append(f"{cut} episodes begin in their middle: an earlier segment has their beginning")

    def _joined(self, name: str, parts: list[Part]) -> np.ndarray:
        return np.concatenate([self._columns[part.segment][name][part.rows] for part in parts])

    def _arrays(self, segment: int) -> dict[str, np.ndarray]:
        """Return the columns of a segment that are one chunk, which is decoded once."""
        if self._loaded[0] != segment:
            folder, names = self.folders[segment], self._about[segment]["columns"]
            whole = [name for name in names if kind_of(name) in (CLOSING, SKETCH, "observation")]
            whole = [name for name in whole if not _is_sharded(folder / name)]
            self._loaded = (segment, read_segment(folder, *whole) if whole else {})
        return self._loaded[1]

    def _observation(self, part: Part) -> dict[str, np.ndarray]:
        arrays, names = self._arrays(part.segment), self._about[part.segment]["columns"]
        seen = [name for name in names if kind_of(name) == "observation"]
        if not seen:
            if self._draw is None:
                raise refuse(self.folders[part.segment], "holds compact states of a memory task, and no frames")
            return {"": self._draw(arrays[SKETCH][part.rows])}
        return self._parts(part.segment, "observation", part.rows)

    def _parts(self, segment: int, column: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows of all parts of a column."""
        arrays, folder = self._arrays(segment), self.folders[segment]
        names = [name for name in self._about[segment]["columns"] if kind_of(name) == column]
        columns = {name: arrays[name][rows] if name in arrays else _take(folder / name, rows) for name in names}
        return parts_of(from_columns(column, columns))


_SMALL = ("action", "reward", "terminated", "truncated", "first", "stream")


def _spaces_beside(folder: Path) -> Spaces | None:
    """Return the spaces in the manifest of the artifact that a segment lies in."""
    manifest = folder.parent / "manifest.json"
    if not manifest.is_file():
        return None
    return check_spaces(str(manifest), read_json(manifest).get("environment"))


def _checked(folder: Path) -> dict[str, Any]:
    """Return the attributes of a segment, and check the metadata of its columns."""
    read_json(inside(folder, METADATA))
    about = segment_about(folder)
    for name in about["columns"]:
        check_array(folder / name)
    return about


def _is_sharded(folder: Path) -> bool:
    return any(codec.get("name") == "sharding_indexed" for codec in read_json(folder / METADATA)["codecs"])


def _take(folder: Path, rows: np.ndarray) -> np.ndarray:
    """Read rows of an array, at equal distances or anywhere."""
    steps = np.unique(np.diff(rows))
    with damage(folder):
        array = zarr.open_array(store=folder, mode="r", zarr_format=3)
        if len(steps) > 1:
            return np.asarray(array.oindex[rows])
        return np.asarray(array[rows[0] : rows[-1] + 1 : int(steps[0]) if len(steps) else 1])


# -- safe access -------------------------------------------------------------------------------------------------------


def is_segment(path: Path) -> bool:
    """Return whether a zarr folder says that it is a segment of wm."""
    attributes = read_json(inside(path, METADATA)).get("attributes")
    return isinstance(attributes, dict) and attributes.get("format") == FORMAT


def check_array(folder: Path) -> tuple[int, ...]:
    """Check the metadata of an array before zarr reads it.

    Returns:
        Its shape.

    Raises:
        UsageError: It is no array of plain numbers, its chunks are too large or too many, or a codec is not known.
    """
    about = read_json(inside(folder, METADATA), limit=1 << 20)
    shape, kind = about.get("shape"), about.get("data_type")
    if about.get("node_type") != "array" or about.get("zarr_format") != 3:
        raise refuse(folder, "is no array of zarr v3")
    if kind not in NUMBERS:
        raise refuse(folder, f"holds {str(kind)[:40]}, not plain numbers")
    grid = about.get("chunk_grid")
    inner = grid.get("configuration") if isinstance(grid, dict) else None
    chunk = inner.get("chunk_shape") if isinstance(inner, dict) else None
    if not _is_shape(shape) or not _is_shape(chunk) or len(chunk) != len(shape) or 0 in chunk or not shape:
        raise refuse(folder, f"chunks {str(chunk)[:60]} for shape {str(shape)[:60]}")
    check_size(f"{folder}: a chunk", chunk, np.dtype(kind), limit=MAX_CHUNK)
    if math.prod(-(-size // step) for size, step in zip(shape, chunk, strict=True)) > MOST_CHUNKS:
        raise refuse(folder, f"more than {MOST_CHUNKS} chunks")
    _check_codecs(folder, about.get("codecs"), 0)
    if about.get("storage_transformers"):
        raise refuse(folder, "has storage transformers")
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise refuse(path, "is a link; put the file itself there")
    return tuple(shape)


def _check_codecs(folder: Path, codecs: Any, depth: int) -> None:
    if not isinstance(codecs, list) or not all(isinstance(codec, dict) for codec in codecs) or depth > 2:
        raise refuse(folder, "names no codecs")
    for codec in codecs:
        if codec.get("name") not in CODECS:
            raise refuse(folder, f"codec {str(codec.get('name'))[:40]!r}; those read: {', '.join(sorted(CODECS))}")
        inner = codec.get("configuration", {})
        for key in ("codecs", "index_codecs"):
            if isinstance(inner, dict) and key in inner:
                _check_codecs(folder, inner[key], depth + 1)


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 8 and all(type(each) is int and each >= 0 for each in value)


def read_array(group: Path, name: str) -> np.ndarray:
    """Read an array of an episode. Raises UsageError if it is damaged, see also `check_array`."""
    shape = check_array(group / name)
    kind = read_json(group / name / METADATA)["data_type"]
    stored = sum(path.stat().st_size for path in (group / name).rglob("*") if path.is_file())
    check_size(group / name, shape, np.dtype(kind), stored)
    with damage(group / name):
        return np.asarray(zarr.open_array(store=group / name, mode="r", zarr_format=3)[...])


def _arrays_below(group: Path) -> list[str]:
    """Return the names of the arrays and groups in a group."""
    if group.is_symlink():
        raise refuse(group, "is a link; put the folder itself there")
    return sorted(each.name for each in group.iterdir() if (each / METADATA).is_file())


def _parts(group: Path, name: str, prefix: str = "", depth: int = 0) -> dict[str, np.ndarray]:
    """Read an observation: an array, or a group of arrays."""
    if depth > DEEPEST:
        raise refuse(group, "is nested too deeply")
    if read_json(inside(group / name, METADATA)).get("node_type") != "group":
        return {prefix: read_array(group, name)}
    parts: dict[str, np.ndarray] = {}
    for each in _arrays_below(group / name):
        parts |= _parts(group / name, each, f"{prefix}{SEPARATOR}{each}" if prefix else each, depth + 1)
    return parts
