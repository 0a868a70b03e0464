"""A segment: the experience of one collection, an immutable zarr v3 group with an array for each column.

Axes: N rows, M of them end an episode. A row is one decision in one environment (a *stream*): `observation`, in which
`action` was taken, and its OUTCOMES. An observation of several parts (`wmcli.spaces`) has a column `observation.NAME`
for each. Rows of one stream are in order of time; streams are interleaved, or one follows another. The documentation
has the whole format (docs/format.md).

Frames are in chunks of 64 rows inside shards, compressed by zstd with checksum. Without the checksum zarr does not
detect most flipped bits. A segment is never appended to, because an interrupted append leaves rows of zeros. zarr reads
a missing shard as zeros, so every shard is written, and readers first check that each file exists. `wmcli.artifacts`
makes publishing atomic and durable.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import ZstdCodec

from wmcli.errors import ArtifactError
from wmcli.experience.arrays import check_memory, open_array, read_metadata
from wmcli.reading import damage
from wmcli.spaces import SEPARATOR, column_names, first_part, from_columns, map_parts

OUTCOMES: dict[str, type[np.generic]] = {
    "reward": np.float32,  # (N,) unclipped
    "terminated": np.bool_,  # (N,)
    "truncated": np.bool_,  # (N,)
    "first": np.bool_,  # (N,) first frame of an episode
    "lives": np.int16,  # (N,) after the step, -1 if unknown
    "stream": np.int16,  # (N,) number of the environment, or IMPORTED
}
IMPORTED = np.iinfo(np.int16).max
"""`stream` of imported episodes, which come between those of environments without ending them."""
SEARCHED: dict[str, type[np.generic]] = {
    "policy": np.float32,  # (N, A) shares of the actions in the search
    "value": np.float32,  # (N,) of the frame, by the search
}
"""Additional columns of a segment that was played by search."""
SAMPLED = "sampled"  # (N, A, ...)
"""Column of a search that chose among A samples: the actions that its shares belong to."""
SKETCH = "sketch"  # uint8 (N, S)
"""Column of a segment of a memory task: compact states, S bytes each, from which frames are drawn. It replaces the
frames, except for recordings, which have both."""
CLOSING = "closing"  # (M, ...)
"""Observations that close episodes, one for each row that ends one, in the order of these rows. In a dict of parts,
`closing.NAME`. A segment has all of them or none."""
IN_PARTS = ("observation", CLOSING)  # columns that there is one of for each part of an observation
ACTIONS = (np.int32, np.float32)  # number types of `action` and `sampled`
OBSERVATIONS = (np.uint8, np.float32, np.int32)  # of parts
FORMAT = "wm-segment"
SCHEMA = 2  # 1 names no columns: it has one image, discrete actions, and no `closing`
COLUMN = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_ .-]{0,98}[A-Za-z0-9_ -])?")
IMAGE_AXES = 4  # of a column of images
CHUNK = 64  # rows, about 0.8 MB of 64 x 64 frames: the smallest unit of decoding
BLOCK = 16 * CHUNK  # rows that reading has in memory twice
SHARD = 256 * CHUNK  # rows, about 200 MB of 64 x 64 frames: the most that writing has in memory twice


def lives_left(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the lives left after each step that ended an episode by losing one, int16 (N,), and -1 at other steps.

    Only for environments in which a lost life ends an episode.
    """
    lost = arrays["terminated"] & ~arrays["truncated"] & (arrays["lives"] > 0)
    return np.where(lost, arrays["lives"], -1).astype(np.int16)


def opens_game(first: np.ndarray, lives: np.ndarray, left_before: np.ndarray) -> np.ndarray:
    """Return whether each row is the first of a game, not only of a life, bool (n,).

    More lives than were left are those of a new game: the one before was abandoned.

    Args:
        first: (n,).
        lives: (n,).
        left_before: `lives_left` (n,) of the row before each in its stream, or -1.
    """
    return first & ((left_before < 0) | (lives > left_before))


