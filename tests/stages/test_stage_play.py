"""Films and pictures of the agent.

B episodes, T time, H W image.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import latest, opened

from wmcli import spaces
from wmcli.artifacts import Run
from wmcli.assemble import load_world_model
from wmcli.controllers.agent import Agent
from wmcli.controllers.base import Controller
from wmcli.envs.catch import BALL_COLOR
from wmcli.envs.vector import Transition
from wmcli.errors import UsageError
from wmcli.experience import Replay
from wmcli.nn.policies import build_policy
from wmcli.progress import Progress
from wmcli.report.images import strip, write_png
from wmcli.stages import pictures as pictures_module
from wmcli.stages import play as play_module
from wmcli.stages.pictures import (
    HOLD,
    Dream,
    Film,
    SideBySide,
    beside,
    imagined_beside_real,
    write_imagination,
    write_side_by_side,
)
from wmcli.stages.play import play
from wmcli.training.device import Machine, isolated_randomness
from wmcli.world_models.base import ImaginedStep, WorldModel

CPU = Machine(torch.device("cpu"), "float32", 1)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Film | Dream]:
    """What was filmed, in order."""
    kept: list[Film | Dream] = []
    for kind in (Film, Dream):

        def watched(film, space, meanings, original=kind.render):
            kept.append(film)
            return original(film, space, meanings)

        monkeypatch.setattr(kind, "render", watched)
    return kept


def pictures(path: Path) -> list[np.ndarray]:
    with Image.open(path) as film:
        seen = []
        for index in range(film.n_frames):
            film.seek(index)
            seen.append(np.asarray(film.convert("RGB")))
        return seen


@pytest.mark.parametrize("source", ["real", "imagination"])
@pytest.mark.slow
def test_a_film_is_written_and_the_same_seed_is_the_same_film(
    tiny: Path, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_module, "STEPS", 40)
    films = []
    for name, seed in [("a", 3), ("b", 4), ("c", 5), ("d", 6), ("e", 3), ("f", 4), ("g", 5), ("h", 6)]:
        out = tmp_path / f"{name}.gif"
        film = play(opened(tiny), source=source, out=out, controller=None, seed=seed)
        assert film.path == out
        films.append(out.read_bytes())
        assert 1 <= film.frames <= 40
        if source == "real":
            assert film[1:] == (7, film.total, "terminated") and film.total in (-1, 1)
            assert len(pictures(out)) == 8  # the outcome as well
    assert films[:4] == films[4:]
    assert len(set(films)) > 1
    assert Run.open(tiny, create=False).versions("controller") == [1]


@pytest.mark.parametrize(("actions", "total"), [("RIGHT," * 6 + "RIGHT", -1), ("left, 0,0,0,0,0,0,0,0", 1)])
def test_a_film_shows_how_the_episode_ended(
    tiny: Path, tmp_path: Path, shown: list, actions: str, total: float
) -> None:
    """The ball of this seed falls down the second column; the frame in which it lands is the last one of the film."""
    film = play(opened(tiny), source="real", out=tmp_path / "a.gif", controller=None, seed=4, actions=actions)
    assert (film.frames, film.total, film.ended) == (7, total, "terminated")
    assert shown[0].actions == [0 if total > 0 else 2] * 7
    last, before = shown[0].outcome, shown[0].frames[-1]
    ball = np.array(BALL_COLOR)
    assert (last[-2:, 2:4] == ball).all() and not (before[-2:, 2:4] == ball).all()
    shot = pictures(film.path)[-1]
    assert np.abs(shot[:192:12, ::12].astype(int) - last).max() < 16


def test_a_film_that_is_cut_says_so(
    tiny: Path, tmp_path: Path, shown: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(play_module, "STEPS", 4)
    context = opened(tiny)
    context.progress = Progress()
    film = play(context, source="real", out=tmp_path / "a.gif", controller=None, seed=4)
    assert film[1:] == (4, 0, "cut")
    assert "cut after 4 frames, the episode went on; return so far 0;" in capsys.readouterr().err
    assert shown[0].with_captions(spaces.Image(16, 16), None)[1][-1] == "cut after 4 frames\nreturn so far 0"
    assert len(pictures(film.path)) == 5


def test_actions_that_are_given_come_first(tiny: Path, tmp_path: Path, shown: list) -> None:
    for source in ("real", "imagination"):
        own = play(opened(tiny), source=source, out=tmp_path / "a.gif", controller=None, seed=3)
        given = play(opened(tiny), source=source, out=tmp_path / "a.gif", controller=None, seed=3, actions="0, Right,0")
        assert own.frames > 0 and given.frames > 0
    taken = [film.actions if isinstance(film, Film) else film.imagined.actions for film in shown]
    assert taken[1][:3] == [0, 2, 0][: len(taken[1])] and taken[3][:3] == [0, 2, 0][: len(taken[3])]
    assert len(taken[1]) == 7 and taken[0] != taken[1]


@pytest.mark.parametrize("actions", ["3", "-1", "0,UP", "", "1.0", "0,,1"])
def test_an_action_that_is_none_is_refused_before_anything_is_loaded(
    tiny: Path, tmp_path: Path, actions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_module, "load_controller", None)
    with pytest.raises(UsageError, match="no action of wm/Catch-v0; it has 0 LEFT, 1 STAY, 2 RIGHT") as caught:
        play(opened(tiny), source="real", out=tmp_path / "a.gif", controller=None, seed=3, actions=actions)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["film.doc", "none/a.gif", "folder.gif", "run/controller/latest/imagination.webp"])
def test_a_film_that_could_not_be_written_is_refused_before_anything_is_loaded(
    run: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_module, "load_controller", None)
    (tmp_path / "folder.gif").mkdir()
    with pytest.raises(UsageError, match="cannot write") as caught:
        play(opened(run), source="real", out=tmp_path / name, controller=None, seed=3)
    assert name.rpartition("/")[2] in str(caught.value) and "\n" not in str(caught.value)
    latest(run, "controller").verify()


# -- imagination ------------------------------------------------------------------------------------------------------


class Counter(WorldModel):
    """Frames and latents are a number; what is imagined is ten times the frame plus the action, and ends at 1,000."""

    frozen_encoder, across_ends, feature_shape, draws = True, False, (1,), 0

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context = context
        self.action_space, self.observation_space = spaces.Discrete(10), spaces.Image(1, 1, 3)
        self.reads: list[tuple[int, int]] = []
        self.eval()

    def perceive(self, state, observation, previous_action, reset, generator=None):
        self.reads.append((int(observation[0, 0, 0, 0]), int(previous_action[0])))
        return observation[:, 0, 0, 0].long()

    def imagine(self, state, action, uniforms=None):
        state = 10 * state + action
        return ImaginedStep(state, torch.ones(1), state >= 1000), state

    def latent(self, state):
        return state

    def decode(self, latent):
        return (latent % 256).to(torch.uint8)[..., None, None, None].expand(*latent.shape, 2, 2, 3)

    encode = loss = parameter_groups = observe = features = None


class Counting:
    """Streams whose frames count the steps, from 1 on, for `length` of them; a reward of 0.5 each."""

    def __init__(self, length: int) -> None:
        self.length, self.now, self.taken = length, 1, []
        self.first = np.ones(1, bool)

    @property
    def observation(self) -> np.ndarray:
        return np.full((1, 2, 2, 3), self.now, np.uint8)

    def step(self, action: np.ndarray) -> Transition:
        assert self.now <= self.length, "the episode is over"
        self.taken.append(int(action[0]))
        self.now += 1
        self.first = np.zeros(1, bool)
        over = self.now > self.length
        no = np.zeros(1, bool)
        final = {0: self.observation[0]} if over else {}
        return Transition(np.full(1, 0.5, np.float32), no, no | over, no, no | over, final)


class Dutiful(Controller):
    """Takes the last digit of the frame that it sees."""

    def decide(self, world_model, world_state, state, generator=None):
        return 100.0 * torch.nn.functional.one_hot(world_state % 10, 10), state

    def initial_state(self, batch):
        return ()

    def clear_rows(self, state, reset):
        return state

    def follow(self, action, state):
        return state

    def burn_in(self, world_model, world_state, action, state):
        return state


def dreamed(context: int, length: int, given: list[int]) -> tuple[Dream, Counter, Counting]:
    model, streams = Counter(context), Counting(length)
    controller = Dutiful()
    controller.distribution = build_policy(spaces.Discrete(10))
    controller.register_parameter("place", torch.nn.Parameter(torch.zeros(())))
    agent = Agent(model, controller, 1, temperature=0, epsilon=0, generator=torch.Generator())
    return play_module._imagined(streams, agent, [np.array(each) for each in given], context), model, streams


def numbers(frames: list[np.ndarray]) -> list[int]:
    return [int(frame[0, 0, 0]) for frame in frames]


def test_imagination_goes_on_from_the_context_under_the_agents_actions() -> None:
    dream, model, streams = dreamed(context=2, length=9, given=[])
    assert dream.context == 2
    assert model.reads == [(1, 0), (2, 1)], "two real frames, and the action between them"
    assert numbers(dream.imagined.frames) == [1, 2, 22, 222]
    assert dream.imagined.actions == dream.real.actions == streams.taken == [1, 2, 2, 2]
    assert dream.imagined.rewards == [0.5, 1, 1, 1] and dream.real.rewards == [0.5] * 4
    assert numbers(dream.real.frames) == [1, 2, 3, 4]
    assert (dream.imagined.ended, numbers([dream.imagined.outcome])) == ("terminated", [222])
    assert (dream.real.ended, numbers([dream.real.outcome])) == ("cut", [5]), "the real episode goes on"


def test_given_actions_are_taken_in_both_worlds() -> None:
    dream, _, streams = dreamed(context=2, length=9, given=[7, 1, 3])
    assert dream.imagined.actions == dream.real.actions == streams.taken == [7, 1, 3, 3]
    assert numbers(dream.imagined.frames) == [1, 2, 21, 213]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_real_episode_may_be_over_first(length: int) -> None:
    """Before the context is complete, imagination starts from what there was."""
    dream, model, _ = dreamed(context=3, length=length, given=[])
    assert dream.context == len(model.reads) == length
    assert (dream.real.ended, len(dream.real.frames)) == ("time limit", length)
    assert numbers([dream.real.outcome]) == [length + 1]
    assert dream.imagined.ended == "terminated" and len(dream.imagined.frames) > length
    movie = dream.render(spaces.Image(1, 1), None)
    left = movie[:, 20:212, :192]
    assert (left[length:] == length + 1).all(), "it stands still"
    heads = movie[:, :20, :192]
    assert (heads[0] != heads[length]).any() and (heads[length] == heads[-1]).all(), "and says that it is over"


def test_a_dream_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play_module, "STEPS", 3)
    dream, _, _ = dreamed(context=2, length=9, given=[])
    assert (dream.imagined.ended, numbers(dream.imagined.frames)) == ("cut", [1, 2, 22])
    assert dream.imagined.with_captions(spaces.Image(1, 1), None)[1][-1] == "cut after 3 frames\nreturn so far 2.5"


def test_a_film_shows_the_search_of_its_own_game() -> None:
    film = Film()
    frame, found = np.zeros((4, 4, 3), np.uint8), {"policy": np.array([[0.25, 0.75], [1, 0]]), "value": np.arange(2)}
    film.add(frame, 1, 0.5, found)
    assert film.policies[0].tolist() == [0.25, 0.75] and film.values == [0.0]
    assert film.actions == [1] and film.rewards == [0.5]
    alone = film.render(spaces.Image(4, 4), None)
    film.end(frame, "time limit")
    ended = film.render(spaces.Image(4, 4), None)
    assert (ended[0] == alone[0]).all() and len(ended) == 1 + HOLD
    assert film.with_captions(spaces.Image(4, 4), None)[1][-1] == "time limit\nreturn 0.5"


# -- real beside imagined ---------------------------------------------------------------------------------------------


def columns(numbers: np.ndarray, is_last: np.ndarray) -> dict[str, np.ndarray]:
    """Experience of frames with one pixel, a number."""
    count = len(numbers)
    return {
        "observation": numbers.astype(np.uint8)[:, None, None, None].repeat(3, -1),
        "action": np.zeros(count, np.int32),
        "reward": np.zeros(count, np.float32),
        "terminated": is_last,
        "truncated": np.zeros(count, bool),
        "first": np.concatenate(([True], is_last[:-1])),
        "lives": np.zeros(count, np.int16),
        "stream": np.zeros(count, np.int16),
    }


class Echo:
    """A model that reconstructs frames, and imagines nothing but zeros."""

    decodes, observation_space = "latents", spaces.Image(1, 1)

    def encode(self, observation):
        return observation[..., 0, 0, 0]

    def observe(self, latent, action, reset):
        return latent, latent[:, -1]

    def features(self, state):
        return state

    def imagine(self, state, action):
        return type("Imagined", (), {"latent": state * 0})(), state

    def decode(self, latent):
        return latent[..., None, None, None].expand(*latent.shape, 1, 1, 3)


@pytest.fixture
def newest_episodes(tiny: Path) -> tuple:
    context = opened(tiny)
    return load_world_model(latest(tiny, "dynamics"), CPU), context.experience(latest(tiny, "experience"))


def test_the_left_side_is_real_and_the_right_begins_as_its_reconstruction(newest_episodes: tuple) -> None:
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
            and (memory.observation[memory.order[start : start + 7]].numpy() == real).all()
        ]
        assert found
        reconstruction = world_model.decode(world_model.encode(memory.observation[found[0][:2]][None])[0]).numpy()
        difference = np.abs(pictures.imagined[:2, rows].astype(int) - reconstruction)
        assert difference.max() <= 1  # batches of another size may round otherwise


def test_every_frame_follows_from_the_one_before_and_its_action(newest_episodes: tuple) -> None:
    """A model that counts actions shows which actions it was given, and when."""

    class Counter:
        decodes, observation_space = "latents", spaces.Image(1, 1)

        def encode(self, observation):
            return observation[..., 0, 0]

        def observe(self, latent, action, reset):
            assert reset[:, 0].all() and not reset[:, 1:].any()
            return latent, latent[:, -1]

        def features(self, state):
            return state

        def imagine(self, state, action):
            step = state * 10 + action[:, None]
            return type("Imagined", (), {"latent": step})(), step

        def decode(self, latent):
            return latent[..., None, None].expand(*latent.shape, 1, 1).to(torch.int64)

    frames = torch.tensor([[1, 2, 0, 0, 0], [3, 4, 0, 0, 0]])[..., None, None, None]
    actions = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    shown = beside(Counter(), frames, actions, 2).imagined
    assert shown[:, :, 0, 0].T.tolist() == [[1, 2, 26, 267, 2678], [3, 4, 42, 423, 4234]]


def test_more_episodes_are_measured_than_shown(newest_episodes: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    world_model, memory = newest_episodes
    with isolated_randomness(1, CPU.device):
        few = imagined_beside_real(world_model, memory, 2)
    assert few.errors.shape == (12, 7), "all of the experience"
    assert few.real.shape == few.imagined.shape == (7, 3 * 16, 16, 3)
    own = [np.stack(np.split(side, 3, axis=1)).astype(float) / 255 for side in (few.real, few.imagined)]
    np.testing.assert_allclose(few.errors[:3], ((own[0] - own[1]) ** 2).mean((2, 3, 4)), rtol=1e-9)
    assert (few.errors >= 0).all() and len(np.unique(few.errors[:, 2:])) > 12
    monkeypatch.setattr(pictures_module, "EPISODES", 12)
    with isolated_randomness(1, CPU.device):
        every = imagined_beside_real(world_model, memory, 2)
    own = [np.stack(np.split(side, 12, axis=1)).astype(float) / 255 for side in (every.real, every.imagined)]
    np.testing.assert_allclose(every.errors, ((own[0] - own[1]) ** 2).mean((2, 3, 4)), rtol=1e-9)
    np.testing.assert_allclose(every.errors, few.errors, rtol=0.05)  # batches of another size may round otherwise


def test_the_newest_episodes_that_are_long_enough_are_measured() -> None:
    lengths = [9, 40, 3, 40, 9, 35, 9]  # of which the film takes the longest three: 26 frames each
    memory = Replay(CPU.device)
    number = np.concatenate([np.full(length, episode) for episode, length in enumerate(lengths)])
    is_last = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    memory.extend(columns(number, is_last))
    chosen = imagined_beside_real(Echo(), memory, 2)
    assert chosen.real.shape == (26, 3, 1, 3) and chosen.real[0, :, 0, 0].tolist() == [5, 3, 1], "the newest first"
    memory = Replay(CPU.device)
    memory.extend(columns(np.arange(120).repeat(3) % 100, np.tile([False, False, True], 120)))
    chosen = imagined_beside_real(Echo(), memory, 2)
    assert chosen.real[0, :, 0, 0].tolist() == [19, 18, 17]
    assert chosen.errors[:, -1].tolist() == pytest.approx([((19 - each) - 0) ** 2 / 255**2 for each in range(16)])


def test_errors_are_means_over_episodes_and_pixels(tmp_path: Path) -> None:
    frames = np.random.default_rng(1).integers(0, 255, (2, 4, 8, 8, 3)).astype(np.uint8)
    errors = np.arange(20.0).reshape(5, 4)
    write_imagination(tmp_path, SideBySide(frames[0], frames[1], 2, 8, errors))
    assert json.loads((tmp_path / "imagination.json").read_text(encoding="utf-8")) == {
        "context": 2,
        "episodes": 5,
        "mean_squared_error": [8, 9, 10, 11],
    }
    assert {each.name for each in tmp_path.iterdir()} == {"imagination.json", "imagination.png", "imagination.webp"}
    write_imagination(tmp_path / "nothing", None)
    assert not (tmp_path / "nothing").exists()


def test_no_episode_is_long_enough() -> None:
    memory = Replay(CPU.device)
    memory.extend(columns(np.zeros(4), np.array([False, True] * 2)))
    assert imagined_beside_real(None, memory, 2) is None


@pytest.mark.parametrize("episodes", [1, 2, 3])
@pytest.mark.parametrize("size", [8, 12])
def test_the_picture_shows_one_episode_whole(tmp_path: Path, episodes: int, size: int) -> None:
    frames = np.random.default_rng(1).integers(0, 255, (2, 4, episodes * size, size, 3)).astype(np.uint8)
    write_side_by_side(tmp_path, SideBySide(frames[0], frames[1], 2, size, np.zeros((episodes, 4))))
    write_png(tmp_path / "wanted.png", strip({"real": frames[0][:, :size], "imagined": frames[1][:, :size]}, context=2))
    assert (tmp_path / "imagination.png").read_bytes() == (tmp_path / "wanted.png").read_bytes()
    with Image.open(tmp_path / "imagination.webp") as picture:
        assert picture.n_frames == 4
    write_side_by_side(tmp_path / "nothing", None)
    assert not (tmp_path / "nothing").exists()
