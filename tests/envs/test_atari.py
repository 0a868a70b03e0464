from __future__ import annotations

from collections import deque
from dataclasses import replace

import ale_py
import gymnasium
import numpy as np
import pytest
from PIL import Image

from wmcli.envs import EnvironmentSettings, Streams, make, protocol
from wmcli.envs.atari import CONTINUES, PROTOCOLS, Atari, area_mean, game_of, games

REM, DRAMA = PROTOCOLS["rem"], PROTOCOLS["drama"]


class Plainly:
    """The chain of protocol rem written down naively: every frame goes through every layer, nothing is left out."""

    def __init__(self, game: str, size: int, *, life_loss: bool, time_limit: int) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.env = gymnasium.make(
            f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, max_num_frames_per_episode=None
        ).unwrapped
        self.size, self.life_loss, self.time_limit = size, life_loss, time_limit
        self.buffer = np.zeros((2, size, size, 3), np.uint8)

    def resized(self, frame: np.ndarray) -> np.ndarray:
        return np.array(Image.fromarray(frame).resize((self.size, self.size), Image.Resampling.BILINEAR))

    def raw_step(self, action: int):
        frame, reward, over, _, info = self.env.step(action)
        self.elapsed += 1
        return self.resized(frame), reward, over, self.elapsed >= self.time_limit, info["lives"]

    def new_game(self, seed: int, no_ops: int) -> np.ndarray:
        self.env.reset(seed=seed)
        self.elapsed = 0
        for _ in range(no_ops):
            frame, _, over, _, self.lives = self.raw_step(0)
            assert not over
        return frame

    def step(self, action: int):
        total = 0.0
        for i in range(4):
            frame, reward, over, late, lives = self.raw_step(action)
            total += reward
            if i >= 2:
                self.buffer[i - 2] = frame
            if over or late:
                break
        lost = self.life_loss and 0 < lives < self.lives
        self.lives = lives
        return np.maximum(self.buffer[0], self.buffer[1]), total, over or lost, late and not over, over or late

    def next_life(self) -> np.ndarray:
        return self.step(0)[0]


@pytest.mark.parametrize(("game", "train"), [("Breakout", True), ("Breakout", False), ("Boxing", True)])
def test_the_chain_equals_its_naive_form_through_a_whole_game(monkeypatch, game: str, train: bool) -> None:
    limit = 1002  # emulator frames
    rules = replace(REM.train if train else REM.test, time_limit=limit)
    monkeypatch.setitem(PROTOCOLS, "rem", replace(REM, train=rules, test=rules))
    env, plainly = Atari(game, 40, "rem", train=train), Plainly(game, 40, life_loss=train, time_limit=limit)
    frame, info = env.reset(seed=7)
    no_ops = env._elapsed
    assert 1 <= no_ops <= (30 if train else 1)
    assert (frame == plainly.new_game(7, no_ops)).all()
    rng = np.random.default_rng(2)
    rewards, lives_lost, game_over = 0.0, 0, False
    while not game_over:
        action = int(rng.integers(4))
        frame, reward, terminated, truncated, info = env.step(action)
        want = plainly.step(action)
        game_over = want[4]
        assert (frame == want[0]).all()
        assert (reward, terminated, truncated) == want[1:4]
        rewards += abs(reward)
        if terminated and not game_over:
            assert info[CONTINUES]
            lives_lost += 1
            assert (env.reset()[0] == plainly.next_life()).all()
    assert not info[CONTINUES]
    assert rewards > 0
    assert truncated == (game == "Boxing")
    assert not truncated or (limit - no_ops) % 4 in (1, 2)  # inside a repeat, so that old frames are what is seen
    assert lives_lost == (4 if game == "Breakout" and train else 0)  # so a training game has 5 episodes


def test_no_ops_of_training_are_one_to_thirty_and_depend_on_the_seed() -> None:
    env = Atari("Pong", 16, "rem", train=True)
    counts = []
    for seed in (0, 1, 2, 3, 0):
        env.reset(seed=seed)
        counts.append(env._elapsed)
    assert counts[0] == counts[-1] and len(set(counts)) > 2 and all(1 <= count <= 30 for count in counts)
    test = Atari("Pong", 16, "rem", train=False)
    test.reset(seed=1)
    assert test._elapsed == 1


class NoLivesShown:
    """An emulator that shows 0 lives although the game goes on, as Qbert does for a few frames."""

    def __init__(self, ale) -> None:
        self.ale = ale

    def __getattr__(self, name: str):
        return (lambda: 0) if name == "lives" else getattr(self.ale, name)