def write_segment(
    folder: Path, arrays: Mapping[str, np.ndarray], frames: Iterable[Any] | None = None, **about: Any
) -> None:
    """Write a segment as a new zarr group.

    Args:
        folder: The group, which must not exist.
        arrays: Columns of equal length N > 0: `observation` or `observation.NAME`, `action`, those of OUTCOMES,
            optionally of SEARCHED and SAMPLED, and SKETCH instead of the observation or beside it; and optionally
            `closing`, in the same parts.
        frames: The observation in blocks of any lengths, trees of (n, ...). One shard at a time is in memory.
        about: JSON values to store as attributes, such as the seeds of the episodes.
    """
    rows = len(arrays["action"])
    assert rows > 0, "a segment has at least one row"
    arrays = dict(arrays)
    if frames is None and any(kind_of(name) == "observation" for name in arrays):
        frames = [from_columns("observation", arrays)]
    if frames is not None:
        frames = iter(frames)
        block = next(frames)
        observations = column_names("observation", block)
        frames = itertools.chain((block,), frames)
        arrays = {name: array for name, array in arrays.items() if kind_of(name) != "observation"}
    else:
        observations = {}
    columns = sorted((*observations, *arrays), key=_order)
    expected = [name for name in ("action", *OUTCOMES) if name not in columns]
    assert not expected and (SKETCH in columns or observations), f"a segment has columns {', '.join(expected)}"
    ended = int((arrays["terminated"] | arrays["truncated"]).sum())
    lengths = {name: ended if kind_of(name) == CLOSING else rows for name in arrays}
    assert all(len(array) == lengths[name] for name, array in arrays.items()), lengths
    about = {**about, "format": FORMAT, "schema": SCHEMA, "rows": rows, "columns": columns}
    group = zarr.create_group(store=folder, zarr_format=3, attributes=about)
    written: dict[str, zarr.Array] = {}
    end = 0
    for block in () if frames is None else _regrouped(frames, _shard(rows)):
        begin, end = end, end + len(first_part(block))
        for name, part in column_names("observation", block).items():
            if name not in written:
                written[name] = _create(group, name, rows, part)
            written[name][begin:end] = _converted(name, part)
    assert frames is None or end == rows, f"{end} frames for {rows} rows"
    for name, array in arrays.items():
        created = _create(group, name, len(array), array)
        if len(array):
            created[:] = _converted(name, array)


def kind_of(column: str) -> str:
    """Return what a column holds: its name without that of an observation's part."""
    kind, dot, _ = column.partition(SEPARATOR)
    return kind if dot and kind in IN_PARTS else column


def _order(column: str) -> int:
    """Return the place of a column among the others."""
    return [SKETCH, "observation", "action", *OUTCOMES, *SEARCHED, SAMPLED, CLOSING].index(kind_of(column))


def _types(column: str) -> tuple[type[np.generic], ...]:
    """Return the number types that a column may have."""
    kind = kind_of(column)
    if kind in IN_PARTS:
        return OBSERVATIONS
    if kind in ("action", SAMPLED):
        return ACTIONS
    return ((OUTCOMES | SEARCHED | {SKETCH: np.uint8})[kind],)


def _converted(column: str, values: np.ndarray) -> np.ndarray:
    """Return values in a number type of their column."""
    types = _types(column)
    dtype = values.dtype if values.dtype in types else types[0]
    return np.ascontiguousarray(values.astype(dtype, casting="same_kind", copy=False))


def _shard(rows: int) -> int:
    return min(ceil(rows / CHUNK) * CHUNK, SHARD)


def _create(group: zarr.Group, name: str, rows: int, like: np.ndarray) -> zarr.Array:
    """Create the array of a column. Images are in chunks inside shards, other columns in one chunk."""
    shape = (rows, *like.shape[1:])
    sharded = len(shape) == IMAGE_AXES and rows > 0
    whole = tuple(max(size, 1) for size in shape)
    return group.create_array(
        name,
        shape=shape,
        dtype=_converted(name, like[:0]).dtype,
        chunks=(CHUNK, *shape[1:]) if sharded else whole,
        shards=(_shard(rows), *shape[1:]) if sharded else None,
        compressors=ZstdCodec(level=1, checksum=True),
        fill_value=0,
        config={"write_empty_chunks": True},
    )


def _regrouped(blocks: Iterable[Any], rows: int) -> Iterator[Any]:
    """Yield the same rows in blocks of `rows`, the last one possibly shorter."""
    parts: list[Any] = []
    count = 0
    for block in blocks:
        while length := len(first_part(block)):
            taken = min(rows - count, length)
            parts.append(map_parts(lambda part, end=taken: part[:end], block))
            block = map_parts(lambda part, start=taken: part[start:], block)
            count += taken
            if count == rows:
                yield map_parts(lambda *each: np.concatenate(each), *parts)
                parts, count = [], 0
    if parts:
        yield map_parts(lambda *each: np.concatenate(each), *parts)


