"""Images that stay on disk: the same rows as in memory, chunk by chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from test_closing import ROUNDS, recorded

from wmcli.errors import ArtifactError
from wmcli.experience import Replay, read_segment, stored, write_segment
from wmcli.experience.segment import open_frames, read_frames
from wmcli.experience.stored import StoredColumn
from wmcli.spaces import parts_of
from wmcli.transfer import take_rows

CPU = torch.device("cpu")


def both(folder: Path, *, parts: bool, closing: bool) -> tuple[Replay, Replay]:
    """The same three segments in memory and on disk."""
    in_memory, on_disk = Replay("cpu", closing=closing), Replay("cpu", closing=closing, frames_on="disk")
    for number in range(3):
        segment = folder / str(number)
        write_segment(segment, recorded(parts=parts, start=number * ROUNDS).arrays())
        in_memory.extend(read_segment(segment, frames=False), read_frames(segment))
        on_disk.extend(read_segment(segment, frames=False), stored=open_frames(segment))
    return in_memory, on_disk


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_rows_are_those_of_memory(tmp_path: Path, parts: bool, closing: bool) -> None:
    """Of several streams and segments, closing observations included. Only images are on disk."""
    in_memory, on_disk = both(tmp_path, parts=parts, closing=closing)
    assert on_disk.frames_on_disk and not on_disk.frames_on_host and not in_memory.frames_on_disk
    assert len(on_disk) == len(in_memory)
    for name in ("action", "reward", "terminated", "truncated", "first", "opens_game", "ends_game"):
        assert torch.equal(getattr(on_disk, name), getattr(in_memory, name)), name
    kinds = {name: type(part) for name, part in parts_of(on_disk.observation).items()}
    assert kinds == ({"a.b": StoredColumn, "speed": torch.Tensor} if parts else {"": StoredColumn})
    rows = np.random.default_rng(0).integers(len(in_memory), size=(5, 7))
    for name, column in parts_of(in_memory.observation).items():
        other = parts_of(on_disk.observation)[name]
        assert other.shape == column.shape and other.dtype == column.dtype and other.nbytes == column.nbytes
        assert torch.equal(take_rows(other, rows, CPU), column[torch.from_numpy(rows)])
        assert torch.equal(other[3:11], column[3:11]) and torch.equal(other[:], column)
        assert torch.equal(other[rows[0]], column[rows[0]])


def test_a_chunk_is_decoded_once_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 40
    image = np.arange(rows, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    array = zarr.create_array(tmp_path / "array", data=image, chunks=(4, 2, 2, 3))
    column, read = StoredColumn(image[:0]), []
    original = zarr.Array.__getitem__
    monkeypatch.setattr(zarr.Array, "__getitem__", lambda self, key: read.append(key) or original(self, key))
    monkeypatch.setattr(stored, "CACHE_BYTES", 3 * 4 * 12)
    column.append(array, np.arange(rows), image[:0])

    def numbers(*wanted: int) -> list[int]:
        return column.take(np.array(wanted))[:, 0, 0, 0].tolist()

    assert numbers(5, 1, 6, 1, 30) == [5, 1, 6, 1, 30]
    assert read == [slice(0, 8), slice(28, 32)], "neighbors in one call"
    assert numbers(2, 29) == [2, 29] and len(read) == 2, "all three are kept"
    assert numbers(36) == [36] and numbers(0) == [0] and len(read) == 3
    assert numbers(5) == [5] and len(read) == 4, "the one that was not used longest is gone"
    assert numbers(*range(rows)) == list(range(rows)), "more than are kept"
    assert column._held == sum(each.nbytes for each in column._chunks.values()) <= 3 * 4 * 12


def test_damage_is_one_line(tmp_path: Path) -> None:
    _, on_disk = both(tmp_path, parts=False, closing=False)
    for file in (tmp_path / "0" / "observation" / "c").rglob("*"):
        if file.is_file():
            file.write_bytes(b"nothing")
    with pytest.raises(ArtifactError, match=r"observation.*damaged: .*wm verify") as error:
        on_disk.observation.take(np.array([0]))
    assert "\n" not in str(error.value)
