from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest

import wmcli.envs  # noqa: F401  registers wm/Catch-v0
from wmcli.envs.catch import BACKGROUND, BALL_COLOUR, CELL, CELLS, PADDLE, PADDLE_COLOUR, Catch
from wmcli.envs.frames import Frames


def places(frame: np.ndarray) -> tuple[tuple[int, int], list[int]]:
    """(row, column) of the ball and the columns of the paddle, read off the picture alone."""
    (ball,) = balls(frame)
    return ball, paddle(frame)


def balls(frame: np.ndarray) -> list[tuple[int, int]]:
    """(row, column) of every ball that is drawn."""
    return [(row, column) for row, column in np.argwhere((cells(frame) == BALL_COLOUR).all(-1)).tolist()]


def paddle(frame: np.ndarray) -> list[int]:
    """The columns of the paddle that no ball covers."""
    return np.flatnonzero((cells(frame)[-1] == PADDLE_COLOUR).all(-1)).tolist()


def cells(frame: np.ndarray) -> np.ndarray:
    return frame[CELL // 2 :: CELL, CELL // 2 :: CELL]


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
    (_, column), under = places(frame)
    return towards(column, under)


def towards(column: int, under: list[int]) -> int:
    return 1 if column in under else (0 if column < under[0] else 2)


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
    env = Frames(gymnasium.make("wm/Catch-v0"), 32)
    assert env.resizing == "box"
    frame, _ = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert frame.shape == (32, 32, 3) and (frame == again).all()
    colours = {tuple(colour) for colour in frame.reshape(-1, 3).tolist()}
    assert colours == {BACKGROUND, BALL_COLOUR, PADDLE_COLOUR}
    assert len({env.reset(seed=seed)[0].tobytes() for seed in range(40)}) == CELLS


# -- hidden -----------------------------------------------------------------------------------------------------------

MIDDLE = (CELLS - PADDLE) // 2
LAST = CELLS - PADDLE  # the paddle's leftmost cell at the right wall


def hidden() -> gymnasium.Env:
    return gymnasium.make("wm/HiddenCatch-v0")


def test_a_hidden_ball_is_seen_in_the_first_frame_alone_and_falls_as_any_other() -> None:
    env, open_env = hidden(), Catch()
    rng = np.random.default_rng(0)
    for seed in range(20):
        frame, want = env.reset(seed=seed)[0], open_env.reset(seed=seed)[0]
        assert (frame == want).all() and len(balls(frame)) == 1
        ended = False
        while not ended:
            action = int(rng.integers(3))
            frame, reward, ended, _, _ = env.step(action)
            want, reward_of_open, ended_of_open, _, _ = open_env.step(action)
            assert balls(frame) == [] and len(paddle(frame)) == PADDLE
            assert (reward, ended) == (reward_of_open, ended_of_open)
            ((row, column),) = balls(want)
            want[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = (
                PADDLE_COLOUR if row == CELLS - 1 and column in paddle(frame) else BACKGROUND
            )
            assert (frame == want).all()


def test_perfect_memory_always_catches_the_hidden_ball() -> None:
    remembered = 0

    def policy(frame: np.ndarray) -> int:
        nonlocal remembered
        if balls(frame):
            remembered = places(frame)[0][1]
        return towards(remembered, paddle(frame))

    results = [play(hidden(), seed, policy) for seed in range(80)]
    assert {result for result, _, _ in results} == {1.0}
    assert {start for _, _, start in results} == set(range(CELLS))


def landings(moves: tuple[int, ...]) -> list[int]:
    """Where the paddle ends after a first move left, stay, right, when from then on its place p alone decides:
    action `moves[p]`, for the CELLS - 2 steps that are left."""
    ends = []
    for first in (-1, 0, 1):
        place = MIDDLE + first
        for _ in range(CELLS - 2):
            place = min(max(place + moves[place] - 1, 0), LAST)
        ends.append(place)
    return ends


def test_without_memory_six_of_eight_columns_are_caught_at_best() -> None:
    """All 3^7 ways to move by the paddle's place alone, each with the best first move for every column. Chances help
    nobody: a column's chance of being caught is the best of 3, so the sum over columns is at most that of 3 paddles."""
    caught: dict[tuple[int, ...], dict[int, int]] = {}  # of each policy: for each column it can catch, the first move
    for moves in itertools.product(range(3), repeat=LAST + 1):
        ends = landings(moves)
        caught[moves] = {end + cell: first for first, end in enumerate(ends) for cell in range(PADDLE)}
    best = max(caught, key=lambda moves: len(caught[moves]))
    assert len(caught[best]) == 3 * PADDLE == 6

    def policy(frame: np.ndarray) -> int:
        if balls(frame):
            return caught[best].get(places(frame)[0][1], 1)
        return best[paddle(frame)[0]]

    by_column = {start: result for result, _, start in (play(hidden(), seed, policy) for seed in range(80))}
    assert len(by_column) == CELLS and np.mean(list(by_column.values())) == 2 * 6 / 8 - 1 == 0.5