def test_no_lives_before_the_end_of_the_game_is_no_end() -> None:
    env = Atari("Breakout", 16, "rem", train=True)
    env.reset(seed=0)
    env._ale = NoLivesShown(env._ale)
    assert env.step(0)[2] is False


def test_time_limits_count_emulator_frames() -> None:
    assert (REM.train.time_limit, REM.test.time_limit) == (20_000, 108_000)
    env = Atari("Pong", 16, "rem", train=True)
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    env._elapsed = 19_995
    assert env.step(0)[3] is False
    assert env.step(0)[2:4] == (False, True)


@pytest.mark.parametrize(
    ("identifier", "game"),
    [
        ("ALE/Pong-v5", "Pong"),
        ("ale_py:ALE/Pong-v5", "Pong"),
        ("PongNoFrameskip-v4", "Pong"),
        ("MsPacman-v0", "MsPacman"),
        ("MsPacman", "MsPacman"),
        ("wm/Catch-v0", None),
        ("Pongg", None),
        ("CartPole-v1", None),
    ],
)
def test_ids_of_atari_games(identifier: str, game: str | None) -> None:
    assert game_of(identifier) == game


def test_all_26_games_of_atari_100k_are_known() -> None:
    names = (
        "Alien Amidar Assault Asterix BankHeist BattleZone Boxing Breakout ChopperCommand CrazyClimber DemonAttack "
        "Freeway Frostbite Gopher Hero Jamesbond Kangaroo Krull KungFuMaster MsPacman Pong PrivateEye Qbert RoadRunner "
        "Seaquest UpNDown"
    )
    assert len(names.split()) == 26 and set(names.split()) <= set(games())


def test_actions_are_minimal_and_not_sticky() -> None:
    env = make(EnvironmentSettings(id="PongNoFrameskip-v4", protocol="rem", size=24), train=True).unwrapped
    assert env.action_space.n == 6
    assert env.get_action_meanings()[0] == "NOOP"
    assert env._ale.getFloat("repeat_action_probability") == 0.0
    assert env._emulator._frameskip == 1


# -- drama ------------------------------------------------------------------------------------------------------------


class DramaPlainly:
    """The chain of protocol drama written down naively, without episodes: a game, and which steps lost a life."""

    def __init__(self, game: str, size: int, time_limit: int, sticky: float = 0.0) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.env = gymnasium.make(
            f"ALE/{game}-v5", frameskip=1, repeat_action_probability=sticky, max_num_frames_per_episode=time_limit
        )
        self.size = size

    def new_game(self, seed: int, no_ops: int = 0) -> np.ndarray:
        frame, info = self.env.reset(seed=seed)
        for _ in range(no_ops):
            frame, _, over, late, info = self.env.step(0)
            assert not over and not late
        self.lives = info["lives"]
        return area_mean(frame, self.size)

    def step(self, action: int):
        """Frame, reward, life lost, game over, time limit."""
        total, last = 0.0, deque(maxlen=2)
        for _ in range(4):
            frame, reward, over, late, info = self.env.step(action)
            total += reward
            last.append(frame)
            if over or late:
                break
        lost = info["lives"] < self.lives
        self.lives = info["lives"]
        return area_mean(np.maximum.reduce(list(last)), self.size), total, lost, over, late


# 1000 + k emulator frames: the last repeat of a game that is still running has k frames.
@pytest.mark.parametrize(
    ("game", "train", "limit"),
    [
        ("Breakout", True, 5000),
        ("Breakout", False, 5000),
        ("Boxing", True, 1001),
        ("Boxing", True, 1002),
        ("Boxing", False, 1003),
        ("Boxing", True, 1004),
    ],
)
@pytest.mark.slow
def test_drama_equals_its_naive_form_through_a_whole_game(monkeypatch, game: str, train: bool, limit: int) -> None:
    rules = replace(DRAMA.train if train else DRAMA.test, time_limit=limit)
    monkeypatch.setitem(PROTOCOLS, "drama", replace(DRAMA, train=rules, test=rules))
    env, plainly = Atari(game, 40, "drama", train=train), DramaPlainly(game, 40, limit)
    frame, _ = env.reset(seed=7)
    assert env._elapsed == 0 and (frame == plainly.new_game(7)).all()
    rng = np.random.default_rng(5)
    rewards, lives_lost, game_over = 0.0, 0, False
    while not game_over:
        action = int(rng.integers(4))
        frame, reward, terminated, truncated, info = env.step(action)
        want, total, lost, over, late = plainly.step(action)
        assert (frame == want).all() and reward == total
        assert terminated == (over or (train and lost)) and truncated == late
        game_over = over or late
        assert info[CONTINUES] == (terminated and not game_over)
        rewards += abs(reward)
        if info[CONTINUES]:
            lives_lost += 1
            opening, _ = env.reset()
            assert (opening == frame).all()  # the very frame that the last action led to: nothing was played
    assert rewards > 0 and truncated == (game == "Boxing")
    assert lives_lost == (4 if game == "Breakout" and train else 0)


