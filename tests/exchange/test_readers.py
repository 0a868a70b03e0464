"""Files as others write them: every layout that docs/data.md names comes back as the episodes that it was made of."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import SPACES, random_episode, random_recording
from test_round_trips import smooth_recording

from wmcli.errors import UsageError
from wmcli.exchange import Episode, Recording, digest_of, open_recording
from wmcli.exchange.convert import resized, to_unit
from wmcli.exchange.video import encode
from wmcli.spaces import Categories, Continuous, Discrete, Image, Spaces, Vector, map_parts

IMAGE = Spaces.of_images(16, 3)


@pytest.fixture
def recording() -> Recording:
    """Episodes of a small image and three actions, all of which occur."""
    return random_recording(IMAGE, count=8)


def columns(episode: Episode, **names: str) -> dict[str, np.ndarray]:
    """The columns of an episode under wm's names or others."""
    fields = ("observation", "action", "reward", "terminated", "truncated")
    return {names.get(name, name): getattr(episode, name) for name in fields}


def same(read: Recording, made: Recording) -> bool:
    """Whether the episodes are the same."""
    return len(read) == len(made) and digest_of(read) == digest_of(made)


# -- npz ---------------------------------------------------------------------------------------------------------------


def test_npz_an_episode_a_file(recording: Recording, tmp_path: Path) -> None:
    for index, episode in enumerate(recording):
        np.savez_compressed(tmp_path / f"{index}.npz", **columns(episode))
    back = open_recording(str(tmp_path))
    assert same(back, recording) and back.spaces == IMAGE
    assert back.notes == ("numbers of actions are counted from the data: 3",)


def test_npz_many_episodes_in_one_file_without_closing_observations(tmp_path: Path) -> None:
    made = random_recording(IMAGE, closing=False, count=5)
    made = Recording("x", "wm", IMAGE, 2, made.read)  # two that end
    joined = {name: np.concatenate([columns(episode)[name] for episode in made]) for name in columns(made.read(0))}
    np.savez(tmp_path / "all.npz", **joined)
    assert same(open_recording(str(tmp_path / "all.npz"), spaces=IMAGE), made)


def test_npz_parts_have_names_and_one_of_them_can_be_read(tmp_path: Path) -> None:
    spaces = SPACES["parts"]
    episode = random_episode(spaces, 9, np.random.default_rng(0), closing=True, end="truncated")
    arrays = columns(episode) | {"action": _in_units(episode.action)}
    arrays |= {f"observation.{name}": part for name, part in arrays.pop("observation").items()}
    np.savez(tmp_path / "a.npz", **arrays)
    whole = open_recording(str(tmp_path), spaces=spaces)
    assert list(whole.read(0).observation) == ["cam", "x", "kind"]
    alone = open_recording(str(tmp_path), parts=["cam"])
    assert alone.spaces.observation == Image(16, 20, 1)
    assert np.array_equal(alone.read(0).observation, episode.observation["cam"])


def dreamer(episode: Episode, actions: str, *, one_hot: bool) -> dict[str, np.ndarray]:
    """An episode as Dreamer's replay has it."""
    rows = len(episode) + 1
    action = np.eye(3, dtype=np.float32)[episode.action] if one_hot else episode.action
    nothing = np.zeros_like(action[:1])
    place = np.arange(rows)
    return {
        "image": episode.observation,
        "action": np.concatenate([action, nothing] if actions == "after" else [nothing, action]),
        "reward": np.concatenate([[0], episode.reward]).astype(np.float32),
        "is_first": place == 0,
        "is_last": place == rows - 1,
        "is_terminal": (place == rows - 1) & episode.terminated[-1],
    }


@pytest.mark.parametrize("one_hot", [True, False])
def test_npz_dreamers_chunks_continue_in_their_successors(recording: Recording, tmp_path: Path, one_hot: bool) -> None:
    made = [dreamer(episode, "after", one_hot=one_hot) for episode in recording]
    stream = {name: np.concatenate([rows[name] for rows in made]) for name in made[0]}
    total, names = len(stream["reward"]), ["b" * 22, "a" * 22, "c" * 22, "0" * 22]
    for number, start in enumerate(range(0, total, 16)):
        piece = {name: array[start : start + 16] for name, array in stream.items()}
        file = f"2025010{number}T000000F000000-{names[number]}-{names[number + 1]}-{len(piece['reward'])}.npz"
        np.savez_compressed(tmp_path / file, **piece, **{"dyn/deter": np.zeros((len(piece["reward"]), 4))})
    assert total > 32
    back = open_recording(str(tmp_path))
    assert same(back, recording) and back.spaces == IMAGE


