"""Recordings of Memory Maze as experience: made up of what our own script plays, they come back as that; what is wrong
with files is told in one line; and from a folder to a table."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_run import TINY_S4WM, Killed, copied, latest, with_kinds

from wmcli.artifacts import Artifact, Run
from wmcli.envs.mazes import Maze
from wmcli.envs.memory_task import play
from wmcli.envs.tasks import TASKS
from wmcli.envs.walking import FORWARD, FORWARD_LEFT, FORWARD_RIGHT, LEFT, NOOP, RIGHT
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import read_segment, segment
from wmcli.experience.load import HELD_OUT, SEGMENT
from wmcli.stages import memory_tasks as memory
from wmcli.stages import probe, recorded
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.opening import open_context
from wmcli.stages.recorded import read_recording

TASK = TASKS["wm/MazeSmall-v0"]
assert isinstance(TASK, Maze)
TIME = TASK.context + TASK.query
TRAINING, EVALUATION = range(10, 17), range(50, 53)  # seeds of the episodes that lie there
SETTINGS = [
    *TINY_S4WM,
    "environment.id=wm/MazeSmall-v0",
    "environment.size=32",
    "collect.policy=recorded",
    "collect.episodes=3",
    "collect.validation=2",
    "collect.test=2",
    "dynamics.reward=none",
    "dynamics.sequence_length=120",
    "dynamics.updates=2",
    "dynamics.validate_every=1",
    "dynamics.warmup=1",
    "evaluation.probe_updates=2",
]


def as_theirs(seed: int, task: Maze = TASK) -> dict[str, np.ndarray]:
    """What Memory Maze would have recorded of an episode of ours, by its own conventions."""
    played = play(task, np.array([seed]))
    compact_states = played.compact_states[0]
    content, labels, time = task.read(compact_states), task.labels(compact_states), len(compact_states)
    taken = np.zeros((time, 6))
    taken[np.arange(1, time), played.action[0, :-1]] = 1

    def from_south_west(places: np.ndarray) -> np.ndarray:
        x, y = np.moveaxis(places.astype(float), -1, 0)
        return np.stack([x - 1, task.cells - (y - 1)], -1)

    angle = np.deg2rad(content.heading.astype(float))
    return {
        "image": task.draw(compact_states),
        "action": taken,
        "reward": np.concatenate([[0], np.arange(1, time) % 7 == seed % 7]).astype(float),
        "maze_layout": np.stack([np.flipud(~maze[1:-1, 1:-1]) for maze in content.walls]).astype(np.uint8),
        "agent_pos": from_south_west(content.position),
        "agent_dir": np.stack([np.cos(angle), np.sin(angle)], -1),
        "targets_pos": from_south_west(content.objects),
        "targets_vec": labels.objects[..., ::-1].astype(float),
        "target_color": np.zeros((time, 3)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose names' order is not that in which they were written."""
    folder = tmp_path_factory.mktemp("recordings")
    for part, seeds in (("train", TRAINING), ("eval", EVALUATION)):
        (folder / part).mkdir()
        for seed in reversed(seeds):
            np.savez_compressed(folder / part / f"episode-{seed}.npz", **as_theirs(seed))
    (folder / "train" / "episode-00.mp4").write_bytes(b"a film")
    return folder


def opened(run: Path, *overrides: str, source: Path | None = None, **how: bool) -> Context:
    """A context of a run, which is new if there is a `source` to collect from."""
    given = [*SETTINGS, f"collect.recordings={source}", *overrides] if source else overrides
    context = open_context(run, "memory-small" if source else None, given, create=bool(source), quiet=True, **how)
    context.pictures = False
    return context


@pytest.fixture(scope="module")
def maze_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("recorded") / "run"
    collect(opened(run, source=folder))
    return run


def parts_of(experience: Artifact) -> dict[str, dict[str, np.ndarray]]:
    return {name: read_segment(experience.path / name) for name in (SEGMENT, *HELD_OUT.values())}


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_recordings_of_our_script_equal_playing_it(maze_run: Path) -> None:
    wanted = {SEGMENT: TRAINING[:3], "validation.zarr": TRAINING[-2:], "test.zarr": EVALUATION[:2]}
    for name, arrays in parts_of(latest(maze_run, "experience")).items():
        played = play(TASK, np.array(wanted[name]))
        rows = {key: array.reshape(len(wanted[name]), TIME, *array.shape[1:]) for key, array in arrays.items()}
        assert np.array_equal(rows["action"][:, :-1], played.action[:, :-1])
        assert np.array_equal(rows["observation"], TASK.draw(played.compact_states))
        assert np.array_equal(rows["terminated"], played.over) and not rows["truncated"].any()
        assert rows["first"][:, 0].all() and rows["first"].sum() == len(wanted[name])
        steps = np.arange(1, TIME)
        for seed, earned in zip(wanted[name], rows["reward"], strict=True):
            assert np.array_equal(earned[:-1], steps % 7 == seed % 7) and earned[-1] == 0
        for got, want in zip(TASK.labels(rows["sketch"]), TASK.labels(played.compact_states), strict=True):
            assert np.allclose(got, want, atol=1e-5)
        got, want = TASK.read(rows["sketch"]), TASK.read(played.compact_states)
        assert np.array_equal(got.position, want.position) and np.allclose(got.heading, want.heading, atol=1e-4)
        assert not got.textures.any()


