"""The small games are what they say: their best and their random returns, and frames that show what matters."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
import small_games
from gymnasium.utils.env_checker import check_env


def walk(game: small_games.Reach) -> int:
    down, right = game.goal - game.player
    return (0 if right > 0 else 2) if right else (1 if down > 0 else 3)


def follow(game: small_games.Bounce) -> int:
    return 1 + int(np.sign(round((game.ball[1] - game.paddle - 7) / 5)))


def flee(game: small_games.Dodge) -> int:
    """The first move into a column on which no rock falls next, and which is not a corner to be trapped in."""
    near = {int(column) for row, column in game.rocks if row >= 5}
    for action in (1, 0, 2):
        to = min(max(game.player + action - 1, 0), 7)
        if to not in near:
            return action
    return 1


def returns(game: small_games.Game, policy: Callable[[small_games.Game], int], episodes: int) -> list[float]:
    totals = []
    for seed in range(episodes):
        game.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, ended, cut, _ = game.step(policy(game))
            total, over = total + reward, ended or cut
        totals.append(total)
    return totals


@pytest.mark.parametrize(
    ("game", "good", "random_between", "good_at_least"),
    [
        (small_games.Reach, walk, (0.25, 0.45), 1.0),
        (small_games.Bounce, follow, (-0.8, -0.2), 2.0),
        (small_games.Dodge, flee, (2.3, 4.3), 10.0),
    ],
)
def test_a_game_can_be_won_but_not_by_chance(game, good, random_between, good_at_least) -> None:
    rng = np.random.default_rng(0)
    by_chance = np.mean(returns(game(), lambda each: int(rng.integers(each.actions)), 200))
    assert random_between[0] < by_chance < random_between[1]
    assert np.mean(returns(game(), good, 50)) >= good_at_least


@pytest.mark.parametrize("name", ["Reach", "Bounce", "Dodge"])
def test_gymnasium_finds_and_accepts_it(name: str) -> None:
    with gymnasium.make(f"small_games:{name}-v0") as env:
        check_env(env.unwrapped, skip_render_check=True)
