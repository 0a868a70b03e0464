from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from wmcli.envs import EnvironmentSettings, Streams, follows_seed, make
from wmcli.errors import ArtifactError, EnvironmentFault
from wmcli.spaces import Discrete

CATCH = EnvironmentSettings(size=32, count=3)


def play(streams: Streams, actions: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Everything that can be seen while playing (T, E) actions."""
    seen = []
    for action in actions:
        transition = streams.step(action)
        seen.append((streams.observation, streams.first, *transition[:-1], *transition.final.values()))
    return seen


def assert_same(got: list[tuple[np.ndarray, ...]], want: list[tuple[np.ndarray, ...]]) -> None:
    for step, other in zip(got, want, strict=True):
        for a, b in zip(step, other, strict=True):
            assert a.dtype == b.dtype and (a == b).all()


@pytest.mark.parametrize(
    ("settings", "train"),
    [
        (CATCH, True),
        (EnvironmentSettings(id="Pong", protocol="rem", size=24, count=3), True),
        (EnvironmentSettings(id="Breakout", protocol="rem", size=24, count=3), True),
        (EnvironmentSettings(id="Breakout", protocol="rem", size=24, count=3), False),
    ],
)
def test_restored_streams_go_on_exactly(settings: EnvironmentSettings, train: bool) -> None:
    actions = np.random.default_rng(1).integers(3, size=(100, 3))
    streams = Streams(settings, train=train, seed=11)
    before = play(streams, actions[:60])
    state = streams.state()
    now, first = streams.observation, streams.first
    want = play(streams, actions[60:])
    again = Streams.restore(settings, train, state)
    assert (again.observation == now).all() and (again.first == first).all()
    assert_same(play(again, actions[60:]), want)
    after, expected = again.state(), streams.state()
    assert all(np.array_equal(after[key], expected[key]) for key in expected)
    terminated = sum(step[3].sum() for step in before + want)
    lives_lost = sum((step[3] & ~step[6]).sum() for step in before + want)
    if settings.id == "Breakout":
        assert (lives_lost > 0) == train  # or the hardest case was not tried
    if settings is CATCH:
        assert terminated == 3 * (100 // 7) and lives_lost == 0
    streams.close()
    again.close()


def test_restoring_right_after_a_lost_life_keeps_the_opening_flag() -> None:
    settings = EnvironmentSettings(id="Breakout", protocol="rem", size=24)
    streams = Streams(settings, train=True, seed=2)
    for _ in range(200):
        transition = streams.step(np.array([1]))  # keeps firing, never moves
        if transition.terminated[0]:
            break
    assert not transition.game_over[0] and streams.first[0] and transition.lives[0] == 4
    again = Streams.restore(settings, True, streams.state())
    assert again.first[0] and (again.observation == streams.observation).all()
    game = streams.state()["length"]
    for stand in (streams, again):
        assert stand.age(across_ends=False) == [0] and stand.age(across_ends=True) == game > 0
        stand.step(np.array([1]))
        assert stand.age(across_ends=False) == [1]


@pytest.mark.slow
def test_an_age_counts_the_decisions_since_the_frame_that_opened_a_game_or_a_life() -> None:
    streams = Streams(EnvironmentSettings(id="Breakout", protocol="drama", size=16, count=2), train=True, seed=2)
    actions = np.random.default_rng(0).integers(4, size=(400, 2))
    episode, game, games = np.zeros(2, int), np.zeros(2, int), 0
    for action in actions:
        assert (streams.age(across_ends=False) == episode).all() and (streams.age(across_ends=True) == game).all()
        assert (streams.first == (episode == 0)).all()
        after = streams.step(action)
        episode = np.where(after.terminated | after.truncated, 0, episode + 1)
        game = np.where(after.game_over, 0, game + 1)
        games += int(after.game_over.sum())
    assert games > 1


def test_reset_frames_follow_the_end_and_open_an_episode() -> None:
    streams = Streams(CATCH, train=True, seed=0)
    assert streams.first.all()
    for step in range(1, 29):
        transition = streams.step(np.ones(3, np.int64))
        ended = step % 7 == 0
        assert (transition.terminated == ended).all() and (transition.game_over == ended).all()
        assert (streams.first == ended).all() and (transition.lives == -1).all()
        assert ((transition.reward != 0) == ended).all()
        assert not transition.truncated.any()


def test_every_game_and_stream_has_its_own_seed() -> None:
    streams = Streams(EnvironmentSettings(size=16, count=4), train=True, seed=5)
    starts = [[frame.tobytes() for frame in streams.observation]]
    for _ in range(30):
        for _ in range(7):
            streams.step(np.ones(4, np.int64))
        starts.append([frame.tobytes() for frame in streams.observation])
    for stream in range(4):
        assert len({row[stream] for row in starts}) > 4  # of 8 columns
    columns = {tuple(row[stream] for row in starts) for stream in range(4)}
    assert len(columns) == 4
    other = Streams(EnvironmentSettings(size=16, count=4), train=True, seed=6)
    assert [frame.tobytes() for frame in other.observation] != starts[0]


def test_a_stream_does_not_depend_on_its_neighbors() -> None:
    one = Streams(EnvironmentSettings(size=16, count=1), train=True, seed=9)
    five = Streams(EnvironmentSettings(size=16, count=5), train=True, seed=9)
    rng = np.random.default_rng(0)
    for _ in range(30):
        action = rng.integers(3, size=5)
        one.step(action[:1])
        five.step(action)
        assert (one.observation[0] == five.observation[0]).all()


def test_another_number_of_streams_is_refused() -> None:
    state = Streams(CATCH, train=True, seed=0).state()
    with pytest.raises(ArtifactError, match="environment.count=3"):
        Streams.restore(EnvironmentSettings(size=32, count=2), True, state)


def registered(environment: type[gymnasium.Env]) -> EnvironmentSettings:
    name = f"test/{environment.__name__}-v0"
    gymnasium.registry.pop(name, None)
    gymnasium.register(name, entry_point=environment)
    return EnvironmentSettings(id=name, size=8, count=2)


class Noise(gymnasium.Env):
    """Ignores its seed. Episodes of 5 steps."""

    observation_space, action_space = spaces.Box(0, 255, (9, 8, 3), np.uint8), spaces.Discrete(2)
    rng = np.random.default_rng(0)
    time = 0

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.rng.integers(256, size=(9, 8, 3), dtype=np.uint8), {}

    def step(self, action):
        self.time += 1
        frame = self.rng.integers(256, size=(9, 8, 3), dtype=np.uint8)
        return frame, 0.0, self.time == 5, False, {}


def test_an_environment_that_does_not_follow_its_seed_begins_new_games() -> None:
    settings = registered(Noise)
    streams = Streams(settings, train=True, seed=0)
    play(streams, np.zeros((7, 2), np.int64))
    state = streams.state()
    again = Streams.restore(settings, True, state)
    assert again.restarted.all() and again.first.all()
    after = again.state()
    assert after["game"].tolist() == (state["game"] + 1).tolist() and after["length"].tolist() == [0, 0]
    ends = [again.step(np.zeros(2, np.int64)).terminated.tolist() for _ in range(5)]
    assert ends == [[False, False]] * 4 + [[True, True]]  # a whole episode


def test_only_the_stream_that_led_elsewhere_begins_anew() -> None:
    streams = Streams(CATCH, train=True, seed=0)
    play(streams, np.ones((10, 3), np.int64))
    state = streams.state()
    state["frame"][1] += 1
    again = Streams.restore(CATCH, True, state)
    assert again.restarted.tolist() == again.first.tolist() == [False, True, False]
    assert (again.observation[[0, 2]] == streams.observation[[0, 2]]).all()
    assert again.state()["game"].tolist() == [1, 2, 1]


def test_pictures_are_drawn_again_after_a_replay_that_led_elsewhere() -> None:
    settings = EnvironmentSettings(id="Pong", protocol="rem", size=24)
    streams = Streams(settings, train=True, seed=0)
    play(streams, np.ones((5, 1), np.int64))
    again = Streams.restore(settings, True, streams.state() | {"frame": np.zeros(1, np.int64)})
    other = Streams.restore(settings, True, streams.broken_state())
    assert again.restarted.all() and not other.restarted.any()
    assert_same(play(again, np.full((30, 1), 2)), play(other, np.full((30, 1), 2)))


@pytest.mark.parametrize(("environment", "follows"), [("wm/Catch-v0", True), ("test/Noise-v0", False)])
def test_whether_an_environment_follows_its_seed(environment: str, follows: bool) -> None:
    registered(Noise)
    assert follows_seed(EnvironmentSettings(id=environment, size=8), Discrete(2)) == follows


class Fails(gymnasium.Env):
    """Raises where its frame, which counts the steps from a beginning by its seed, would show 9 or more."""

    observation_space, action_space = spaces.Box(0, 255, (8, 8), np.uint8), spaces.Discrete(2)
    shown = 0

    def frame(self):
        if self.shown >= 9:
            raise RuntimeError("nine")
        return np.full((8, 8), self.shown, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = int(self.np_random.integers(4))
        return self.frame(), {}

    def step(self, action):
        self.shown += 1
        return self.frame(), 0.0, False, False, {}


def test_streams_go_on_after_a_fault_with_new_games() -> None:
    settings = registered(Fails)
    streams = Streams(settings, train=True, seed=0)
    with pytest.raises(EnvironmentFault, match="nine"):
        play(streams, np.zeros((9, 2), np.int64))
    again = Streams.restore(settings, True, streams.broken_state())
    assert again.first.all() and not again.restarted.any()
    assert again.state()["game"].tolist() == [1, 1]
    play(again, np.zeros((5, 2), np.int64))


def test_streams_equal_playing_the_environment_by_hand() -> None:
    settings = EnvironmentSettings(id="Breakout", protocol="rem", size=24)
    streams, env = Streams(settings, train=True, seed=4), make(settings, train=True)
    seed = int(np.random.SeedSequence((4, 0, 0)).generate_state(1)[0]) >> 1
    frame, _ = env.reset(seed=seed)
    assert (streams.observation[0] == frame).all()
    lives_lost = 0
    for action in np.random.default_rng(3).integers(4, size=(400, 1)):
        transition = streams.step(action)
        frame, reward, terminated, truncated, info = env.step(action[0])
        assert tuple(column[0] for column in transition[:4]) == (reward, terminated, truncated, info["lives"])
        if transition.game_over[0]:
            break
        if terminated:
            lives_lost += 1
            frame, _ = env.reset()
        assert (streams.observation[0] == frame).all() and streams.first[0] == terminated
    assert lives_lost == 4 and transition.terminated[0]


def test_a_step_that_ends_an_episode_keeps_the_frame_it_led_to():
    settings = EnvironmentSettings(count=2)
    streams = Streams(settings, train=False, seed=3)
    alone = make(settings, train=False)
    words = np.random.SeedSequence((3, 1, 0)).generate_state(1)
    alone.reset(seed=int(words[0]) >> 1)
    ended = False
    while not ended:
        after = streams.step(np.array([1, 2]))
        frame, _, ended, _, _ = alone.step(2)
        assert set(after.final) == set(np.flatnonzero(after.terminated | after.truncated))
    np.testing.assert_array_equal(after.final[1], frame)
    assert not np.array_equal(after.final[1], streams.observation[1])  # which opens the next episode