def test_frames_are_those_of_the_files_and_not_drawn(maze_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maze, "draw", lambda *_: pytest.fail("drawn"))
    experience = latest(maze_run, "experience")
    arrays = parts_of(experience)
    context = opened(maze_run)
    assert np.array_equal(context.experience(experience).observation.numpy(), arrays[SEGMENT]["observation"])
    held = context.held_out(experience, "test").observation.numpy()
    assert np.array_equal(held, arrays["test.zarr"]["observation"])


def test_the_manifest_says_that_it_was_recorded_and_of_how_many_files(maze_run: Path, folder: Path) -> None:
    experience = latest(maze_run, "experience")
    found = {key: experience.metrics[key] for key in ("recorded", "train", "validation", "test", "episodes", "steps")}
    assert found == {"recorded": 7, "train": 3, "validation": 2, "test": 2, "episodes": 3, "steps": 3 * TIME}
    assert experience.manifest["settings"]["collect"]["recordings"] == str(folder)
    assert experience.metrics["mean_return"] == pytest.approx(
        np.mean([(np.arange(1, TIME) % 7 == seed % 7).sum() for seed in TRAINING[:3]])
    )


def test_frames_in_blocks_that_do_not_fit_shards_are_the_same(
    maze_run: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "SHARD", 2 * segment.CHUNK)
    again = collect(opened(tmp_path / "run", source=folder))
    assert len(list((again.path / SEGMENT / "observation" / "c").iterdir())) == 3
    cut = parts_of(again)
    for name, arrays in parts_of(latest(maze_run, "experience")).items():
        assert all(np.array_equal(array, cut[name][key]) for key, array in arrays.items())


# -- which files ------------------------------------------------------------------------------------------------------


def test_the_job_is_that_of_the_files_wherever_they_lie(maze_run: Path, folder: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    moved = collect(opened(tmp_path / "run", source=elsewhere))
    assert moved.manifest["job"] == latest(maze_run, "experience").manifest["job"]
    (elsewhere / "train" / "episode-12.npz").rename(elsewhere / "train" / "episode-1z.npz")
    other = collect(opened(tmp_path / "other", source=elsewhere))
    assert other.manifest["job"] != moved.manifest["job"]
    file = elsewhere / "eval" / "episode-50.npz"
    np.savez(file, **as_theirs(50))  # not compressed: of another size
    bigger = collect(opened(tmp_path / "bigger", source=elsewhere))
    assert bigger.manifest["job"] != other.manifest["job"]


def test_another_collect_reads_the_files_behind_and_in_the_end_says_that_there_are_no_more(
    maze_run: Path, tmp_path: Path
) -> None:
    run = copied(maze_run, tmp_path / "run")
    second = collect(opened(run, "collect.episodes=2"))
    played = play(TASK, np.array(TRAINING[3:5]))
    assert np.array_equal(read_segment(second.path / SEGMENT, "observation")["observation"].reshape(2, TIME, 32, 32, 3),
                          TASK.draw(played.compact_states))  # fmt: skip
    assert second.metrics["total_episodes"] == 5 and second.metrics["total_steps"] == 5 * TIME
    assert len(opened(run).experience(second)) == 5 * TIME
    with pytest.raises(UsageError, match=r": 0 of 7 trajectories in .*/train are left .* \(2 held back, 5 in the run"):
        collect(opened(run, "collect.episodes=1"))


def test_without_folders_all_parts_are_cut_from_one(folder: Path, tmp_path: Path) -> None:
    experience = collect(opened(tmp_path / "run", source=folder / "train"))
    wanted = {SEGMENT: TRAINING[:3], "validation.zarr": TRAINING[3:5], "test.zarr": TRAINING[5:]}
    for name, arrays in parts_of(experience).items():
        assert np.array_equal(arrays["observation"].reshape(2 + (name == SEGMENT), TIME, 32, 32, 3),
                              TASK.draw(play(TASK, np.array(wanted[name])).compact_states))  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["collect.recordings=/nowhere/at/all"], r"collect.recordings = '/nowhere/at/all': no such folder"),
        (["collect.episodes=6"], r"5 of 7 trajectories in .*/train are left to train on \(2 held back, 0 in"),
        (["collect.validation=9"], r"0 of 7 trajectories .* collect.episodes = 3"),
        (["collect.test=4"], r"3 trajectories in .*/eval, but collect.test = 4"),
        (["environment.id=wm/TwoRoomsSmall-v0"], r"wm/TwoRoomsSmall-v0': .* use --env wm/Maze-9-v0"),
        (["environment.size=64"], r"use --set environment.size=32"),
        (["run.overlap=true"], r"recorded episodes are all collected before"),
        (["collect.recordings="], r"set collect.recordings=FOLDER"),
    ],
)
def test_impossible_requests_end_in_one_line(folder: Path, tmp_path: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line) as error:
        collect(opened(tmp_path / "run", *overrides, source=folder))
    assert "\n" not in str(error.value)


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no npz files in"):
        collect(opened(tmp_path / "run", source=tmp_path))


