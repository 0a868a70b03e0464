"""A segment: the experience of one collection, an immutable zarr v3 group.

Axes: N rows, H height, W width, C color channel. A row is one decision in one environment (a *stream*). Rows of several
streams are interleaved; those of one stream are in order of time.

Frames are in chunks of 64 rows inside shards, compressed by zstd with checksum. Without the checksum zarr does not
detect most flipped bits. A segment is never appended to, because an interrupted append leaves rows of zeros. zarr reads
a missing shard as zeros, so every shard is written, and readers first check that each file exists. `wmcli.artifacts`
makes publishing atomic and durable.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import ZstdCodec

from wmcli.errors import ArtifactError

FIELDS: dict[str, type[np.generic]] = {
    "observation": np.uint8,  # (N, H, W, C)
    "action": np.int32,  # (N,)
    "reward": np.float32,  # (N,) unclipped
    "terminated": np.bool_,  # (N,)
    "truncated": np.bool_,  # (N,)
    "first": np.bool_,  # (N,) first frame of an episode
    "lives": np.int16,  # (N,) after the step, -1 if unknown
    "stream": np.int16,  # (N,) number of the environment
}
SEARCHED: dict[str, type[np.generic]] = {
    "policy": np.float32,  # (N, A) shares of the actions in the search
    "value": np.float32,  # (N,) of the frame, by the search
}
"""Additional fields of a segment that was played by search."""
COMPACT = {"sketch": np.uint8}  # (N, S)
"""Field of a segment of a memory task: compact states, S bytes each, from which frames are drawn. It replaces the
frames, except for recordings, which have both."""
AXES = {"observation": 4, "policy": 2, "sketch": 2}  # all others have one
FORMAT = {"format": "wm-segment", "schema": 1}
CHUNK = 64  # rows, about 0.8 MB of 64 x 64 frames: the smallest unit of decoding
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


def _fields(*, searched: bool, sketched: bool = False, framed: bool = False) -> dict[str, type[np.generic]]:
    """Return the fields of a segment. `framed`: frames beside compact states."""
    fields = dict(FIELDS)
    if sketched and not framed:
        del fields["observation"]
    return (COMPACT if sketched else {}) | fields | (SEARCHED if searched else {})


def write_segment(
    folder: Path, arrays: Mapping[str, np.ndarray], frames: Iterable[np.ndarray] | None = None, **about: Any
) -> None:
    """Write a segment as a new zarr group.

    Args:
        folder: The group, which must not exist.
        arrays: Arrays of equal length N > 0: those of FIELDS, optionally of SEARCHED, and COMPACT instead of the
            observation or beside it.
        frames: The observation in blocks (n, H, W, C) of any lengths. One shard at a time is in memory.
        about: JSON values to store as attributes, such as the seeds of the episodes.
    """
    rows = len(arrays["action"])
    assert rows > 0, "a segment has at least one row"
    names = set(arrays) | ({"observation"} if frames is not None else set())
    kinds = {"searched": "policy" in names, "sketched": "sketch" in names, "framed": {"sketch", "observation"} <= names}
    fields = _fields(**kinds)
    assert names == set(fields), f"a segment has the fields {', '.join(fields)}"
    assert all(array.ndim == AXES.get(name, 1) and len(array) == rows for name, array in arrays.items())
    about = {**about, **FORMAT, "rows": rows} | {kind: True for kind, applies in kinds.items() if applies}
    group = zarr.create_group(store=folder, zarr_format=3, attributes=about)
    shard = min(ceil(rows / CHUNK) * CHUNK, SHARD)
    for name, dtype in fields.items():
        pieces = _regrouped(frames, shard) if name == "observation" and frames is not None else iter((arrays[name],))
        array, end = None, 0
        for piece in pieces:
            data = np.ascontiguousarray(piece.astype(dtype, casting="same_kind", copy=False))
            if array is None:
                shape, sharded = (rows, *data.shape[1:]), name == "observation"
                array = group.create_array(
                    name,
                    shape=shape,
                    dtype=dtype,
                    chunks=(CHUNK, *shape[1:]) if sharded else shape,
                    shards=(shard, *shape[1:]) if sharded else None,
                    compressors=ZstdCodec(level=1, checksum=True),
                    fill_value=0,
                    config={"write_empty_chunks": True},
                )
            begin, end = end, end + len(data)
            array[begin:end] = data
        assert end == rows, f"{end} frames for {rows} rows"


def _regrouped(blocks: Iterable[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    """Yield the same rows in blocks of `rows`, the last one possibly shorter."""
    parts: list[np.ndarray] = []
    for block in blocks:
        while len(block):
            part = block[: rows - sum(map(len, parts))]
            parts.append(part)
            block = block[len(part) :]
            if sum(map(len, parts)) == rows:
                yield np.concatenate(parts)
                parts = []
    if parts:
        yield np.concatenate(parts)


def segment_about(folder: Path) -> dict[str, Any]:
    """Return the attributes of a segment. Raises ArtifactError if the folder is no segment."""
    try:
        attributes = json.loads((folder / "zarr.json").read_bytes())["attributes"]
        form = {key: attributes[key] for key in ("rows", *FORMAT)}
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(f"{folder}: no experience segment, or a damaged one; see: wm verify") from None
    del form["rows"]
    if form != FORMAT:
        raise ArtifactError(f"{folder}: written as {form}, but this wm reads {FORMAT}; use the wm that wrote it.")
    return attributes


def read_segment(folder: Path, *only: str, frames: bool = True) -> dict[str, np.ndarray]:
    """Read the arrays of a segment.

    Args:
        folder: The segment.
        only: Names of the arrays to read; all by default.
        frames: Read the observation.

    Raises:
        ArtifactError: The folder is no segment, a file is missing or damaged, or the arrays differ in length.
    """
    rows, fields = _contents(folder)
    arrays = {}
    for name, dtype in fields.items():
        if (only and name not in only) or (name == "observation" and not frames):
            continue
        with _damage(folder / name):
            arrays[name] = np.asarray(_opened(folder / name)[...])
        shape_fits = arrays[name].ndim == AXES.get(name, 1) and len(arrays[name]) == rows
        if not shape_fits or arrays[name].dtype != dtype:
            raise _misfit(folder / name, arrays[name], rows)
    return arrays


def read_frames(folder: Path) -> Iterator[np.ndarray] | None:
    """Return the observation of a segment in blocks (n, H, W, C), one in memory at a time; None without frames.

    Raises:
        ArtifactError: See `read_segment`. It may occur between two blocks.
    """
    rows, fields = _contents(folder)
    if "observation" not in fields:
        return None
    with _damage(folder / "observation"):
        array = _opened(folder / "observation")
    if array.ndim != AXES["observation"] or array.shape[0] != rows or array.dtype != fields["observation"]:
        raise _misfit(folder / "observation", array, rows)

    size = (array.shards or array.chunks)[0]

    def blocks() -> Iterator[np.ndarray]:
        for begin in range(0, rows, size):
            with _damage(folder / "observation"):
                block = np.asarray(array[begin : begin + size])
            yield block

    return blocks()


def _contents(folder: Path) -> tuple[int, dict[str, type[np.generic]]]:
    """Return the number of rows and the fields of a segment."""
    about = segment_about(folder)
    return about["rows"], _fields(**{kind: about.get(kind, False) for kind in ("searched", "sketched", "framed")})


def _opened(folder: Path) -> zarr.Array:
    array = zarr.open_array(store=folder, mode="r", zarr_format=3)
    _check_files(folder, array)
    return array


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Turn any error of reading into an ArtifactError of one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(f"{folder}: damaged: {reason}; see: wm verify") from error


def _misfit(folder: Path, array: np.ndarray | zarr.Array, rows: int) -> ArtifactError:
    return ArtifactError(f"{folder}: {array.dtype} {array.shape} does not fit a segment of {rows} rows; see: wm verify")


def _check_files(folder: Path, array: zarr.Array) -> None:
    """Raise FileNotFoundError if a file of the array is missing, which zarr reads as zeros."""
    piece = array.shards or array.chunks
    counts = [ceil(size / step) for size, step in zip(array.shape, piece, strict=True)]
    for index in itertools.product(*(range(count) for count in counts)):
        file = folder / "c" / "/".join(str(i) for i in index)
        if not file.is_file():
            raise FileNotFoundError(f"{file.relative_to(folder)} is missing")


class Recorder:
    """Collects the rows of one segment in memory, step by step.

    Args:
        steps: Largest number of steps.
        streams: Number of streams E.
        frame: Shape (H, W, C) of a frame.
        actions: Number of actions A, to record search results too.
    """

    def __init__(self, steps: int, streams: int, frame: tuple[int, ...], actions: int | None = None) -> None:
        self._streams = streams
        self._rows = 0
        shapes = {"observation": frame, "policy": (actions or 0,)}
        self._arrays = {
            name: np.zeros((steps * streams, *shapes.get(name, ())), dtype)
            for name, dtype in _fields(searched=actions is not None).items()
        }

    def __len__(self) -> int:
        """Return the number of rows so far."""
        return self._rows

    def add(self, step: Mapping[str, np.ndarray]) -> None:
        """Add one step of all streams: every field except `stream`, each (E, ...)."""
        assert set(step) == set(self._arrays) - {"stream"}
        rows = slice(self._rows, self._rows + self._streams)
        assert rows.stop <= len(self._arrays["action"]), "the recorder is full"
        for name, values in step.items():
            assert len(values) == self._streams, f"{len(values)} values of {name} for {self._streams} streams"
            self._arrays[name][rows] = values
        self._arrays["stream"][rows] = np.arange(self._streams)
        self._rows = rows.stop

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays for `write_segment`, as views."""
        return {name: array[: self._rows] for name, array in self._arrays.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the arrays of an earlier recorder, to resume an interrupted collection."""
        self._rows = len(arrays["action"])
        for name, array in arrays.items():
            self._arrays[name][: self._rows] = array
