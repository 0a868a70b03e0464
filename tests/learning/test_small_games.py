"""The small games are as they are described: their returns, their rewards by chance, and frames that show all."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from scripted_players import PLAYERS, Player, random_player, returns
from small_games import DEVELOPMENT, GAMES, REFERENCES, UNSEEN, Game

from wmcli.envs.adapter import Adapted

every_game = pytest.mark.parametrize("name", GAMES)


def steps(name: str, player: Player, count: int) -> Iterator[tuple[Game, np.ndarray, float, bool]]:
    """`count` steps of a game, with a frame of 32 x 32, the reward and whether the step ended an episode."""
    env = Adapted(gymnasium.make(f"small_games:{name}-v0", disable_env_checker=True), 32)
    game = env.unwrapped
    assert isinstance(game, Game)
    env.reset(seed=0)
    for _ in range(count):
        frame, reward, ended, cut, _ = env.step(player(game))
        yield game, frame, reward, ended or cut
        if ended or cut:
            env.reset()


def shrunk(frame: np.ndarray) -> np.ndarray:
    """A frame as the quick presets see it, by areas of 2 x 2."""
    return frame.reshape(32, 2, 32, 2, 3).mean((1, 3))


def test_the_suite_is_split_in_two_and_spans_two_to_six_actions() -> None:
    assert not set(DEVELOPMENT) & set(UNSEEN)
    assert [*DEVELOPMENT, *UNSEEN] == list(GAMES) == list(REFERENCES) == list(PLAYERS)
    assert len(DEVELOPMENT) == len(UNSEEN) == 5
    assert {game.actions for game in GAMES.values()} == {2, 3, 4, 5, 6}
    assert min(game.limit for game in GAMES.values()) == 20
    assert max(game.limit for game in GAMES.values()) == 150


@pytest.mark.slow
@every_game
def test_it_can_be_won_but_not_by_chance(name: str) -> None:
    reference = REFERENCES[name]
    for player, expected in ((random_player(1), reference.random), (PLAYERS[name], reference.scripted)):
        scores = returns(GAMES[name](), player, 60)
        assert abs(scores.mean() - expected) <= 0.01 + 4 * scores.std(ddof=1) / np.sqrt(60)
    assert reference.random < 0.4 * reference.scripted
    assert reference.share(reference.random) == 0 and reference.share(reference.scripted) == 1


@pytest.mark.slow
@every_game
def test_random_play_meets_rewards_to_learn_from(name: str) -> None:
    assert sum(reward != 0 for _, _, reward, _ in steps(name, random_player(1), 5000)) >= 20


@every_game
def test_gymnasium_finds_and_accepts_it(name: str) -> None:
    with gymnasium.make(f"small_games:{name}-v0") as env:
        check_env(env.unwrapped, skip_render_check=True)


@every_game
def test_two_episodes_of_one_seed_and_the_same_actions_are_equal(name: str) -> None:
    """Whatever was played before, and another seed gives another one."""

    def episode(game: Game, seed: int) -> list[tuple[bytes, float]]:
        rng = np.random.default_rng(3)
        course = [(game.reset(seed=seed)[0].tobytes(), 0.0)]
        over = False
        while not over:
            frame, reward, ended, cut, _ = game.step(int(rng.integers(game.actions)))
            course.append((frame.tobytes(), reward))
            over = ended or cut
        return course

    game = GAMES[name]()
    first = episode(game, 5)
    assert episode(game, 6) != first
    assert episode(game, 5) == episode(GAMES[name](), 5) == first


@pytest.mark.slow
@every_game
def test_every_object_shows_in_small_frames(name: str) -> None:
    """Without any one object at least four of 32 x 32 pixels differ clearly, unless its episode is over."""
    for play in (random_player(2), PLAYERS[name]):
        for game, frame, _, over in steps(name, play, 200):
            if over:
                continue
            objects = [*game.objects()]
            assert len(objects) >= 1 and all(min(each.height, each.width) >= 4 for each in objects)
            np.testing.assert_allclose(shrunk(game.draw()), frame, rtol=0, atol=1)  # the resize rounds
            for leave in range(len(objects)):
                without = game.ground.copy()
                for top, left, height, width, color in objects[:leave] + objects[leave + 1 :]:
                    without[max(top, 0) : top + height, max(left, 0) : left + width] = color
                changed = np.abs(shrunk(without) - frame).max(-1) >= 50
                assert changed.sum() >= 4, objects[leave]


def frozen(value: object) -> object:
    """A value that can be compared and hashed, arrays included."""
    if isinstance(value, np.ndarray):
        return value.tolist().__repr__()
    return repr([frozen(each) for each in value]) if isinstance(value, list) else value


@pytest.mark.slow
@every_game
def test_two_frames_tell_the_whole_state(name: str) -> None:
    """So no game needs memory: wherever two consecutive small frames are alike, so is all that the game knows."""
    rest = {"time", "observation_space", "action_space", "_np_random", "_np_random_seed"}
    states: dict[bytes, object] = {}
    alike = 0
    for player in (random_player(4), PLAYERS[name]):
        before = None
        for game, frame, _, over in steps(name, player, 2500):
            if before is not None and not over:
                state = {key: frozen(value) for key, value in vars(game).items() if key not in rest}
                seen = before.tobytes() + frame.tobytes()
                alike += seen in states
                assert states.setdefault(seen, state) == state
            before = None if over else frame
    assert alike