def test_recorded_and_played_experience_do_not_mix(maze_run: Path, folder: Path, tmp_path: Path) -> None:
    run = copied(maze_run, tmp_path / "run")
    for policy in ("scripted", "learned"):
        with pytest.raises(ArtifactError, match="look different"):
            collect(opened(run, f"collect.policy={policy}"))
    scripted = tmp_path / "scripted"
    few = ["collect.policy=scripted", "collect.episodes=2", "collect.validation=1", "collect.test=1"]
    collect(open_context(scripted, "memory-small", with_kinds(SETTINGS, *few), create=True, quiet=True))
    with pytest.raises(ArtifactError, match="look different"):
        collect(opened(scripted, "collect.policy=recorded", f"collect.recordings={folder}"))
    with pytest.raises(UsageError, match="--policy recorded adds whole episodes"):
        collect(opened(run), steps=5)


# -- what is wrong with a file ----------------------------------------------------------------------------------------


def changed(key: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    arrays = as_theirs(11)
    return arrays | {key: change(arrays[key])}


def at(index: tuple, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"agent_pos": np.zeros((TIME, 2))}, "no action in it"),
        ({k: v for k, v in as_theirs(11).items() if k != "targets_pos"}, "no targets_pos in it"),
        ({k: v for k, v in as_theirs(11).items() if k != "image"}, "no image in it"),
        ({k: v[:-1] for k, v in as_theirs(11).items()}, r"action is \(119, 6\), but this task's is \(120, 6\)"),
        (changed("image", lambda frames: frames[:, ::2]), r"image is \(120, 16, 32, 3\)"),
        (changed("image", lambda frames: frames.astype(np.float32)), "image is float32"),
        (changed("targets_pos", lambda places: places[:, :1]), r"targets_pos is \(120, 1, 2\)"),
        (changed("agent_pos", at((7, 0), np.nan)), "agent_pos is not made of finite numbers"),
        (changed("reward", lambda reward: reward.astype(object)), "damaged, or no trajectory"),
        (changed("action", at((5,), 0.0)), "action is not one-hot"),
        (changed("maze_layout", lambda layout: 1 - layout), "agent_pos lies where maze_layout has a wall"),
        (changed("maze_layout", at((60, 3, 3), 9)), "maze_layout changes"),
        (changed("targets_pos", lambda places: places + 0.2), "targets_pos is not in the middles"),
        (changed("targets_pos", lambda places: places * 0 - 0.5), "targets_pos lies where maze_layout has a wall"),
        (changed("targets_pos", at((60,), 0.5)), "targets_pos changes"),
        (changed("agent_dir", lambda way: -way), "targets_vec is not where"),
        (changed("agent_dir", lambda way: way[:, ::-1]), "targets_vec is not where"),
        (changed("targets_vec", lambda way: way[..., ::-1]), "targets_vec is not where"),
    ],
)
def test_a_file_without_the_expected_content_is_named(
    folder: Path, tmp_path: Path, arrays: dict[str, np.ndarray], line: str
) -> None:
    """And nothing of the others is published."""
    (tmp_path / "train").mkdir()
    for seed in TRAINING:
        os.link(folder / "train" / f"episode-{seed}.npz", tmp_path / "train" / f"episode-{seed}.npz")
    (tmp_path / "train" / "episode-11.npz").unlink()
    np.savez(tmp_path / "train" / "episode-11.npz", **arrays)
    with pytest.raises(UsageError, match=f"train/episode-11.npz: {line}") as error:
        collect(opened(tmp_path / "run", "collect.test=0", source=tmp_path))
    assert "\n" not in str(error.value)
    assert not [*(tmp_path / "run" / "experience").glob("*v0*"), *(tmp_path / "run" / "experience").glob(".work*")]