def segment_about(folder: Path) -> dict[str, Any]:
    """Return the attributes of a segment. Raises ArtifactError if it is none, MachineError if it cannot be read."""
    try:
        attributes = read_metadata(folder)["attributes"]
        form, schema, rows = (attributes[key] for key in ("format", "schema", "rows"))
        if schema == 1 and form == FORMAT:
            attributes["columns"] = _columns_of_schema_1(attributes)
        columns = attributes["columns"] if schema in (1, SCHEMA) else []
        if form != FORMAT or not isinstance(schema, int) or not isinstance(rows, int) or rows < 1:
            raise ValueError
        if len(columns) != len(set(columns)) or not all(COLUMN.fullmatch(name) for name in columns):
            raise ValueError
        for name in columns:
            _order(name)
        kinds = {kind_of(name) for name in columns}
        if schema in (1, SCHEMA) and not ({"action", *OUTCOMES} <= kinds and kinds & {SKETCH, "observation"}):
            raise ValueError
    except (ArtifactError, ValueError, KeyError, TypeError):
        raise ArtifactError(f"{folder}: no experience segment, or a damaged one; see: wm verify") from None
    if schema not in (1, SCHEMA):
        raise ArtifactError(
            f"{folder}: a segment of schema {schema}, but this wm reads up to {SCHEMA}; use the wm that wrote it."
        )
    return attributes


def _columns_of_schema_1(about: Mapping[str, Any]) -> list[str]:
    """Return the columns of a segment by its flags."""
    columns = [SKETCH] if about.get("sketched") else []
    if not about.get("sketched") or about.get("framed"):
        columns.append("observation")
    return [*columns, "action", *OUTCOMES, *(SEARCHED if about.get("searched") else ())]


def read_segment(folder: Path, *only: str, frames: bool = True) -> dict[str, np.ndarray]:
    """Read the columns of a segment.

    Args:
        folder: The segment.
        only: Names of the columns to read; all by default.
        frames: Read the observation.

    Raises:
        ArtifactError: The folder is no segment, a file is missing or damaged, or the columns differ in length.
        MachineError: A file cannot be read, or the columns do not fit in memory.
    """
    about = segment_about(folder)
    rows, ended = about["rows"], None
    arrays: dict[str, np.ndarray] = {}
    names = [
        name for name in about["columns"] if (not only or name in only) and (frames or kind_of(name) != "observation")
    ]
    opened = {name: open_array(folder / name) for name in names}
    check_memory(folder, sum(array.nbytes for array in opened.values()))
    for name, array in opened.items():
        with damage(folder / name):
            arrays[name] = np.asarray(array[...])
        if arrays[name].dtype not in _types(name) or (kind_of(name) != CLOSING and len(arrays[name]) != rows):
            raise _misfit(folder / name, arrays[name], rows)
        if kind_of(name) == CLOSING:  # behind the flags
            if ended is None and not only:
                ended = int((arrays["terminated"] | arrays["truncated"]).sum())
            if ended is not None and len(arrays[name]) != ended:
                raise _misfit(folder / name, arrays[name], rows)
    return arrays


def read_frames(folder: Path) -> Iterator[Any] | None:
    """Return the observation of a segment in blocks, trees of (n, ...), one in memory at a time; None without frames.

    Raises:
        ArtifactError: See `read_segment`. It may occur between two blocks.
    """
    columns = open_frames(folder)
    if not columns:
        return None
    rows, names = next(iter(columns.values())).shape[0], list(columns)
    observation = from_columns("observation", columns)
    size = min(BLOCK, *((array.shards or array.chunks)[0] for array in columns.values()))

    def blocks() -> Iterator[Any]:
        for begin in range(0, rows, size):
            with damage(folder / names[0]):
                block = map_parts(lambda array, start=begin: np.asarray(array[start : start + size]), observation)
            yield block

    return blocks()


def count_rows(folder: Path, *, closing: bool) -> int:
    """Return the number of rows of a segment, with `closing` and those that close episodes.

    Raises:
        ArtifactError: The folder is no segment, or a damaged one.
        MachineError: A file cannot be read.
    """
    about = segment_about(folder)
    name = next((name for name in about["columns"] if kind_of(name) == CLOSING), None)
    if not closing or name is None:
        return int(about["rows"])
    return int(about["rows"]) + int(open_array(folder / name).shape[0])


