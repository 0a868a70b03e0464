"""What is written reads back as the same bits, and Minari's own package reads it, too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recordings import SPACES, random_recording

from wmcli.errors import UsageError
from wmcli.exchange import Recording, digest_of, open_recording, write_recording
from wmcli.exchange.convert import recording_of
from wmcli.exchange.zarr_folder import Segment
from wmcli.experience import write_segment
from wmcli.spaces import Spaces, column_names, first_part, map_parts, parts_of

FORMS = ("npz", "minari", "lerobot")


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest) -> None:
    form = getattr(request.node, "callspec", None) and request.node.callspec.params.get("form", "")
    if form in ("minari", "lerobot"):
        pytest.importorskip({"minari": "h5py", "lerobot": "pyarrow"}[form])


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("form", FORMS)
def test_written_and_read_is_the_same(form: str, name: str, closing: bool, tmp_path: Path) -> None:
    recording = random_recording(SPACES[name], closing=closing)
    write_recording(recording, form, tmp_path / "out")
    back = open_recording(str(tmp_path / "out"))
    assert digest_of(back) == digest_of(recording)
    assert (back.spaces, back.name, back.source) == (recording.spaces, "random", recording.source)
    assert (back.lossy, back.notes, back.format) == (None, (), form)


def test_a_digest_tells_apart_every_column_and_the_order() -> None:
    recording = random_recording(SPACES["image"])
    first, second, *_ = recording
    digests = {digest_of([first, second]), digest_of([second, first])}
    for name in ("action", "reward", "terminated", "truncated"):
        changed = getattr(first, name).copy()
        changed[-1] = not changed[-1] if changed.dtype == bool else changed[-1] + 1
        digests.add(digest_of([replace(first, **{name: changed}), second]))
    digests.add(digest_of([replace(first, observation=first.observation[:, ::-1]), second]))
    assert len(digests) == 7


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("name", SPACES)
def test_minaris_own_package_reads_what_we_write(name: str, closing: bool, tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    recording = random_recording(SPACES[name], closing=closing)
    write_recording(recording, "minari", tmp_path / "out")
    dataset = minari.MinariDataset(tmp_path / "out" / "data")
    assert dataset.total_episodes == len(recording) and dataset.total_steps == sum(map(len, recording))
    for theirs, ours in zip(dataset.iterate_episodes(), recording, strict=True):
        assert all(np.array_equal(theirs.rewards[i], ours.reward[i]) for i in range(len(ours)))
        assert np.array_equal(theirs.actions, ours.action)
        assert np.array_equal(theirs.terminations, ours.terminated)
        assert np.array_equal(theirs.truncations, ours.truncated)
        seen, known = parts_of(theirs.observations), len(ours) + closing
        for part, array in parts_of(ours.observation).items():
            assert len(seen[part]) == len(ours) + 1, "as Minari needs"
            assert np.array_equal(seen[part][:known], array)
        assert all(dataset.observation_space.contains(_row(theirs.observations, row)) for row in range(len(ours)))
        assert all(dataset.action_space.contains(action) for action in theirs.actions)


def _row(observations: object, row: int) -> object:
    return map_parts(lambda part: part[row], observations)


def test_videos_are_close_and_say_so(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("imageio_ffmpeg")
    recording = smooth_recording()
    write_recording(recording, "lerobot", tmp_path / "out", lossy=True)
    back = open_recording(str(tmp_path / "out"))
    assert back.lossy == "video (mp4)" and back.spaces == recording.spaces
    for theirs, ours in zip(back, recording, strict=True):
        assert theirs.observation.shape == ours.observation.shape
        difference = np.abs(theirs.observation.astype(int) - ours.observation)
        assert 0 < difference.mean() < 4, "some loss, and the right frames"
        assert digest_of([replace(theirs, observation=ours.observation)]) == digest_of([ours])


def smooth_recording() -> Recording:
    """Frames that differ from each other in their brightness, as videos can keep."""
    spaces = Spaces.of_images(32, 3)
    recording = random_recording(spaces)
    ramp = np.linspace(0, 60, 32)

    def read(index: int) -> object:
        episode = recording.read(index)
        count = len(first_part(episode.observation))
        level = 20 + 20 * np.arange(count)[:, None, None, None] + 5 * index
        frames = level + ramp[None, :, None, None] + ramp[None, None, :, None] / 2 + np.zeros((1, 1, 1, 3))
        return replace(episode, observation=frames.astype(np.uint8))

    return replace(recording, read=read)


@pytest.mark.parametrize("form", ["npz", "minari"])
def test_lossy_is_refused_where_all_is_exact(form: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--lossy is for --to lerobot"):
        write_recording(random_recording(SPACES["image"]), form, tmp_path / "out", lossy=True)


def test_a_folder_with_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="exists and is not empty"):
        write_recording(random_recording(SPACES["image"]), "npz", tmp_path)


# -- segments ----------------------------------------------------------------------------------------------------------


def segment_of(recording: Recording, folder: Path, streams: int = 1, *, begun: bool = False) -> None:
    """Write a recording as a segment. With several streams, episode k is of stream k modulo their number.

    `begun`: an earlier segment has the beginnings of its episodes.
    """
    rows = []
    for index, episode in enumerate(recording):
        for row in range(len(episode)):
            seen = map_parts(lambda part, row=row: part[row], episode.observation)
            closing = None
            if episode.has_closing and row == len(episode) - 1:
                closing = map_parts(lambda part: part[-1], episode.observation)
            values = {name: getattr(episode, name)[row] for name in ("action", "reward", "terminated", "truncated")}
            stream = index % streams
            before = sum(len(recording.read(i)) for i in range(index) if i % streams == stream)
            rows.append((before + row, stream, {**values, "first": row == 0 and not begun, "lives": -1}, seen, closing))
    rows.sort(key=lambda each: each[:2])
    arrays = {name: np.stack([each[2][name] for each in rows]) for name in rows[0][2]}
    arrays["lives"] = arrays["lives"].astype(np.int16)
    arrays["stream"] = np.array([each[1] for each in rows], np.int16)
    arrays |= column_names("observation", map_parts(lambda *each: np.stack(each), *(each[3] for each in rows)))
    if all(episode.has_closing for episode in recording):
        closings = [each[4] for each in rows if each[4] is not None]
        arrays |= column_names("closing", map_parts(lambda *each: np.stack(each), *closings))
    write_segment(folder, arrays)


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("name", SPACES)
def test_a_segment_reads_as_the_episodes_in_it(name: str, streams: int, tmp_path: Path) -> None:
    recording = random_recording(SPACES[name], count=7)
    segment_of(recording, tmp_path / "segment.zarr", streams)
    back = recording_of(Segment([tmp_path / "segment.zarr"], "random", recording.spaces))
    ours = {digest_of([episode]) for episode in recording}
    assert {digest_of([episode]) for episode in back} == ours and len(back) == 7
    if streams == 1:
        assert digest_of(back) == digest_of(recording)


def test_a_segment_alone_finds_its_spaces(tmp_path: Path) -> None:
    recording = random_recording(SPACES["image"], closing=False, count=20)
    segment_of(recording, tmp_path / "segment.zarr")
    back = open_recording(str(tmp_path / "segment.zarr"))
    assert back.spaces == recording.spaces and digest_of(back) == digest_of(recording)


def test_an_episode_continues_in_the_next_segment(tmp_path: Path) -> None:
    recording = random_recording(SPACES["vector"], closing=False, count=6)
    whole = list(recording)
    cut = whole[-1]
    assert len(cut) == 6

    def piece(start: int, stop: int) -> object:
        names = ("observation", "action", "reward", "terminated", "truncated")
        return type(cut)(**{name: getattr(cut, name)[start:stop] for name in names})

    first = replace(recording, read=[*whole[:-1], piece(0, 4)].__getitem__)
    second = replace(recording, count=1, read=[piece(4, 6)].__getitem__)
    for number, part in enumerate((first, second)):
        segment_of(part, tmp_path / f"{number}.zarr", begun=number == 1)
    folders = [tmp_path / "0.zarr", tmp_path / "1.zarr"]
    assert digest_of(recording_of(Segment(folders, "x", recording.spaces))) == digest_of(recording)
    alone = recording_of(Segment(folders[1:], "x", recording.spaces))
    assert len(alone) == 1 and "begin in their middle" in alone.notes[0]


def test_the_description_of_an_npz_folder_is_plain_json(tmp_path: Path) -> None:
    write_recording(random_recording(SPACES["parts"]), "npz", tmp_path / "out")
    about = json.loads((tmp_path / "out" / "recording.json").read_text())
    assert about["spaces"]["actions"] == {"kind": "continuous", "low": [-2.0, 0.0], "high": [1.0, 5.0]}
    assert (about["format"], about["schema"], about["episodes"]) == ("wm-recording", 1, 5)
