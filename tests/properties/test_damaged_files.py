"""Files of a run and recordings that are damaged at random: a reader returns or raises one line, in time."""

from __future__ import annotations

import copy
import json
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recordings import SPACES, random_episode
from searching import counts, searching

from wmcli.artifacts import Artifact, Run, check, find_removable
from wmcli.artifacts.lineage import lineage
from wmcli.artifacts.overview import describe_run
from wmcli.errors import WmError
from wmcli.exchange import Recording, open_recording, write_recording
from wmcli.exchange.video import encode
from wmcli.experience import Replay, read_segment, write_segment
from wmcli.experience.load import SEGMENT
from wmcli.experience.segment import open_frames, read_frames
from wmcli.settings import resolve
from wmcli.training.checkpoint import load_tensors, save_tensors
from wmcli.transfer import take_rows

SECONDS = 20.0  # for one file, on a busy machine
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    1 << 40,
    "",
    "x" * 300,
    "../../etc/passwd",
    "/etc/passwd",
    "a\nb\x00c",
    "\ud800",
    [],
    {},
    [[[[]]]],
    ["a", 1],
    {"a": {"b": 1}},
    float("nan"),
    float("inf"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a tree of JSON, without its root."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


@st.composite
def damaged_json(draw: st.DrawFn, value: Any) -> bytes:
    """A JSON document in which a value is another, or missing."""
    value = copy.deepcopy(value)
    path = draw(st.sampled_from(list(places(value))))
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    if draw(st.booleans()):
        inside[path[-1]] = draw(st.sampled_from(HOSTILE))
    else:
        del inside[path[-1]]
    return json.dumps(value).encode()


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """A file that is cut, or in which bytes are flipped, missing or new."""
    for _ in range(draw(st.integers(1, 3))):
        if not content:
            break
        place = draw(st.integers(0, len(content) - 1))
        how = draw(st.sampled_from(["cut", "flip", "drop", "insert", "zero"]))
        if how == "cut":
            content = content[:place]
        elif how == "flip":
            content = content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
        elif how == "drop":
            content = content[:place] + content[place + draw(st.integers(1, 40)) :]
        elif how == "insert":
            content = content[:place] + draw(st.binary(min_size=1, max_size=12)) + content[place:]
        else:
            content = content[:place] + bytes(min(16, len(content) - place)) + content[place + 16 :]
    return content


def reads(*readers: Callable[[], object]) -> None:
    """Call readers, each of which may refuse in one line."""
    for read in readers:
        began = time.monotonic()
        try:
            read()
        except WmError as error:
            assert "\n" not in str(error), error
        assert time.monotonic() - began < SECONDS


def segment() -> dict[str, np.ndarray]:
    rows = 12
    ends = np.arange(rows) % 4 == 3
    return {
        "observation": np.arange(rows * 24, dtype=np.uint8).reshape(rows, 4, 3, 2),
        "action": np.arange(rows, dtype=np.int32) % 3,
        "reward": np.ones(rows, np.float32),
        "terminated": ends,
        "truncated": np.zeros(rows, bool),
        "first": np.arange(rows) % 4 == 0,
        "lives": np.zeros(rows, np.int16),
        "stream": np.zeros(rows, np.int16),
        "closing": np.zeros((3, 4, 3, 2), np.uint8),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three versions."""
    run = Run.open(tmp_path_factory.mktemp("runs") / "run", create=True)
    settings = resolve("rem").plain()
    run.bind("rem", settings, [{"epoch": 2, "set": ["dynamics.learning_rate=1e-5"]}])
    made: dict[str, Artifact] = {}
    for kind, roles in (("experience", ()), ("tokenizer", ("experience",)), ("dynamics", ("tokenizer", "experience"))):
        with run.job(kind, {}, {role: made[role] for role in roles}).work() as work:
            if kind == "experience":
                write_segment(work.payload / SEGMENT, segment())
            else:
                save_tensors(work.payload / "model.safetensors", {"w": torch.ones(2, 3), "b": torch.zeros(2)}, {"a": 1})
            metrics = {"steps": 12, "total_steps": 12}
            environment = {"id": "wm/Catch-v0", "train": {}, "test": {}, "versions": {}}
            made[kind] = work.publish(
                settings=settings, metrics=metrics, environment=environment, machine={"threads": 1}
            )
    return run.path


@pytest.fixture
def copied(whole: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(whole, Path(folder) / "run", symlinks=True)
        yield Path(folder) / "run"


def every_reader(run: Path) -> None:
    """What reports and stages ask of a run."""
    opened = Run.open(run, create=False)

    def inputs(kind: str) -> None:
        artifact = opened.get(kind, 1)
        assert artifact.name and (artifact.metrics, artifact.settings, artifact.pruned)
        for role in artifact.inputs:
            artifact.input(role)
        artifact.verify_again()
        lineage(artifact)

    reads(*(lambda kind=kind: inputs(kind) for kind in ("experience", "tokenizer", "dynamics")))
    reads(lambda: check(opened), lambda: find_removable(opened), lambda: opened.latest("dynamics"))
    reads(lambda: opened.resolve("dynamics@1", "dynamics"), lambda: describe_run(run))


@counts(8, 400)
@pytest.mark.parametrize("form", ["json", "bytes"])
def test_a_damaged_manifest(copied: Path, examples: int, form: str) -> None:
    file = copied / "dynamics" / "v0001" / "manifest.json"
    good = file.read_bytes()
    file.chmod(0o644)

    @searching(examples)
    @given(damaged_json(json.loads(good)) if form == "json" else damaged_bytes(good))
    def holds(content: bytes) -> None:
        file.write_bytes(content)
        every_reader(copied)

    holds()


@counts(8, 400)
def test_a_damaged_file_of_settings(copied: Path, examples: int) -> None:
    file = copied / "run.toml"
    good = file.read_bytes()

    @searching(examples)
    @given(damaged_bytes(good))
    def holds(content: bytes) -> None:
        file.write_bytes(content)
        opened = Run.open(copied, create=False)

        def settings() -> None:
            bound = opened.bound()
            if bound is not None:
                resolve(bound["preset"], base=bound["settings"])

        reads(settings, opened.bound, lambda: describe_run(copied))

    holds()


@counts(40, 2000)
@pytest.mark.parametrize("form", ["header", "bytes"])
def test_a_damaged_safetensors_file(copied: Path, examples: int, form: str) -> None:
    file = copied / "dynamics" / "v0001" / "model.safetensors"
    good = file.read_bytes()
    file.chmod(0o644)
    (size,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + size])

    @searching(examples)
    @given(
        damaged_json(header) if form == "header" else damaged_bytes(good), st.sampled_from([0, 0, 0, 1, -1, 1 << 40])
    )
    def holds(content: bytes, longer: int) -> None:
        if form == "header":
            content = struct.pack("<Q", max(len(content) + longer, 0)) + content + good[8 + size :]
        file.write_bytes(content)
        reads(lambda: load_tensors(file))

    holds()


def from_disk(folder: Path) -> None:
    """Read frames where they lie, as `training.replay = "disk"` does."""
    replay = Replay("cpu", frames_on="disk")
    replay.extend(read_segment(folder, frames=False), stored=open_frames(folder))
    take_rows(replay.observation, np.arange(len(replay)), replay.device)


@counts(12, 400)
@pytest.mark.parametrize("name", ["zarr.json", "observation/zarr.json", "reward/zarr.json", "observation/c/0/0/0/0"])
def test_a_damaged_segment(copied: Path, examples: int, name: str) -> None:
    folder = copied / "experience" / "v0001" / SEGMENT
    file = folder / name
    good = file.read_bytes()
    file.chmod(0o644)
    is_json = name.endswith("json")

    @searching(examples)
    @given(damaged_json(json.loads(good)) | damaged_bytes(good) if is_json else damaged_bytes(good))
    def holds(content: bytes) -> None:
        file.write_bytes(content)
        reads(
            lambda: Replay("cpu", closing=True).extend(read_segment(folder)),
            lambda: [*(read_frames(folder) or ())],
            lambda: from_disk(folder),
        )

    holds()


def recorded(form: str, folder: Path) -> None:
    """Write two episodes, each of its own pictures, in a form that `wm import` reads."""
    if form == "zarr":
        write_segment(folder, segment())
        return
    pictures = [
        random_episode(SPACES["image"], 5, np.random.default_rng(n), closing=True, end="terminated") for n in (0, 1)
    ]
    if form in ("minari", "lerobot", "lerobot-video"):
        recording = Recording("random", "wm", SPACES["image"], 2, pictures.__getitem__, source={})
        write_recording(recording, form.partition("-")[0], folder, lossy=form == "lerobot-video")
        return
    folder.mkdir()
    rows = ["episode,action,reward,terminated"]
    for name, episode in zip("ab", pictures, strict=True):
        columns = {"observation": episode.observation} | {
            key: getattr(episode, key) for key in ("action", "reward", "terminated", "truncated")
        }
        if form == "npz":
            np.savez(folder / f"{name}.npz", **columns)
        elif form == "npz-deflated":
            np.savez_compressed(folder / f"{name}.npz", **columns)
        elif form == "hdf5":
            with pytest.importorskip("h5py").File(folder / f"{name}.hdf5", "w") as file:
                for key, values in columns.items():
                    file.create_dataset(f"demo_0/{key}", data=values, compression="gzip", chunks=True)
        else:
            encode(folder / f"{name}.mp4", iter(episode.observation), (40, 40), 10)
            ends = episode.terminated.astype(int)
            rows += [f"{name},{a},{r},{e}" for a, r, e in zip(episode.action, episode.reward, ends, strict=True)]
    if form == "mp4":
        (folder / "actions.csv").write_text("\n".join(rows) + "\n")


FORMS = ("npz", "npz-deflated", "hdf5", "zarr", "mp4", "minari", "lerobot", "lerobot-video")


@counts(12, 400)
@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_recording(tmp_path: Path, examples: int, form: str) -> None:
    folder = tmp_path / "recording"
    recorded(form, folder)
    assert len([*open_recording(str(folder))]) in (2, 3)
    whole = {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}

    @searching(examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(list(whole)))
        is_json = file.suffix == ".json"
        good = whole[file]
        damaged = damaged_bytes(good)
        file.write_bytes(data.draw(damaged_json(json.loads(good)) | damaged if is_json else damaged))
        try:
            reads(lambda: [*open_recording(str(folder))])
        finally:
            file.write_bytes(good)

    holds()
