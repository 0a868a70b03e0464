from __future__ import annotations

import gymnasium
import numpy as np
import pytest

import wmcli.envs  # noqa: F401  registers wm/Catch-v0
from wmcli.envs.adapter import Adapted
from wmcli.envs.catch import BACKGROUND, BALL_COLOR, CELL, CELLS, PADDLE_COLOR, Catch


def places(frame: np.ndarray) -> tuple[tuple[int, int], list[int]]:
    """(row, column) of the ball and the columns of the paddle, read off the picture alone."""
    cells = frame[CELL // 2 :: CELL, CELL // 2 :: CELL]
    row, column = np.argwhere((cells == BALL_COLOR).all(-1))[0].tolist()
    return (row, column), np.flatnonzero((cells[-1] == PADDLE_COLOR).all(-1)).tolist()


def play(env: gymnasium.Env, seed: int, policy) -> tuple[float, int, int]:
    """Return, length and start column of one episode."""
    frame, _ = env.reset(seed=seed)
    start = places(frame)[0][1]
    rewards, ended = [], False
    while not ended:
        frame, reward, ended, truncated, _ = env.step(policy(frame))
        assert not truncated
        rewards.append(reward)
    assert not any(rewards[:-1])
    return sum(rewards), len(rewards), start


def follow_the_ball(frame: np.ndarray) -> int:
    (_, column), paddle = places(frame)
    return 1 if column in paddle else (0 if column < paddle[0] else 2)


def test_following_the_ball_always_wins_from_every_column() -> None:
    results = [play(Catch(), seed, follow_the_ball) for seed in range(80)]
    assert {result for result, _, _ in results} == {1.0}
    assert {length for _, length, _ in results} == {CELLS - 1}
    assert {start for _, _, start in results} == set(range(CELLS))


@pytest.mark.parametrize("weights", [(1, 1, 1), (5, 1, 0)])
def test_a_blind_policy_earns_minus_one_half(weights: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    chances = np.array(weights) / sum(weights)
    returns = [play(Catch(), seed, lambda _: rng.choice(3, p=chances))[0] for seed in range(500)]
    assert abs(np.mean(returns) + 0.5) < 4 * 0.87 / np.sqrt(500)  # 0.87: deviation of a single return


def test_frames_stay_clean_when_shrunk_and_two_episodes_of_one_seed_are_equal() -> None:
    env = Adapted(gymnasium.make("wm/Catch-v0"), 32)
    assert env.parts[0].resizing == "box"
    frame, _ = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert frame.shape == (32, 32, 3) and (frame == again).all()
    colors = {tuple(color) for color in frame.reshape(-1, 3).tolist()}
    assert colors == {BACKGROUND, BALL_COLOR, PADDLE_COLOR}
    assert len({env.reset(seed=seed)[0].tobytes() for seed in range(40)}) == CELLS