def open_frames(folder: Path) -> dict[str, zarr.Array]:
    """Open the columns of a segment's observation, without reading them. Raises ArtifactError as `read_segment`."""
    about = segment_about(folder)
    rows = about["rows"]
    columns = {}
    for name in about["columns"]:
        if kind_of(name) != "observation":
            continue
        columns[name] = open_array(folder / name)
        if columns[name].shape[0] != rows or columns[name].dtype not in _types(name):
            raise _misfit(folder / name, columns[name], rows)
    return columns


def _misfit(folder: Path, array: np.ndarray | zarr.Array, rows: int) -> ArtifactError:
    return ArtifactError(f"{folder}: {array.dtype} {array.shape} does not fit a segment of {rows} rows; see: wm verify")


class Recorder:
    """Collects the rows of one segment in memory, step by step.

    Args:
        steps: Largest number of steps.
        streams: Number of streams E.
    """

    def __init__(self, steps: int, streams: int) -> None:
        self._steps, self._streams = steps, streams
        self._rows = 0
        self._arrays: dict[str, np.ndarray] = {}
        self._closing: list[dict[str, np.ndarray]] = []  # of each row that ended an episode
        self._closes = True  # closing observations are kept

    def __len__(self) -> int:
        """Return the number of rows so far."""
        return self._rows

    @property
    def closings(self) -> int:
        """Number of observations so far that closed an episode."""
        return len(self._closing)

    def add(self, step: Mapping[str, np.ndarray], closing: Mapping[int, Any]) -> None:
        """Add one step of all streams.

        Args:
            step: Every column except `stream` and `closing`, each (E, ...). All steps have the same columns.
            closing: By stream, the observation that its action led to where it ended an episode.
        """
        rows = slice(self._rows, self._rows + self._streams)
        assert rows.stop <= self._steps * self._streams, "the recorder is full"
        if not self._arrays:
            self._make({**step, "stream": np.zeros(self._streams, np.int16)})
        assert set(step) == set(self._arrays) - {"stream"}
        for name, values in step.items():
            assert len(values) == self._streams, f"{len(values)} values of {name} for {self._streams} streams"
            self._arrays[name][rows] = values
        self._arrays["stream"][rows] = np.arange(self._streams)
        for stream in np.flatnonzero(step["terminated"] | step["truncated"]) if self._closes else ():
            self._closing.append(column_names(CLOSING, closing[int(stream)]))
        self._rows = rows.stop

    def arrays(self, start: int = 0, closings: int = 0) -> dict[str, np.ndarray]:
        """Return the arrays for `write_segment`, or those behind the first `start` rows and `closings` observations."""
        columns = {name: array[start : self._rows] for name, array in self._arrays.items()}
        return columns | (self._closings(closings) if self._closes else {})

    def _closings(self, start: int) -> dict[str, np.ndarray]:
        """Return the columns `closing` from their row `start` on."""
        observation = {name: array for name, array in self._arrays.items() if kind_of(name) == "observation"}
        if not self._closing[start:]:  # empty columns of the same shape
            like = from_columns("observation", observation) if observation else np.zeros(0)
            return column_names(CLOSING, map_parts(lambda part: part[:0], like))
        return {name: np.stack([each[name] for each in self._closing[start:]]) for name in self._closing[0]}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the arrays of an earlier recorder, to resume an interrupted collection.

        Those of earlier versions have no closing observations. Then none are kept, since a segment has all or none.
        """
        columns = {name: array for name, array in arrays.items() if kind_of(name) != CLOSING}
        closing = {name: array for name, array in arrays.items() if kind_of(name) == CLOSING}
        self._rows = len(columns["action"])
        self._make(columns)
        for name, array in columns.items():
            self._arrays[name][: self._rows] = array
        self._closes = bool(closing)
        count = len(next(iter(closing.values()))) if closing else 0
        self._closing = [{name: array[row] for name, array in closing.items()} for row in range(count)]

    def _make(self, like: Mapping[str, np.ndarray]) -> None:
        names = sorted(like, key=_order)
        rows = self._steps * self._streams
        self._arrays = {
            name: np.zeros((rows, *like[name].shape[1:]), _converted(name, like[name][:0]).dtype) for name in names
        }
