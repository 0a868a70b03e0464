"""A segment: the experience of one collection, written once as a zarr v3 group and never changed.

N rows, H height, W width, C colour channel. A row is one decision of one environment (one *stream*); rows of several
streams stand interleaved, and within a stream they are in the order of time.

Frames lie in chunks of 64 rows, zstd with checksum (without it zarr reads most flipped bits back without a word),
inside shards. A segment is never appended to: an interrupted append leaves rows that read back as zeros. zarr also
reads a missing shard as zeros, so every shard is written even if it is all zeros, and reading begins by looking for
each file. That publishing is atomic and durable is the business of `wmcli.artifacts`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
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
"""What a segment of a memory task holds in place of frames: the bytes that they are drawn from."""
AXES = {"observation": 4, "policy": 2, "sketch": 2}  # all others have one
FORMAT = {"format": "wm-segment", "schema": 1}
CHUNK = 64  # rows, about 0.8 MB of 64 x 64 frames: the smallest piece that is decoded
SHARD = 256 * CHUNK  # rows, about 200 MB of 64 x 64 frames: the most that is held in memory twice while writing


def _fields(*, searched: bool, sketched: bool) -> dict[str, type[np.generic]]:
    frames = SKETCH | {name: kind for name, kind in FIELDS.items() if name != "observation"} if sketched else FIELDS
    return frames | SEARCHED if searched else frames


def write_segment(folder: Path, arrays: Mapping[str, np.ndarray], **about: Any) -> None:
    """Write `arrays`, all with the same N > 0, as a new zarr group at `folder`, which must not exist.

    They are those of FIELDS, with SKETCH for the observation where frames can be drawn anew, and perhaps of SEARCHED.
    `about`: JSON values to keep beside them, such as the seeds of the episodes.
    """
    rows = len(arrays["action"])
    assert rows > 0, "a segment has at least one row"
    kinds = {"searched": "policy" in arrays, "sketched": "sketch" in arrays}
    fields = _fields(**kinds)
    assert set(arrays) == set(fields), f"a segment has the fields {', '.join(fields)}"
    assert all(arrays[name].ndim == AXES.get(name, 1) and len(arrays[name]) == rows for name in fields)
    about = {**about, **FORMAT, "rows": rows} | {kind: True for kind, holds in kinds.items() if holds}
    group = zarr.create_group(store=folder, zarr_format=3, attributes=about)
    shard = min(ceil(rows / CHUNK) * CHUNK, SHARD)
    for name, dtype in fields.items():
        data = np.ascontiguousarray(arrays[name].astype(dtype, casting="same_kind", copy=False))
        frames = name == "observation"
        array = group.create_array(
            name,
            shape=data.shape,
            dtype=dtype,
            chunks=(CHUNK, *data.shape[1:]) if frames else data.shape,
            shards=(shard, *data.shape[1:]) if frames else None,
            compressors=ZstdCodec(level=1, checksum=True),
            fill_value=0,
            config={"write_empty_chunks": True},
        )
        array[...] = data


def read_segment(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a segment: FIELDS, or with SKETCH for the observation, and SEARCHED if a search played it.

    Raises ArtifactError when the folder is no segment, when a file of it is missing or does not decode, or when the
    arrays do not fit together.
    """
    try:
        attributes = json.loads((folder / "zarr.json").read_bytes())["attributes"]
        rows = attributes["rows"]
        kinds = {kind: attributes.get(kind, False) for kind in ("searched", "sketched")}
        found = {key: attributes[key] for key in FORMAT}
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(f"{folder}: no experience segment, or a damaged one; see: wm verify") from None
    if found != FORMAT:
        raise ArtifactError(f"{folder}: written as {found}, but this wm reads {FORMAT}; use the wm that wrote it.")
    arrays = {}
    for name, dtype in _fields(**kinds).items():
        try:
            array = zarr.open_array(store=folder / name, mode="r", zarr_format=3)
            _check_files(folder / name, array)
            arrays[name] = np.asarray(array[...])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ArtifactError(f"{folder / name}: damaged: {reason}; see: wm verify") from error
        shape_fits = arrays[name].ndim == AXES.get(name, 1) and len(arrays[name]) == rows
        if not shape_fits or arrays[name].dtype != dtype:
            raise ArtifactError(
                f"{folder / name}: {arrays[name].dtype} {arrays[name].shape} does not fit a segment of {rows} rows; "
                f"see: wm verify"
            )
    return arrays


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
            for name, dtype in _fields(searched=actions is not None, sketched=False).items()
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
