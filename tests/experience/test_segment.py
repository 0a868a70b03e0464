from __future__ import annotations

import numpy as np
import pytest
import zarr

from wmcli.errors import ArtifactError
from wmcli.experience import Recorder, read_frames, read_segment, segment, write_segment


def arrays(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.integers(256, size=(rows, 6, 5, 3), dtype=np.uint8),
        "action": rng.integers(4, size=rows).astype(np.int32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "terminated": rng.random(rows) < 0.1,
        "truncated": rng.random(rows) < 0.1,
        "first": rng.random(rows) < 0.1,
        "lives": rng.integers(-1, 5, size=rows).astype(np.int16),
        "stream": rng.integers(2, size=rows).astype(np.int16),
    }


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("searched", [False, True])
def test_round_trip_is_bit_exact(tmp_path, monkeypatch, rows: int, shards: int, searched: bool) -> None:
    if shards == 3:
        monkeypatch.setattr(segment, "SHARD", 2 * segment.CHUNK)
    want = arrays(rows)
    if searched:
        want |= {"policy": np.random.default_rng(1).random((rows, 4), np.float32), "value": want["reward"] * 2}
    want["reward"][0] = np.nan
    write_segment(tmp_path / "s", want)
    got = read_segment(tmp_path / "s")
    assert list(got) == list(want)
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].tobytes() == want[name].tobytes()
    assert len(list((tmp_path / "s" / "observation" / "c").iterdir())) == (-(-rows // 128) if shards == 3 else 1)
    with pytest.raises(zarr.errors.ContainsGroupError):
        write_segment(tmp_path / "s", want)


@pytest.mark.parametrize("framed", [False, True])
def test_compact_states_replace_frames_or_accompany_them(tmp_path, framed: bool) -> None:
    want = {"sketch": np.random.default_rng(2).integers(256, size=(90, 7), dtype=np.uint8)} | arrays(90)
    if not framed:
        del want["observation"]
    write_segment(tmp_path / "s", want, files=["one"])
    got = read_segment(tmp_path / "s")
    assert list(got) == list(want) and all(np.array_equal(got[name], want[name]) for name in want)
    assert (read_frames(tmp_path / "s") is None) is not framed
    assert list(read_segment(tmp_path / "s", "sketch", "reward")) == ["sketch", "reward"]
    assert segment.segment_about(tmp_path / "s")["files"] == ["one"]


@pytest.mark.parametrize("blocks", [(150,), (1, 0, 100, 49), (64, 64, 22), (128, 22), (10,) * 15])
def test_frames_in_blocks_are_written_as_if_they_came_at_once(tmp_path, monkeypatch, blocks) -> None:
    monkeypatch.setattr(segment, "SHARD", 2 * segment.CHUNK)
    want = arrays(150)
    write_segment(tmp_path / "whole", want)
    frames = np.split(want["observation"], np.cumsum(blocks)[:-1])
    rest = {name: array for name, array in want.items() if name != "observation"}
    write_segment(tmp_path / "blocks", rest, iter(frames))
    for one, other in zip(files(tmp_path / "whole"), files(tmp_path / "blocks"), strict=True):
        assert one.read_bytes() == other.read_bytes()
    with pytest.raises(AssertionError, match="149 frames for 150 rows"):
        write_segment(tmp_path / "few", rest, iter([want["observation"][:149]]))


def files(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def in_blocks(folder) -> dict[str, np.ndarray]:
    """All of a segment, its frames in blocks."""
    arrays, blocks = read_segment(folder, frames=False), read_frames(folder)
    assert "observation" not in arrays
    return arrays if blocks is None else arrays | {"observation": np.concatenate(list(blocks))}


either_way = pytest.mark.parametrize("read", [read_segment, in_blocks])


@either_way
@pytest.mark.parametrize("shard", [1, 2, 9])
def test_frames_in_blocks_are_read_as_if_they_came_at_once(tmp_path, monkeypatch, shard: int, read) -> None:
    monkeypatch.setattr(segment, "SHARD", shard * segment.CHUNK)
    want = arrays(150)
    write_segment(tmp_path / "s", want)
    monkeypatch.undo()
    got = read(tmp_path / "s")
    assert got.keys() == want.keys() and all(np.array_equal(got[name], want[name]) for name in want)
    blocks = read_frames(tmp_path / "s")
    assert blocks is not None and max(map(len, blocks)) <= shard * segment.CHUNK


def test_all_zero_arrays_are_written_too(tmp_path) -> None:
    write_segment(tmp_path / "s", {name: np.zeros_like(array) for name, array in arrays(70).items()})
    assert len(files(tmp_path / "s")) == 1 + 2 * (len(segment.OUTCOMES) + 2)
    assert not any(array.any() for array in read_segment(tmp_path / "s").values())


@either_way
def test_any_missing_or_cut_file_is_noticed(tmp_path, monkeypatch, read) -> None:
    monkeypatch.setattr(segment, "SHARD", segment.CHUNK)
    folder = tmp_path / "s"
    write_segment(folder, arrays(150))
    assert len(files(folder)) == 1 + 2 * len(segment.OUTCOMES) + 4 + 2
    for file in files(folder):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ArtifactError, match="wm verify"):
            read(folder)
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(ArtifactError, match="wm verify"):
            read(folder)
        file.write_bytes(content)
    read(folder)


@either_way
def test_flipped_bits_are_noticed(tmp_path, read) -> None:
    folder = tmp_path / "s"
    write_segment(folder, arrays(100))
    rng = np.random.default_rng(4)
    for file in (folder / "observation" / "c").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            for _ in range(30):
                changed = bytearray(content)
                changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
                file.write_bytes(changed)
                with pytest.raises(ArtifactError):
                    read(folder)


@either_way
def test_arrays_that_do_not_fit_together_are_noticed(tmp_path, read) -> None:
    write_segment(tmp_path / "long", arrays(90))
    write_segment(tmp_path / "short", arrays(80))
    (tmp_path / "short" / "reward").rename(tmp_path / "short" / "old")
    (tmp_path / "long" / "reward").rename(tmp_path / "short" / "reward")
    with pytest.raises(ArtifactError, match=r"reward: float32 \(90,\) does not fit a segment of 80 rows"):
        read(tmp_path / "short")


def test_other_formats_are_refused(tmp_path) -> None:
    with pytest.raises(ArtifactError, match="no experience segment"):
        read_segment(tmp_path)
    zarr.create_group(tmp_path / "g", attributes={"format": "wm-segment", "schema": 3, "rows": 3})
    with pytest.raises(ArtifactError, match="a segment of schema 3"):
        read_segment(tmp_path / "g")


@pytest.mark.parametrize("actions", [None, 4])
def test_recorder_interleaves_streams_and_goes_on_after_a_load(actions: int | None) -> None:
    source = arrays(21)
    if actions:
        source |= {"policy": np.random.default_rng(1).random((21, actions), np.float32), "value": source["reward"] * 2}
    steps = [{name: array[3 * t : 3 * t + 3] for name, array in source.items() if name != "stream"} for t in range(7)]
    final = {stream: np.full((6, 5, 3), 50 + stream, np.uint8) for stream in range(3)}
    whole, part, resumed = Recorder(7, 3), Recorder(4, 3), Recorder(7, 3)
    for step in steps:
        whole.add(step, final)
    for step in steps[:4]:
        part.add(step, final)
    resumed.load(part.arrays())
    assert len(resumed) == 12 and resumed.closings == part.closings
    for step in steps[4:]:
        resumed.add(step, final)
    source["stream"] = np.tile(np.arange(3), 7).astype(np.int16)
    ended = source["terminated"] | source["truncated"]
    source["closing"] = np.stack([final[stream] for stream in source["stream"][ended]])
    for name, array in source.items():
        assert (whole.arrays()[name] == array).all()
        assert (resumed.arrays()[name] == array).all()
    with pytest.raises(AssertionError, match="full"):
        whole.add(steps[0], final)
