"""A segment: the experience of one collection, written once as a zarr v3 group and never changed.

N rows, H height, W width, C color channel. A row is one decision of one environment (one *stream*); rows of several
streams stand interleaved, and within a stream they are in the order of time.

Frames lie in chunks of 64 rows, zstd with checksum (without it zarr reads most flipped bits back without a word),
inside shards. A segment is never appended to: an interrupted append leaves rows that read back as zeros. zarr also
reads a missing shard as zeros, so every shard is written even if it is all zeros, and reading begins by looking for
each file. That publishing is atomic and durable is the business of `wmcli.artifacts`.
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
    "reward": np.float32,  # (N,) as the environment gave it
    "terminated": np.bool_,  # (N,)
    "truncated": np.bool_,  # (N,)
    "first": np.bool_,  # (N,) the frame opens an episode
    "lives": np.int16,  # (N,) left after the step, -1 where unknown
    "stream": np.int16,  # (N,) which of the environments side by side
}
SEARCHED: dict[str, type[np.generic]] = {
    "policy": np.float32,  # (N, A) shares of the actions in the search that chose the action
    "value": np.float32,  # (N,) of the frame, by that search
}
"""What a segment holds as well if it was played by a search."""
SKETCH = {"sketch": np.uint8}  # (N, S)
"""What a segment of a memory task holds: the bytes that frames are drawn from, in place of them, or beside them where
they are recordings that none of ours look like."""
AXES = {"observation": 4, "policy": 2, "sketch": 2}  # all others have one
FORMAT = {"format": "wm-segment", "schema": 1}
CHUNK = 64  # rows, about 0.8 MB of 64 x 64 frames: the smallest piece that is decoded
SHARD = 256 * CHUNK  # rows, about 200 MB of 64 x 64 frames: the most that is held in memory twice while writing


def lives_left(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return int16 (N,): with how many lives the game goes on behind a step that ended an episode by losing one, -1
    behind every other step. Only for environments where a lost life ends an episode."""
    lost = arrays["terminated"] & ~arrays["truncated"] & (arrays["lives"] > 0)
    return np.where(lost, arrays["lives"], -1).astype(np.int16)


def opens_game(first: np.ndarray, lives: np.ndarray, left_before: np.ndarray) -> np.ndarray:
    """Return bool (n,): which rows open a game, and not only its next life.

    More lives than were left belong to a new game: the one before was cut and could not be played again.

    Args:
        first: (n,) of the rows, as `lives`.
        left_before: (n,) `lives_left` of the row before each in its stream, -1 where there is none.
    """
    return first & ((left_before < 0) | (lives > left_before))


def _fields(*, searched: bool, sketched: bool = False, framed: bool = False) -> dict[str, type[np.generic]]:
    """`framed`: holds frames although it is sketched."""
    fields = dict(FIELDS)
    if sketched and not framed:
        del fields["observation"]
    return (SKETCH if sketched else {}) | fields | (SEARCHED if searched else {})


def write_segment(
    folder: Path, arrays: Mapping[str, np.ndarray], frames: Iterable[np.ndarray] | None = None, **about: Any
) -> None:
    """Write `arrays`, all with the same N > 0, as a new zarr group at `folder`, which must not exist.

    They are those of FIELDS, with SKETCH for the observation where frames can be drawn anew, and perhaps of SEARCHED.
    `frames`: the observation in blocks (n, H, W, C) of any lengths, where all of it is too much for memory; one shard
    of it is held at a time. `about`: JSON values to keep beside them, such as the seeds of the episodes.
    """
    rows = len(arrays["action"])
    assert rows > 0, "a segment has at least one row"
    held = set(arrays) | ({"observation"} if frames is not None else set())
    kinds = {"searched": "policy" in held, "sketched": "sketch" in held, "framed": {"sketch", "observation"} <= held}
    fields = _fields(**kinds)
    assert held == set(fields), f"a segment has the fields {', '.join(fields)}"
    assert all(array.ndim == AXES.get(name, 1) and len(array) == rows for name, array in arrays.items())
    about = {**about, **FORMAT, "rows": rows} | {kind: True for kind, holds in kinds.items() if holds}
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
    """The same rows in blocks of so many, the last one of fewer."""
    held: list[np.ndarray] = []
    for block in blocks:
        while len(block):
            part = block[: rows - sum(map(len, held))]
            held.append(part)
            block = block[len(part) :]
            if sum(map(len, held)) == rows:
                yield np.concatenate(held)
                held = []
    if held:
        yield np.concatenate(held)


