"""Films and pictures of the agent.

B episodes, T time, H W image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import latest, opened

from wmcli.artifacts import Run
from wmcli.assemble import load_world_model
from wmcli.errors import UsageError
from wmcli.experience import Memory
from wmcli.report.images import strip, write_png
from wmcli.stages import play as play_module
from wmcli.stages.pictures import Film, SideBySide, beside, imagined_beside_real, write_side_by_side
from wmcli.stages.play import play
from wmcli.training.device import Machine

CPU = Machine(torch.device("cpu"), "float32", 1)


@pytest.mark.parametrize("source", ["real", "imagination"])
def test_a_film_is_written_and_the_same_seed_is_the_same_film(
    tiny: Path, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_module, "STEPS", 40)
    films = []
    for name, seed in [("a", 3), ("b", 4), ("c", 5), ("d", 6), ("e", 3), ("f", 4), ("g", 5), ("h", 6)]:
        out = tmp_path / f"{name}.gif"
        assert play(opened(tiny), source=source, out=out, controller=None, seed=seed) == out
        films.append(out.read_bytes())
        with Image.open(out) as picture:
            assert 1 <= picture.n_frames <= 40
            if source == "real":
                assert picture.n_frames == 7
    assert films[:4] == films[4:]
    assert len(set(films)) > 1
    assert Run.open(tiny, create=False).versions("controller") == [1]


def test_a_film_of_an_unknown_kind_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        play(opened(tiny), source="real", out=tmp_path / "film.doc", controller=None, seed=3)
    assert ".doc" in str(caught.value) and "\n" not in str(caught.value)


def test_a_film_has_what_was_found_for_the_game_that_it_shows() -> None:
    film = Film()
    frame, found = np.zeros((4, 4, 3), np.uint8), {"policy": np.array([[0.25, 0.75], [1, 0]]), "value": np.arange(2)}
    film.add(frame, 1, 0.5, found)
    assert film.policies[0].tolist() == [0.25, 0.75] and film.values == [0.0]
    assert film.actions == [1] and film.rewards == [0.5]


# -- real beside imagined ---------------------------------------------------------------------------------------------


@pytest.fixture
def newest_episodes(tiny: Path) -> tuple:
    context = opened(tiny)
    return load_world_model(latest(tiny, "dynamics"), CPU), context.experience(latest(tiny, "experience"))


def test_the_left_side_is_what_happened_and_the_right_begins_as_its_reconstruction(newest_episodes: tuple) -> None:
    world_model, memory = newest_episodes
    pictures = imagined_beside_real(world_model, memory, 2)
    assert pictures.real.shape == pictures.imagined.shape == (7, 3 * 16, 16, 3)  # 3 episodes under each other
    for episode in range(3):
        rows = slice(16 * episode, 16 * (episode + 1))
        real = pictures.real[:, rows]
        starts = memory.episodes.start
        found = [
            memory.order[start : start + 7]
            for start in starts
            if len(memory.order[start : start + 7]) == 7
            and (memory.frames[memory.order[start : start + 7]].numpy() == real).all()
        ]
        assert found
        reconstruction = world_model.decode(world_model.encode(memory.frames[found[0][:2]][None])[0]).numpy()
        difference = np.abs(pictures.imagined[:2, rows].astype(int) - reconstruction)
        assert difference.max() <= 1  # batches of another size may round otherwise


def test_every_frame_follows_from_the_one_before_and_its_action(newest_episodes: tuple) -> None:
    """A model that counts actions shows which actions it was given, and when."""

    class Counter:
        decodes = "latents"

        def encode(self, observation):
            return observation[..., 0, 0]

        def observe(self, latent, action, reset):
            assert reset[:, 0].all() and not reset[:, 1:].any()
            return None, latent[:, -1]

        def imagine(self, state, action):
            step = state * 10 + action[:, None]
            return type("Imagined", (), {"latent": step})(), step

        def decode(self, latent):
            return latent[..., None, None].expand(*latent.shape, 1, 1).to(torch.int64)

    frames = torch.tensor([[1, 2, 0, 0, 0], [3, 4, 0, 0, 0]])[..., None, None, None]
    actions = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    shown = beside(Counter(), frames, actions, 2).imagined
    assert shown[:, :, 0, 0].T.tolist() == [[1, 2, 26, 267, 2678], [3, 4, 42, 423, 4234]]


def test_no_episode_is_long_enough() -> None:
    memory = Memory.empty(CPU.device)
    memory.extend(
        {
            "observation": np.zeros((4, 8, 8, 3), np.uint8),
            "action": np.zeros(4, np.int32),
            "reward": np.zeros(4, np.float32),
            "terminated": np.array([False, True] * 2),
            "truncated": np.zeros(4, bool),
            "first": np.array([True, False] * 2),
            "lives": np.zeros(4, np.int16),
            "stream": np.zeros(4, np.int16),
        }
    )
    assert imagined_beside_real(None, memory, 2) is None


@pytest.mark.parametrize("episodes", [1, 2, 3])
@pytest.mark.parametrize("size", [8, 12])
def test_the_picture_shows_one_episode_whole(tmp_path: Path, episodes: int, size: int) -> None:
    frames = np.random.default_rng(1).integers(0, 255, (2, 4, episodes * size, size, 3)).astype(np.uint8)
    write_side_by_side(tmp_path, SideBySide(frames[0], frames[1], 2))
    write_png(tmp_path / "wanted.png", strip(frames[0][:, :size], frames[1][:, :size], context=2))
    assert (tmp_path / "imagination.png").read_bytes() == (tmp_path / "wanted.png").read_bytes()
    with Image.open(tmp_path / "imagination.gif") as picture:
        assert picture.n_frames == 4
    write_side_by_side(tmp_path / "nothing", None)
    assert not (tmp_path / "nothing").exists()