def test_any_damage_to_a_file_is_noticed(folder: Path, tmp_path: Path) -> None:
    content = (folder / "train" / "episode-11.npz").read_bytes()
    rng = np.random.default_rng(0)
    file = tmp_path / "episode-11.npz"
    broken = [b"", b"no zip at all", content[: len(content) // 2], content[:-100]]
    for place in rng.integers(200, len(content) // 2, size=60):  # of image, which comes first
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(rng.integers(8))
        broken.append(bytes(flipped))
    for wrong in broken:
        file.write_bytes(wrong)
        with pytest.raises(UsageError, match="episode-11.npz: (damaged, or no trajectory|no .* in it)"):
            read_recording(file, TASK)
            list(recorded._frames([file], TASK, lambda: None))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(file)
    with pytest.raises(UsageError, match="damaged, or no trajectory"):
        read_recording(file, TASK)


def test_killed_while_frames_are_written_there_is_no_version_and_the_next_try_makes_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for point in ("work-opened", "publish-sealed"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at_job(patch, point)
            collect(opened(run, source=folder))
        assert Run.open(run, create=False).versions("experience") == []
    assert collect(opened(run, source=folder)).version == 1


def kill_at_job(patch: pytest.MonkeyPatch, name: str) -> None:
    def fail(here: str) -> None:
        if here == name:
            raise Killed(here)

    patch.setattr("wmcli.artifacts.job.failpoint", fail)


# -- the whole way ----------------------------------------------------------------------------------------------------


def test_from_a_folder_to_a_table(maze_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes are scored on the test trajectories, beside constants of the training ones."""
    monkeypatch.setattr(probe, "WALLS_WIDTH", 16)
    monkeypatch.setattr(probe, "OBJECTS_WIDTH", 16)
    run = copied(maze_run, tmp_path / "run")
    assert train_dynamics(opened(run)).metrics["best_update"] in (1, 2)
    found = memory.evaluate_memory(opened(run), "probe").metrics
    training = play(TASK, np.array(TRAINING[:3])).compact_states
    query = play(TASK, np.array(EVALUATION[:2])).compact_states[:, TASK.context :]
    scores = probe.scores(*probe.constants(TASK, training), TASK.labels(query))
    assert found["constant_walls"]["value"] == pytest.approx(scores.walls.mean())
    assert found["constant_objects"]["value"] == pytest.approx(scores.objects.mean(), rel=1e-5)
    assert 0 <= found["walls"]["value"] <= 1 and found["episodes"] == 2


def test_memory_mazes_own_labels_equal_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode played in its package (extra `oracle`), by its gym wrapper and without rendering."""
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    pytest.importorskip("memory_maze")
    from dm_control.mujoco.engine import Physics
    from memory_maze import tasks
    from memory_maze.gym_wrappers import GymWrapper

    monkeypatch.setattr(Physics, "render", lambda *_, **__: np.zeros((64, 64, 3), np.uint8))
    env, task = GymWrapper(tasks.memory_maze_9x9(global_observables=True, seed=9)), Maze(context=31, query=30)
    actions = np.repeat(np.random.default_rng(0).integers(1, 6, size=15), 4).tolist()
    rows = [env.reset() | {"action": np.zeros(6), "reward": 0.0}]
    for action in actions:
        seen, reward, *_ = env.step(action)
        rows.append(seen | {"action": np.eye(6)[action], "reward": reward})
    arrays = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    np.savez_compressed(tmp_path / "one.npz", **arrays)
    found = read_recording(tmp_path / "one.npz", task)
    assert found.action.tolist() == [*actions, NOOP]
    labels = task.labels(found.compact_states)
    assert np.allclose(labels.objects[..., ::-1], arrays["targets_vec"], atol=1e-4)
    assert np.array_equal(labels.walls.reshape(-1, 9, 9)[:, ::-1], arrays["maze_layout"] == 0)
    assert np.allclose(labels.pose[:, :2] * [4.5, -4.5] + 4.5, arrays["agent_pos"], atol=1e-4)
    assert np.allclose(labels.pose[:, 2:] * [1, -1], arrays["agent_dir"], atol=1e-4)
    (frames,) = recorded._frames([tmp_path / "one.npz"], task, lambda: None)
    assert np.array_equal(frames, arrays["image"])
    step = np.diff(labels.pose[:, :2], axis=0)
    along = (step * (labels.pose[:-1, 2:] + labels.pose[1:, 2:])).sum(-1)
    walks = np.isin(actions, (FORWARD, FORWARD_LEFT, FORWARD_RIGHT))
    assert along[walks].min() > -0.02 and along[walks].mean() > 0.03  # walls push back a little
    turned = np.diff(np.unwrap(np.arctan2(-labels.pose[:, 3], labels.pose[:, 2])))
    turns = np.array(actions)[:, None] == (LEFT, RIGHT)
    assert (turned @ turns / turns.sum(0) * (1, -1) > 0.25).all()  # a step is 0.32, but for the first
