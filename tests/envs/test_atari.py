from __future__ import annotations

from dataclasses import replace

import ale_py
import gymnasium
import numpy as np
import pytest
from PIL import Image

from wmcli.envs import EnvironmentSettings, make
from wmcli.envs.atari import CONTINUES, PROTOCOLS, Atari, game_of, games

REM = PROTOCOLS["rem"]


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
    env = make(EnvironmentSettings(id="PongNoFrameskip-v4", protocol="rem", size=24), train=True)
    assert env.action_space.n == 6
    assert env.get_action_meanings()[0] == "NOOP"
    assert env._ale.getFloat("repeat_action_probability") == 0.0
    assert env._emulator._frameskip == 1
