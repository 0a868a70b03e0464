"""`wm import` and `wm export experience`: recorded episodes become an artifact like any other, and come out again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import TINY, Killed

from wmcli.artifacts import Artifact, Run
from wmcli.cli.main import run as command
from wmcli.envs import Streams
from wmcli.errors import ArtifactError, UsageError
from wmcli.exchange import Episode, Recording, digest_of, open_recording, write_recording
from wmcli.experience import load, read_segment
from wmcli.experience.segment import IMPORTED
from wmcli.progress import Progress
from wmcli.settings import flatten
from wmcli.spaces import Spaces
from wmcli.stages import imported
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.exported import export_experience, recording_in
from wmcli.stages.imported import Importing, import_experience
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer

SPACES = Spaces.of_images(16, 3)
SETTINGS = [text for text in TINY if not text.startswith(("environment", "collect"))]


def made(count: int, *, closing: bool = True, seed: int = 0, size: int = 16) -> Recording:
    """Episodes of 8 to 19 actions."""
    rng = np.random.default_rng(seed)
    episodes = []
    for number in range(count):
        time = int(rng.integers(8, 20))
        last = np.arange(time) == time - 1
        frames = rng.integers(0, 256, (time + closing, size, size, 3), dtype=np.uint8)
        action, reward = rng.integers(0, 3, time, np.int32), rng.normal(size=time).astype(np.float32)
        episodes.append(Episode(frames, action, reward, last & (number % 2 == 0), last & (number % 2 == 1)))
    return Recording("made", "wm", Spaces.of_images(size, 3), count, episodes.__getitem__, source={"license": "CC0"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recording(made(12), "npz", tmp_path / "made")
    return tmp_path / "made"


def imports(run: Path, source: Path, *overrides: str, **how: Any) -> Artifact:
    """Import a source into a run, which is new or not."""
    importing = Importing(str(source), **how)
    texts = list(overrides) if run.exists() else [*SETTINGS, *overrides]
    texts += importing.defaults(run, texts)
    return import_experience(open_context(run, None, texts, create=True, quiet=True), importing)


def test_an_import_holds_the_episodes_and_says_where_they_come_from(folder: Path, tmp_path: Path) -> None:
    experience = imports(tmp_path / "run", folder)
    assert digest_of(recording_in(experience)) == digest_of(made(12))
    environment = experience.manifest["environment"]
    assert (environment["id"], environment["protocol"]) == ("data/made", "recorded")
    assert (environment["size"], environment["actions"]) == (16, 3)
    metrics = experience.metrics
    assert metrics["source"] == {"license": "CC0", "name": "made"} and metrics["lossy"] is None
    lengths = [len(episode) for episode in made(12)]
    assert (metrics["steps"], metrics["total_steps"], metrics["episodes"]) == (sum(lengths), sum(lengths), 12)
    assert metrics["mean_return"] == pytest.approx(np.mean([episode.reward.sum() for episode in made(12)]))
    arrays = read_segment(experience.path / load.SEGMENT)
    assert set(arrays["stream"]) == {IMPORTED} and set(arrays["lives"]) == {-1}
    assert np.flatnonzero(arrays["first"]).tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    experience.verify_again()


def test_stages_train_on_an_import(folder: Path, tmp_path: Path) -> None:
    imports(tmp_path / "run", folder)
    for stage in (train_tokenizer, train_dynamics):
        artifact = stage(open_context(tmp_path / "run", None, create=False, quiet=True))
        assert artifact.manifest["environment"]["id"] == "data/made"


def test_nobody_can_play_data(folder: Path, tmp_path: Path) -> None:
    imports(tmp_path / "run", folder)
    context = open_context(tmp_path / "run", None, create=False, quiet=True)
    with pytest.raises(UsageError, match="'data/made' is imported data, which nobody can play"):
        Streams(context.settings.environment, train=True, seed=0)
    with pytest.raises(UsageError, match="is imported data, which nobody can play: to collect behind it, import"):
        collect(context)


def test_held_out_episodes_are_the_last_or_drawn(folder: Path, tmp_path: Path) -> None:
    all_of = [digest_of([episode]) for episode in made(12)]

    def parts(experience: Artifact) -> list[list[int]]:
        read = (recording_in(experience, part) for part in (None, "validation", "test"))
        return [[all_of.index(digest_of([episode])) for episode in each] for each in read]

    last = imports(tmp_path / "last", folder, held_out=2)
    assert parts(last) == [list(range(8)), [8, 9], [10, 11]]
    assert (last.metrics["train"], last.metrics["validation"], last.metrics["test"]) == (8, 2, 2)
    drawn = [parts(imports(tmp_path / f"{seed}", folder, f"seed={seed}", held_out=2, shuffled=True)) for seed in (1, 2)]
    assert drawn[0] != drawn[1] and all(sorted(sum(each, [])) == list(range(12)) for each in drawn)
    replay = load.load_held_out(last, "test", "cpu")
    assert len(replay) == sum(len(made(12).read(index)) for index in (10, 11))
    with pytest.raises(UsageError, match="--held-out 6: 12 episodes for validation and test leave none of 12"):
        imports(tmp_path / "none", folder, held_out=6)
    assert not (tmp_path / "none").exists()


def test_the_same_content_is_imported_once_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    first = imports(tmp_path / "run", folder)
    shutil.move(folder, tmp_path / "moved")
    assert imports(tmp_path / "run", tmp_path / "moved").digest == first.digest
    write_recording(made(3, seed=1), "npz", tmp_path / "more")
    second = imports(tmp_path / "run", tmp_path / "more")
    assert second.input("previous").digest == first.digest
    assert second.metrics["total_episodes"] == 15 and second.metrics["episodes"] == 3
    assert digest_of(recording_in(second)) == digest_of([*made(12), *made(3, seed=1)])
    assert imports(tmp_path / "run", tmp_path / "moved").digest == first.digest
    with np.load(tmp_path / "moved" / "episode-0000000.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "moved" / "episode-0000000.npz", **arrays | {"reward": arrays["reward"] + 1})
    third = imports(tmp_path / "run", tmp_path / "moved")
    assert third.version == 3


def test_other_data_do_not_join(folder: Path, tmp_path: Path) -> None:
    imports(tmp_path / "run", folder)
    write_recording(made(3, size=24), "npz", tmp_path / "larger")
    with pytest.raises(UsageError, match=r"not \(16, 16, 3\); to resize them: --size"):
        imports(tmp_path / "run", tmp_path / "larger")
    resized = imports(tmp_path / "run", tmp_path / "larger", size=16)
    assert recording_in(resized).spaces == SPACES and resized.version == 2


def test_an_environment_may_be_named_and_must_fit(folder: Path, tmp_path: Path) -> None:
    named = imports(tmp_path / "run", folder, "environment.id=wm/Catch-v0", "environment.size=16")
    assert named.manifest["environment"]["id"] == "wm/Catch-v0"
    with pytest.raises(UsageError, match="not"):
        imports(tmp_path / "other", folder, "environment.id=wm/Catch-v0", "environment.size=20")
    assert not (tmp_path / "other").exists()


def test_unknown_closing_observations_are_left_out_or_gained_by_cutting(tmp_path: Path) -> None:
    write_recording(made(4, closing=False), "npz", tmp_path / "open")
    without = imports(tmp_path / "run", tmp_path / "open")
    assert not without.metrics["closing"] and "closing" not in read_segment(without.path / load.SEGMENT)
    cut = imports(tmp_path / "cut", tmp_path / "open", drop_last=True)
    arrays = read_segment(cut.path / load.SEGMENT)
    assert cut.metrics["closing"] and len(arrays["closing"]) == 4 and arrays["truncated"].sum() == 4
    assert cut.metrics["steps"] == without.metrics["steps"] - 4 and not arrays["terminated"].any()
    last = [episode.observation[-1] for episode in made(4, closing=False)]
    assert np.array_equal(arrays["closing"], last)


@pytest.mark.parametrize("form", ["npz", "minari", "lerobot"])
def test_out_and_in_again_is_the_same(form: Any, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip({"npz": "numpy", "minari": "h5py", "lerobot": "pyarrow"}[form])
    first = imports(tmp_path / "run", folder)
    export_experience(first, form, tmp_path / "out", Progress(quiet=True))
    back = open_recording(str(tmp_path / "out"))
    assert digest_of(back) == digest_of(made(12)) and back.name == "made"
    assert back.source["license"] == "CC0" and back.source["experience"] == first.digest
    again = imports(tmp_path / "again", tmp_path / "out")
    assert digest_of(recording_in(again)) == digest_of(made(12))
    assert again.manifest["environment"] == first.manifest["environment"] | {"id": "data/out"}


def test_played_experience_goes_out_too(tiny: Path, tmp_path: Path) -> None:
    experience = Run.open(tiny, create=False).resolve("experience", "experience")
    export_experience(experience, "npz", tmp_path / "out", Progress(quiet=True))
    back, replay = open_recording(str(tmp_path / "out")), load.load_experience(experience, "cpu")
    assert sum(map(len, back)) == len(replay) and back.spaces == SPACES
    order = replay.order
    assert np.array_equal(np.concatenate([episode.action for episode in back]), replay.action.numpy()[order])
    frames = np.concatenate([episode.observation[: len(episode)] for episode in back])
    assert np.array_equal(frames, replay.observation.numpy()[order])


def test_compact_states_go_out_as_frames(tmp_path: Path) -> None:
    from wmcli.envs.tasks import TASKS

    name = "wm/Doors-v0" if "wm/Doors-v0" in TASKS else min(TASKS)
    task = TASKS[name]
    overrides = [*SETTINGS, f"environment.id={name}", f"environment.size={task.side}", "collect.policy=scripted"]
    overrides += ["collect.episodes=2", "collect.validation=1", "collect.test=1"]
    experience = collect(open_context(tmp_path / "run", "quickstart", overrides, create=True, quiet=True))
    recording, replay = recording_in(experience), load.load_experience(experience, "cpu")
    frames = np.concatenate([episode.observation for episode in recording])
    assert np.array_equal(frames, replay.observation.numpy()) and len(recording_in(experience, "test")) == 1


def test_a_damaged_episode_publishes_nothing(folder: Path, tmp_path: Path) -> None:
    imports(tmp_path / "run", folder)
    write_recording(made(3, seed=1), "npz", tmp_path / "more")
    (tmp_path / "more" / "episode-0000002.npz").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"episode-0000002.npz: cannot be read"):
        imports(tmp_path / "run", tmp_path / "more")
    run = Run.open(tmp_path / "run", create=False)
    assert run.versions("experience") == [1] and not run.unfinished()


def test_killed_while_frames_are_written_there_is_no_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frames(*arguments: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(imported, "_frames", frames)
        with pytest.raises(Killed):
            imports(tmp_path / "run", folder)
    assert not (tmp_path / "run").exists() or not Run.open(tmp_path / "run", create=False).versions("experience")
    assert digest_of(recording_in(imports(tmp_path / "run", folder))) == digest_of(made(12))


def test_exports_do_not_overwrite_and_leave_nothing_half(folder: Path, tmp_path: Path) -> None:
    experience = imports(tmp_path / "run", folder)
    with pytest.raises(UsageError, match="exists and is not empty"):
        export_experience(experience, "npz", folder, Progress(quiet=True))
    with pytest.raises(UsageError, match="--lossy is for --to lerobot"):
        export_experience(experience, "npz", tmp_path / "out", Progress(quiet=True), lossy=True)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    with pytest.raises(ArtifactError, match="holds no test episodes back"):
        recording_in(experience, "test")


def test_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = [word for text in SETTINGS for word in ("--set", text)]
    assert command(["import", "made", "--run", "run", "--held-out", "1", "--json", "-q", *sets]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["name"] == "experience@1" and record["metrics"]["train"] == 10
    assert command(["export", "experience", "--run", "run", "--out", "out", "-q"]) == 0
    assert capsys.readouterr().out == "out\n" and len(open_recording("out")) == 10
    assert command(["import", "nothing", "--run", "other"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "wm import: nothing: no such file or folder."
    assert not (tmp_path / "other").exists()
    assert flatten(Run.open(Path("run"), create=False).bound()["settings"])["environment.id"] == "data/made"