def test_under_drama_a_lost_life_opens_an_episode_but_plays_nothing() -> None:
    settings = EnvironmentSettings(id="Breakout", protocol="drama", size=24)
    streams, plainly = Streams(settings, train=True, seed=2), DramaPlainly("Breakout", 24, 108_000)
    start = plainly.new_game(0)  # Breakout starts alike whatever the seed
    assert (streams.observation[0] == start).all() and streams.first[0]
    marked = 0
    for step, action in enumerate(np.random.default_rng(3).integers(4, size=(400, 1))):
        if step == 100:
            streams = Streams.restore(settings, True, streams.state())
        after = streams.step(action)
        frame, reward, lost, over, _ = plainly.step(int(action[0]))
        assert after.terminated[0] == lost and after.reward[0] == reward and after.lives[0] == plainly.lives
        assert streams.first[0] == lost and after.game_over[0] == over and not after.truncated[0]
        if over:
            break
        marked += int(lost)
        assert (streams.observation[0] == frame).all()
    assert marked == 4 and over


def test_a_mark_survives_being_restored_right_after_it() -> None:
    settings = EnvironmentSettings(id="Breakout", protocol="drama", size=24)
    streams = Streams(settings, train=True, seed=2)
    while not streams.step(np.array([1])).terminated[0]:
        pass
    again = Streams.restore(settings, True, streams.state())
    assert again.first[0] and (again.observation == streams.observation).all()


@pytest.mark.parametrize(("shape", "size"), [((7, 5, 3), 3), ((21, 16, 3), 6), ((21, 16, 3), 8), ((8, 12, 1), 4)])
def test_the_mean_of_an_area_by_brute_force(shape: tuple[int, ...], size: int) -> None:
    image = np.random.default_rng(0).integers(256, size=shape).astype(np.uint8)
    height, width, channels = shape
    fine = image.astype(np.int64).repeat(size, 0).repeat(size, 1)  # every pixel cut into size x size parts
    blocks = fine.reshape(size, height, size, width, channels).mean((1, 3))
    found = area_mean(image, size)
    assert found.dtype == np.uint8 and found.shape == (size, size, channels)
    assert np.abs(found - blocks).max() <= 0.5 + 1e-9


def test_the_mean_of_an_area_is_that_of_opencv() -> None:
    """Values of cv2.resize(..., interpolation=cv2.INTER_AREA) of OpenCV 4; Pillow's box filter gives others."""
    image = (np.arange(7 * 5 * 3) ** 2 % 251).astype(np.uint8).reshape(7, 5, 3)
    want = [
        [[89, 50, 55], [85, 119, 91], [123, 103, 149]],
        [[85, 150, 159], [94, 147, 130], [146, 80, 166]],
        [[93, 133, 168], [94, 165, 117], [74, 155, 108]],
    ]
    assert area_mean(image, 3).tolist() == want
    assert np.array(Image.fromarray(image).resize((3, 3), Image.Resampling.BOX)).tolist() != want


def test_the_blocks_of_both_protocols() -> None:
    rem, drama = (protocol(EnvironmentSettings(id="Breakout", protocol=name)) for name in ("rem", "drama"))
    assert set(rem["train"]) == {"life_loss_ends_episode", "no_ops_min", "no_ops_max", "time_limit"} == set(rem["test"])
    assert drama["train"] == {
        "life_loss_ends_episode": True,
        "no_ops_min": 0,
        "no_ops_max": 0,
        "time_limit": 108_000,
        "after_life_loss": "same frame",
    }
    assert drama["test"] == {"life_loss_ends_episode": False, "no_ops_min": 0, "no_ops_max": 0, "time_limit": 108_000}
    assert drama["resize"] == "area, after the maximum" and rem["resize"] == "pillow bilinear, before the maximum"
    same = ("frameskip", "repeat_action_probability", "full_action_space", "action_repeat", "max_over_last", "color")
    assert [drama[key] for key in same] == [rem[key] for key in same] == [1, 0.0, False, 4, 2, "rgb"]
    assert rem["clip_reward"] is False and drama["clip_reward"] is False


