"""Arrays of a segment, checked before zarr reads them.

Anybody may have written them. So their layout is one that wm writes, and what comes out of a chunk is as long as the
layout says, by the header of its zstd frame: memory is taken for what was declared and no more.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zarr

from wmcli.config import is_deeper
from wmcli.errors import MachineError
from wmcli.memory import free_memory
from wmcli.progress import size
from wmcli.reading import damage, open_file, read_file

METADATA = "zarr.json"
MAX_METADATA_BYTES = 16 << 20  # of a group, whose attributes have the seeds of all episodes
MOST_DEPTH = 20
NUMBERS = ("bool", "uint8", "int16", "int32", "float32")
MOST_AXES = 8
MOST_IN_SHARD = 1 << 16  # chunks
SMALL_BYTES = 1 << 30  # of an array, which is not worth a look at its ratio
MOST_RATIO = 10_000  # of unpacked to stored bytes; frames of plain environments reach 2,000
_ZSTD = 0xFD2FB528
_ABSENT = 2**64 - 1  # offset and length of a chunk that a shard does not have


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the zarr.json of a group or an array.

    Raises:
        ArtifactError: It is missing or damaged.
        MachineError: It cannot be read.
    """
    with damage(folder):
        values = json.loads(read_file(folder / METADATA, MAX_METADATA_BYTES))
        if not isinstance(values, dict) or is_deeper(values, MOST_DEPTH):
            raise ValueError(f"{METADATA} is no metadata")
        return values


def open_array(folder: Path) -> zarr.Array:
    """Open an array to read it.

    Raises:
        ArtifactError: A file is missing or damaged, or the layout is none that wm writes.
        MachineError: A file cannot be read, or the memory does not hold a piece of it.
    """
    about = read_metadata(folder)
    with damage(folder):
        _check_layout(about)
        array = zarr.open_array(store=folder, mode="r", zarr_format=3)
        stored = sum(_check_file(folder, index, array) for index in _indices(array))
        if array.nbytes > max(SMALL_BYTES, MOST_RATIO * stored):
            raise ValueError(f"{stored} bytes would unpack to {array.nbytes}")
        check_memory(folder, math.prod(array.shards or array.chunks) * array.dtype.itemsize)
    return array


def check_memory(folder: Path, needed: int) -> None:
    """Raise MachineError if so many bytes of a segment do not fit in the memory that is free."""
    if needed > (free := free_memory()):
        raise MachineError(f"{folder}: takes {size(needed)} of memory, of which {size(free)} are free: free some.")


def _check_layout(about: dict[str, Any]) -> None:
    """Raise an error if metadata describe no array as wm writes them, which zarr would decode as they say."""
    shape, grid, codecs = about["shape"], about["chunk_grid"], about["codecs"]
    piece = grid["configuration"]["chunk_shape"]
    if (about["zarr_format"], about["node_type"], grid["name"]) != (3, "array", "regular"):
        raise ValueError("no array of zarr v3")
    if about["data_type"] not in NUMBERS or not _is_shape(shape) or not _is_shape(piece):
        raise ValueError(f"{str(about['data_type'])[:40]} {str(shape)[:60]} in chunks {str(piece)[:60]}")
    if about["chunk_key_encoding"] != {"name": "default", "configuration": {"separator": "/"}}:
        raise ValueError("chunks have other names")
    if about.get("storage_transformers"):
        raise ValueError("it has storage transformers")
    if _names(codecs) == ["sharding_indexed"]:
        inside = codecs[0]["configuration"]
        chunk = inside["chunk_shape"]
        if _names(inside["codecs"]) != ["bytes", "zstd"] or _names(inside["index_codecs"]) != ["bytes", "crc32c"]:
            raise ValueError("other codecs than wm's")
        fits = _is_shape(chunk) and chunk[1:] == piece[1:] == shape[1:] and 0 < chunk[0] <= piece[0]
        whole = math.ceil(shape[0] / chunk[0]) * chunk[0] if fits else 0
        if not fits or piece[0] % chunk[0] or piece[0] > whole or piece[0] // chunk[0] > MOST_IN_SHARD:
            raise ValueError(f"chunks {str(chunk)[:60]} in shards {str(piece)[:60]} of {str(shape)[:60]}")
        if inside.get("index_location", "end") != "end":
            raise ValueError("the index of a shard is not at its end")
    elif _names(codecs) != ["bytes", "zstd"]:
        raise ValueError("other codecs than wm's")
    elif piece != [max(length, 1) for length in shape]:
        raise ValueError(f"chunks {str(piece)[:60]} of {str(shape)[:60]}")


def _names(codecs: Any) -> list[Any]:
    return [codec["name"] for codec in codecs]


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MOST_AXES
        and all(type(each) is int and 0 <= each < 2**40 for each in value)
    )


# -- files ------------------------------------------------------------------------------------------------------------


def _indices(array: zarr.Array) -> Iterator[tuple[int, ...]]:
    piece = array.shards or array.chunks
    return product(*(range(math.ceil(length / step)) for length, step in zip(array.shape, piece, strict=True)))


def _check_file(folder: Path, index: tuple[int, ...], array: zarr.Array) -> int:
    """Check that what comes out of a file is as long as declared. Return the bytes of the file.

    Raises:
        OSError: It is missing, which zarr reads as zeros.
        ValueError: It is damaged.
    """
    name = "/".join(map(str, ("c", *index)))
    declared = math.prod(array.chunks) * array.dtype.itemsize
    try:
        file = open_file(folder / name)
    except FileNotFoundError:
        raise FileNotFoundError(f"{name} is missing") from None
    with file:
        stored = os.fstat(file.fileno()).st_size
        for begin in _frames(file, stored, array) if array.shards else [0]:
            file.seek(begin)
            if (unpacked := _unpacked(file.read(18))) != declared:
                raise ValueError(f"{name}: a chunk unpacks to {unpacked} bytes instead of {declared}")
    return stored


def _frames(file: BinaryIO, stored: int, array: zarr.Array) -> list[int]:
    """Return where the chunks of a shard begin, by the index at its end, behind which is a checksum of 4 bytes."""
    assert array.shards is not None
    count = array.shards[0] // array.chunks[0]
    if stored < (length := 16 * count + 4):
        raise ValueError("a shard is too short")
    file.seek(stored - length)
    index = np.frombuffer(file.read(16 * count), "<u8").reshape(count, 2)
    begins, lengths = index[(index != _ABSENT).all(1)].T
    if (begins > stored).any() or (lengths > stored).any():
        raise ValueError("a shard lacks a chunk that is in its index")
    return [int(begin) for begin in begins]


def _unpacked(head: bytes) -> int:
    """Return the bytes that a zstd frame unpacks to, by its header (RFC 8878, 3.1.1.1)."""
    if len(head) < 6 or struct.unpack_from("<I", head)[0] != _ZSTD:
        raise ValueError("a chunk is no zstd frame")
    flags = head[4]
    is_single = bool(flags & 0x20)
    begin = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    length = (int(is_single), 2, 4, 8)[flags >> 6]
    if not length or len(head) < begin + length:
        raise ValueError("a chunk does not say what it unpacks to")
    return int.from_bytes(head[begin : begin + length], "little") + 256 * (length == 2)