def test_npz_dreamers_episodes_with_actions_before_their_observations(recording: Recording, tmp_path: Path) -> None:
    for index, episode in enumerate(recording):
        rows = dreamer(episode, "before", one_hot=True)
        np.savez_compressed(tmp_path / f"{index}.npz", discount=np.ones(len(episode) + 1), **rows)
    assert same(open_recording(str(tmp_path)), recording)
    other = open_recording(str(tmp_path), actions="after", spaces=IMAGE)  # the first of them is no action
    with pytest.raises(UsageError, match="no one-hot vectors"):
        list(other)


def test_npz_dreamer_the_alignment_is_seen_by_its_zeros_or_said(recording: Recording, tmp_path: Path) -> None:
    for actions in ("after", "before"):
        (tmp_path / actions).mkdir()
        for index, episode in enumerate(recording):
            np.savez(tmp_path / actions / f"{index}.npz", **dreamer(episode, actions, one_hot=True))
        back = open_recording(str(tmp_path / actions))
        assert same(back, recording) and f"actions are taken {actions}" in back.notes[0]


def test_npz_memory_maze(recording: Recording, tmp_path: Path) -> None:
    for index, episode in enumerate(recording):
        rows = dreamer(episode, "before", one_hot=True)
        kept = {name: rows[name] for name in ("image", "action", "reward")}
        labels = {"maze_layout": np.zeros((len(episode) + 1, 9, 9)), "agent_pos": np.zeros((len(episode) + 1, 2))}
        np.savez(tmp_path / f"{index}.npz", terminal=rows["is_terminal"], **kept, **labels)
    assert same(open_recording(str(tmp_path)), recording)


# -- HDF5 and zarr -----------------------------------------------------------------------------------------------------


def flat(recording: Recording) -> dict[str, np.ndarray]:
    """D4RL's arrays."""
    episodes = list(recording)
    seen = [episode.observation for episode in episodes]
    return {
        "observations": np.concatenate([part[:-1] for part in seen]),
        "next_observations": np.concatenate([part[1:] for part in seen]),
        "actions": np.concatenate([episode.action for episode in episodes]),
        "rewards": np.concatenate([episode.reward for episode in episodes]),
        "terminals": np.concatenate([episode.terminated for episode in episodes]),
        "timeouts": np.concatenate([episode.truncated for episode in episodes]),
    }


