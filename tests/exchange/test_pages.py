"""The code of docs/data.md and docs/format.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import SPACES, random_recording
from test_round_trips import segment_of

from wmcli.exchange import open_recording, write_recording
from wmcli.spaces import Discrete, Spaces, Vector, column_names, map_parts

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_code_about_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recordings").mkdir()
    recording = random_recording(SPACES["vector"])
    write_recording(recording, "npz", tmp_path / "robot-npz")
    write_recording(recording, "minari", tmp_path / "robot-minari")
    first, _, last = blocks("data.md")
    exec(compile(first, "data.md", "exec"), {})
    (episode,) = open_recording("recordings")
    assert len(episode) == 100 and episode.has_closing and episode.terminated[-1]
    exec(compile(last, "data.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(recording)


def test_the_code_that_records_with_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    pytest.importorskip("jax")  # which its collector needs
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    exec(compile(blocks("data.md")[1], "data.md", "exec"), {})
    recording = open_recording("minari:cartpole/mixed-v0")
    assert len(recording) == 60 and recording.spaces == Spaces(Vector(4), Discrete(2))


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("name", ["image", "parts"])
def test_the_reader_of_segments(name: str, closing: bool, streams: int, tmp_path: Path) -> None:
    (code,) = blocks("format.md")
    names: dict[str, Any] = {}
    exec(compile(code, "format.md", "exec"), names)
    recording = random_recording(SPACES[name], closing=closing, count=7)
    segment_of(recording, tmp_path / "segment.zarr", streams)
    read = list(names["episodes"](tmp_path / "segment.zarr"))
    made = [
        episode for stream in range(streams) for index, episode in enumerate(recording) if index % streams == stream
    ]
    for columns, episode in zip(read, made, strict=True):
        time = len(episode)
        expected = column_names("observation", map_parts(lambda part, end=time: part[:end], episode.observation))
        if closing:
            expected |= column_names("closing", map_parts(lambda part: part[-1], episode.observation))
        expected |= {each: getattr(episode, each) for each in ("action", "reward", "terminated", "truncated")}
        assert set(columns) == set(expected) | {"first", "lives", "stream"}
        assert all(np.array_equal(columns[each], array) for each, array in expected.items())