# -- unizero ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "game", "train", "limit"),
    [
        ("unizero", "MsPacman", True, 5000),  # rewards of 10 and more, 3 lives
        ("unizero", "MsPacman", False, 5000),
        ("unizero", "Boxing", True, 1002),  # runs into its limit
        ("unizero", "Boxing", False, 1003),
        ("unizero-sticky", "MsPacman", True, 5000),
        ("unizero-sticky", "MsPacman", False, 5000),
    ],
)
@pytest.mark.slow
def test_unizero_equals_its_naive_form_through_a_whole_game(monkeypatch, name, game, train: bool, limit: int) -> None:
    ours = PROTOCOLS[name]
    half = replace(ours.train if train else ours.test, time_limit=limit)
    monkeypatch.setitem(PROTOCOLS, name, replace(ours, train=half, test=half))
    env = Atari(game, 40, name, train=train)
    plainly = DramaPlainly(game, 40, limit, sticky={"unizero": 0.0, "unizero-sticky": 0.25}[name])
    frame, _ = env.reset(seed=7)
    no_ops = env._elapsed
    assert 1 <= no_ops <= 30 and (frame == plainly.new_game(7, no_ops)).all()
    rng = np.random.default_rng(5)
    lives_lost, game_over, seen = 0, False, set()
    while not game_over:
        action = int(rng.integers(env.action_space.n))
        frame, reward, terminated, truncated, info = env.step(action)
        want, total, lost, over, late = plainly.step(action)
        game_over = over or late
        assert (frame == want).all() and truncated == late
        assert terminated == (over or (train and lost and plainly.lives > 0))
        assert type(reward) is float and reward == (np.sign(total) if train else total)
        assert info[CONTINUES] == (terminated and not game_over)
        seen.add(abs(total))
        if info[CONTINUES]:
            lives_lost += 1
            assert (env.reset()[0] == plainly.step(0)[0]).all()  # one no-op decision in the same game
    assert truncated == (game == "Boxing")
    assert lives_lost == (2 if game == "MsPacman" and train else 0)
    assert max(seen) >= (10 if game == "MsPacman" else 1)


class Paying:
    """An emulator that pays `reward` on every frame."""

    def __init__(self, ale, reward: float) -> None:
        self.ale, self.reward = ale, reward

    def __getattr__(self, name: str):
        return getattr(self.ale, name)

    def act(self, action) -> float:
        self.ale.act(action)
        return self.reward


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_only_training_under_unizero_sees_the_sign_of_a_reward_alone(name: str, train: bool) -> None:
    env = Atari("Boxing", 16, name, train=train)
    env.reset(seed=0)
    env._ale = Paying(env._ale, 0.0)
    for paid, sign in ((7.0, 1.0), (0.0, 0.0), (-2.0, -1.0)):
        env._ale.reward = paid
        assert env.step(0)[1] == (sign if train and name.startswith("unizero") else 4 * paid)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.slow
def test_no_ops_of_unizero_are_one_to_thirty_in_both_halves(train: bool) -> None:
    env = Atari("Pong", 16, "unizero", train=train)
    counts = []
    for seed in range(12):
        env.reset(seed=seed)
        counts.append(env._elapsed)
    assert len(set(counts)) > 4 and all(1 <= count <= 30 for count in counts)


def test_sticky_actions_follow_the_seed_and_survive_being_restored() -> None:
    settings = EnvironmentSettings(id="MsPacman", protocol="unizero-sticky", size=24)
    actions = np.random.default_rng(1).integers(9, size=(80, 1))

    def frames(settings: EnvironmentSettings) -> np.ndarray:
        streams = Streams(settings, train=True, seed=4)
        shown = []
        for step, action in enumerate(actions):
            if step == 40:
                streams = Streams.restore(settings, True, streams.state())
            streams.step(action)
            shown.append(streams.observation)
        return np.stack(shown)

    sticky = frames(settings)
    assert (sticky == frames(settings)).all()
    assert (sticky != frames(settings.model_copy(update={"protocol": "unizero"}))).any()


def test_the_blocks_of_unizero_differ_in_name_and_stickiness_alone() -> None:
    block, sticky = (
        protocol(EnvironmentSettings(id="Breakout", protocol=name)) for name in ("unizero", "unizero-sticky")
    )
    rules = {"no_ops_min": 1, "no_ops_max": 30, "time_limit": 4 * 108_000}
    assert block["train"] == rules | {"life_loss_ends_episode": True, "clip_reward": True}
    assert block["test"] == rules | {"life_loss_ends_episode": False, "clip_reward": False}
    assert "clip_reward" not in block
    assert (block["frameskip"], block["action_repeat"], block["max_over_last"]) == (1, 4, 2)
    assert block["resize"] == "area, after the maximum" and block["full_action_space"] is False
    assert (block["repeat_action_probability"], sticky["repeat_action_probability"]) == (0.0, 0.25)
    assert {key for key in block if block[key] != sticky[key]} == {"protocol", "repeat_action_probability"}