def test_hdf5_flat_like_d4rl(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    made = random_recording(Spaces(Vector(4), Continuous((-1.0,) * 2, (1.0,) * 2)), count=6)
    with h5py.File(tmp_path / "hopper.hdf5", "w") as file:
        for name, array in flat(made).items():
            file.create_dataset(name, data=array, compression="gzip")
        file["metadata/algorithm"] = "none"
    back = open_recording(str(tmp_path / "hopper.hdf5"))
    assert same(back, made) and back.spaces == made.spaces and back.name == "hopper"
    assert back.notes == ("actions lie within -1 and 1, which are taken as their bounds",)
    with h5py.File(tmp_path / "hopper.hdf5", "a") as file:
        del file["next_observations"]
    without = open_recording(str(tmp_path / "hopper.hdf5"))
    assert not any(episode.has_closing for episode in without)
    assert [episode.reward.tolist() for episode in without] == [episode.reward.tolist() for episode in made]


def test_hdf5_a_group_an_episode_in_the_order_of_numbers(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    made = random_recording(SPACES["parts"], count=12)
    names = {"action": "actions", "reward": "rewards", "terminated": "dones"}
    with h5py.File(tmp_path / "demos.hdf5", "w") as file:
        for index, episode in enumerate(made):
            group = file.create_group(f"data/demo_{index}")
            for name, array in columns(episode, **names).items():
                if name == "observation":
                    for part, values in array.items():
                        group[f"obs/{part}"] = values[:-1]
                        group[f"next_obs/{part}"] = values[1:]
                else:
                    group[name] = _in_units(array) if name == "actions" else array
        file["mask/train"] = np.arange(3)
    assert same(_without_rounding(open_recording(str(tmp_path), spaces=made.spaces)), _without_rounding(made))


def _in_units(action: np.ndarray) -> np.ndarray:
    """Actions of `SPACES["parts"]` as their environment has them."""
    low, high = np.array([-2.0, 0.0]), np.array([1.0, 5.0])
    return low + (action.astype(np.float64) + 1) / 2 * (high - low)


def _without_rounding(recording: Recording) -> Recording:
    def read(index: int) -> Episode:
        episode = recording.read(index)
        return Episode(
            episode.observation, episode.action.round(5), episode.reward, episode.terminated, episode.truncated
        )

    return Recording("x", "x", recording.spaces, len(recording), read)


def test_zarr_a_group_an_episode(recording: Recording, tmp_path: Path) -> None:
    import zarr

    root = zarr.create_group(store=tmp_path / "data.zarr", zarr_format=3)
    for index, episode in enumerate(recording):
        group = root.create_group(f"episode_{index}")
        for name, array in columns(episode, observation="observations", truncated="timeouts").items():
            group.create_array(name, data=array)
    assert same(open_recording(str(tmp_path / "data.zarr")), recording)


# -- MP4 ---------------------------------------------------------------------------------------------------------------


def test_mp4_with_a_table(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    made = smooth_recording()
    with (tmp_path / "actions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["episode", "action", "reward", "terminated", "truncated"])
        for index, episode in enumerate(made):
            encode(tmp_path / f"take {index}.mp4", iter(episode.observation), (32, 32), 25)
            values = (episode.action, episode.reward, episode.terminated, episode.truncated)
            for action, reward, terminated, truncated in zip(*values, strict=True):
                writer.writerow([f"take {index}", action, repr(float(reward)), int(terminated), int(truncated)])
    back = open_recording(str(tmp_path), spaces=made.spaces)
    assert back.lossy == "video (mp4)" and len(back) == len(made)
    for theirs, ours in zip(back, made, strict=True):
        assert theirs.observation.shape == ours.observation.shape
        assert np.abs(theirs.observation.astype(int) - ours.observation).mean() < 4
        assert np.array_equal(theirs.action, ours.action) and np.array_equal(theirs.reward, ours.reward)
        assert np.array_equal(theirs.terminated, ours.terminated)


def test_mp4_one_video_needs_no_column_of_episodes(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    encode(tmp_path / "a.mp4", iter(np.zeros((4, 30, 46, 3), np.uint8)), (30, 46), 25)
    (tmp_path / "actions.csv").write_text("action_0,action_1,reward\n" + "0.5,-3,1\n0,2.5,0\n0,1,0\n")
    (episode,) = open_recording(str(tmp_path))
    assert episode.observation.shape == (4, 30, 46, 3) and episode.has_closing and episode.truncated[-1]
    assert np.allclose(episode.action, [[1, -1], [-1, 1], [-1, 1 - 2 * 1.5 / 5.5]])


# -- Minari ------------------------------------------------------------------------------------------------------------


class Gym:
    """A small environment without dependencies of its own, for Minari's collector."""

    @staticmethod
    def make(observation: Any, action: Any, *, steps: int = 7) -> Any:
        import gymnasium

        class Env(gymnasium.Env):
            observation_space, action_space, spec = observation, action, None

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
                super().reset(seed=seed)
                self.observation_space.seed(seed)
                self.time = 0
                return self.observation_space.sample(), {}

            def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
                self.time += 1
                return self.observation_space.sample(), self.time / 2, self.time == steps, self.time == steps + 1, {}

        return Env()


def collected(minari: Any, env: Any, where: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[Any]:
    """Let Minari's own package collect a dataset `made/test-v0` and return its episodes."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(where))
    collector = minari.DataCollector(env, **how)
    for seed in range(3):
        collector.reset(seed=seed)
        env.action_space.seed(seed)
        ended = False
        while not ended:
            *_, terminated, truncated, _ = collector.step(env.action_space.sample())
            ended = terminated or truncated
    dataset = collector.create_dataset("made/test-v0", algorithm_name="uniform", author="nobody", author_email="x")
    collector.close()
    return list(dataset.iterate_episodes())


def test_minari_as_its_own_package_collects_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("jax")  # which its collector needs
    from gymnasium import spaces

    observation = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (40, 48, 3), np.uint8),
            "inner": spaces.Dict({"speed": spaces.Box(-np.inf, np.inf, (3,), np.float64)}),
            "door": spaces.Discrete(5, start=2),
            "keys": spaces.MultiBinary(4),
        }
    )
    env = Gym.make(observation, spaces.Discrete(3, start=-1))
    theirs = collected(minari, env, tmp_path, monkeypatch, jpeg_encoding=False)
    back = open_recording("minari:made/test-v0")
    assert back.spaces == Spaces(
        {
            "camera": Image(40, 48, 3),
            "door": Categories((5,)),
            "inner.speed": Vector(3),
            "keys": Categories((2, 2, 2, 2)),
        },
        Discrete(3),
    )
    assert back.lossy is None and back.name == "made-test-v0"
    assert back.source["algorithm_name"] == "uniform" and back.source["author"] == ["nobody"]
    for ours, episode in zip(back, theirs, strict=True):
        assert np.array_equal(ours.observation["camera"], episode.observations["camera"])
        assert np.array_equal(ours.observation["door"][:, 0], episode.observations["door"] - 2)
        assert np.array_equal(ours.observation["inner.speed"], np.float32(episode.observations["inner"]["speed"]))
        assert np.array_equal(ours.action, episode.actions + 1)
        assert np.array_equal(ours.reward, episode.rewards) and len(ours) == 7 and ours.has_closing
        assert ours.terminated.tolist() == [False] * 6 + [True]


def test_minari_jpeg_is_lossy_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("jax")  # which its collector needs
    from gymnasium import spaces

    env = Gym.make(spaces.Box(0, 255, (40, 48, 3), np.uint8), spaces.Box(np.array([-2.0, 0]), np.array([2.0, 1])))
    theirs = collected(minari, env, tmp_path, monkeypatch, jpeg_encoding=True)
    back = open_recording(str(tmp_path / "made" / "test-v0"))
    assert back.lossy == "jpeg (minari)" and back.spaces.action == Continuous((-2.0, 0.0), (2.0, 1.0))
    for ours, episode in zip(back, theirs, strict=True):
        assert np.array_equal(ours.observation, episode.observations), "decoded by the same library"
        assert np.allclose(ours.action, episode.actions * [0.5, 2] - [0, 1], atol=1e-6)


# -- LeRobot -----------------------------------------------------------------------------------------------------------


def lerobot_folder(folder: Path, made: Recording, *, video: bool) -> None:
    """Write a folder as LeRobot 3 does: all episodes in one table and one video; no closing observations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    episodes = list(made)
    rows: list[dict[str, Any]] = []
    places: list[dict[str, Any]] = []
    for number, episode in enumerate(episodes):
        start = len(rows)
        for t in range(len(episode)):
            row = {
                "action": episode.action[t].tolist(),
                "observation.state": [float(t), -float(number)],
                "next.reward": float(episode.reward[t]),
                "next.done": t == len(episode) - 1,
                "next.success": bool(episode.terminated[-1]) and t == len(episode) - 1,
                "timestamp": t / 10,
                "frame_index": t,
                "episode_index": number,
                "index": start + t,
                "task_index": 0,
            }
            rows.append(row)
        place = {"episode_index": number, "length": len(episode), "tasks": ["push"]}
        place |= {"data/chunk_index": 0, "data/file_index": 0, "stats/action/mean": [0.0, 0.0]}
        place |= {"dataset_from_index": start, "dataset_to_index": len(rows)}
        if video:
            name = "videos/observation.images.top"
            place |= {f"{name}/chunk_index": 0, f"{name}/file_index": 0}
            place |= {f"{name}/from_timestamp": start / 10, f"{name}/to_timestamp": len(rows) / 10}
        places.append(place)
    for name in ("meta/episodes/chunk-000", "data/chunk-000", "videos/observation.images.top/chunk-000"):
        (folder / name).mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "data/chunk-000/file-000.parquet")
    pq.write_table(pa.Table.from_pylist(places), folder / "meta/episodes/chunk-000/file-000.parquet")
    features = {
        "action": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    }
    if video:
        frames = np.concatenate([episode.observation[: len(episode)] for episode in episodes])
        path = folder / "videos/observation.images.top/chunk-000/file-000.mp4"
        encode(path, iter(frames), frames.shape[1:3], 10)
        names = ["channels", "height", "width"]
        features["observation.images.top"] = {"dtype": "video", "shape": [3, *frames.shape[1:3]], "names": names}
    info = {"codebase_version": "v3.0", "fps": 10, "features": features, "robot_type": "arm"}
    info |= {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"}
    info |= {"video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"}
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "README.md").write_text("---\ntags:\n- robotics\nlicense: apache-2.0\n---\n# Pushing\n")


def moving() -> Recording:
    smooth = smooth_recording()
    space = Spaces(smooth.spaces.observation, Continuous((-1.0, -1.0), (1.0, 1.0)))

    def read(index: int) -> Episode:
        episode = smooth.read(index)
        action = np.random.default_rng(index).uniform(-1, 1, (len(episode), 2)).astype(np.float32)
        return Episode(episode.observation, action, episode.reward, episode.terminated, episode.truncated)

    return Recording("moving", "wm", space, len(smooth), read)


@pytest.mark.parametrize("video", [True, False])
def test_lerobot_as_its_own_package_writes_it(video: bool, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("imageio_ffmpeg")
    made = moving()
    lerobot_folder(tmp_path, made, video=video)
    back = open_recording(str(tmp_path))
    assert back.source == {"robot_type": "arm", "fps": 10, "license": "apache-2.0"}
    assert back.lossy == ("video (mp4)" if video else None)
    for number, (theirs, ours) in enumerate(zip(back, made, strict=True)):
        state = theirs.observation["state"] if video else theirs.observation
        assert np.array_equal(state, [[t, -number] for t in range(len(ours))])
        assert np.array_equal(theirs.action, ours.action) and np.array_equal(theirs.reward, ours.reward)
        assert np.array_equal(theirs.terminated, ours.terminated)
        assert np.array_equal(theirs.truncated, ours.truncated)
        if video:
            frames = theirs.observation["images.top"].astype(int)
            assert np.abs(frames - ours.observation[:-1]).mean() < 4, "the frames of this episode"
    if video:
        alone = open_recording(str(tmp_path), parts=["images.top"], size=16)
        assert alone.spaces.observation == Image(16, 16) and alone.read(1).observation.shape == (2, 16, 16, 3)


# -- values ------------------------------------------------------------------------------------------------------------


def test_images_are_resized_as_environments_do(tmp_path: Path) -> None:
    from PIL import Image as Picture

    rng = np.random.default_rng(0)
    for shape in ((32, 32, 3), (30, 46, 3), (8, 12, 3), (30, 46, 1), (32, 32, 4)):
        images = rng.integers(0, 256, (2, *shape), dtype=np.uint8)
        small = resized(images, 16)
        assert small.shape == (2, 16, 16, shape[2])
        if shape == (32, 32, 3):
            assert np.array_equal(
                small[0], np.array(Picture.fromarray(images[0]).resize((16, 16), Picture.Resampling.BOX))
            )
    same_size = rng.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    assert resized(same_size, 16) is same_size
    np.savez(tmp_path / "a.npz", image=np.zeros((5, 3, 30, 40), np.uint8), action=np.arange(4), reward=np.zeros(4))
    assert open_recording(str(tmp_path)).spaces.observation == Image(30, 40, 3), "channels in front"
    assert open_recording(str(tmp_path), size=24).spaces.observation == Image(24, 24, 3)


def test_actions_are_scaled_by_bounds_stated_or_of_the_data(tmp_path: Path) -> None:
    space = Continuous((-2.0, 0.0, 5.0), (2.0, 1.0, 5.5))
    unit = to_unit(np.array([[-2, 0, 5], [2, 1, 5.5], [0, 0.5, 5.25]]), space, "x")
    assert unit.dtype == np.float32 and unit.tolist() == [[-1, -1, -1], [1, 1, 1], [0, 0, 0]]
    for number, action in enumerate(([[-3.0, 7], [0, 7]], [[1.0, 7], [5, 7]])):
        np.savez(tmp_path / f"{number}.npz", observation=np.zeros((2, 1)), action=action, reward=np.zeros(2))
    back = open_recording(str(tmp_path))
    assert back.spaces.action == Continuous((-3.0, 6.0), (5.0, 8.0)) and "those of the data" in back.notes[-1]
    assert np.allclose(back.read(1).action, [[0, 0], [1, 0]])


def test_integers_in_observations_are_categories_or_quantities(tmp_path: Path) -> None:
    whole = {"observation.few": np.arange(6) % 3, "observation.many": 1000 * np.arange(6)}
    np.savez(tmp_path / "a.npz", **whole, action=np.zeros(6, int), reward=np.zeros(6))
    back = open_recording(str(tmp_path))
    assert back.spaces.observation == {"few": Categories((3,)), "many": Vector(1)}
    assert map_parts(lambda part: part.dtype.name, back.read(0).observation) == {"few": "int32", "many": "float32"}


def test_an_episode_can_be_cut_before_its_last_action() -> None:
    episode = random_episode(IMAGE, 4, np.random.default_rng(0), closing=False, end="terminated")
    cut = episode.without_last_action()
    assert cut is not None and len(cut) == 3 and cut.has_closing
    assert cut.truncated.tolist() == [False, False, True] and not cut.terminated.any()
    assert np.array_equal(cut.observation, episode.observation)
    assert (
        random_episode(IMAGE, 1, np.random.default_rng(0), closing=False, end="truncated").without_last_action() is None
    )