def segment_about(folder: Path) -> dict[str, Any]:
    """What was kept beside the arrays of a segment. Raises ArtifactError when the folder is no segment of ours."""
    try:
        attributes = json.loads((folder / "zarr.json").read_bytes())["attributes"]
        found = {key: attributes[key] for key in ("rows", *FORMAT)}
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(f"{folder}: no experience segment, or a damaged one; see: wm verify") from None
    del found["rows"]
    if found != FORMAT:
        raise ArtifactError(f"{folder}: written as {found}, but this wm reads {FORMAT}; use the wm that wrote it.")
    return attributes


def read_segment(folder: Path, *only: str, frames: bool = True) -> dict[str, np.ndarray]:
    """The arrays of a segment: FIELDS, SKETCH beside or in place of the observation where it has them, and SEARCHED if
    a search played it; or `only` those of these names; without `frames`, all but the observation.

    Raises ArtifactError when the folder is no segment, when a file of it is missing or does not decode, or when the
    arrays do not fit together.
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
    """The observation of a segment in blocks (n, H, W, C), one held at a time; None where it has but sketches.

    Raises ArtifactError as `read_segment` does, also between two blocks.
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
    """How many rows, and of which arrays."""
    about = segment_about(folder)
    return about["rows"], _fields(**{kind: about.get(kind, False) for kind in ("searched", "sketched", "framed")})


def _opened(folder: Path) -> zarr.Array:
    array = zarr.open_array(store=folder, mode="r", zarr_format=3)
    _check_files(folder, array)
    return array


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Tells what went wrong in one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(f"{folder}: damaged: {reason}; see: wm verify") from error


def _misfit(folder: Path, array: np.ndarray | zarr.Array, rows: int) -> ArtifactError:
    return ArtifactError(f"{folder}: {array.dtype} {array.shape} does not fit a segment of {rows} rows; see: wm verify")


def _check_files(folder: Path, array: zarr.Array) -> None:
    """Every file the array is made of is there: zarr itself takes a missing one for zeros."""
    piece = array.shards or array.chunks
    counts = [ceil(size / step) for size, step in zip(array.shape, piece, strict=True)]
    for index in itertools.product(*(range(count) for count in counts)):
        file = folder / "c" / "/".join(str(i) for i in index)
        if not file.is_file():
            raise FileNotFoundError(f"{file.relative_to(folder)} is missing")


class Recorder:
    """Collects the rows of one segment in memory, step by step, from E streams with frames of shape `frame` (H, W, C).

    `steps`: the most it can hold. `actions`: their number A, if what a search finds is recorded as well.
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
        """Rows so far."""
        return self._rows

    def add(self, step: Mapping[str, np.ndarray]) -> None:
        """One step of all streams: every field but `stream`, each (E, ...)."""
        assert set(step) == set(self._arrays) - {"stream"}
        rows = slice(self._rows, self._rows + self._streams)
        assert rows.stop <= len(self._arrays["action"]), "the recorder is full"
        for name, values in step.items():
            assert len(values) == self._streams, f"{len(values)} values of {name} for {self._streams} streams"
            self._arrays[name][rows] = values
        self._arrays["stream"][rows] = np.arange(self._streams)
        self._rows = rows.stop

    def arrays(self) -> dict[str, np.ndarray]:
        """What was added so far, ready for `write_segment` (views, not copies)."""
        return {name: array[: self._rows] for name, array in self._arrays.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Begin with the rows of an earlier recorder's `arrays()`: how an interrupted collection goes on."""
        self._rows = len(arrays["action"])
        for name, array in arrays.items():
            self._arrays[name][: self._rows] = array
