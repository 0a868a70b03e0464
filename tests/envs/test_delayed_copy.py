from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from wmcli.envs import EnvironmentSettings, make
from wmcli.envs.delayed_copy import BACKGROUND, COLOR, DELAY, DELAYED_COPY_ID, SIGNS, STEPS


def sign(frame: np.ndarray) -> int:
    """Read off the picture alone."""
    columns = [(part == COLOR).all() for part in np.split(frame, SIGNS, axis=1)]
    dark = [(part == BACKGROUND).all() for part in np.split(frame, SIGNS, axis=1)]
    assert sum(columns) == 1 and sum(dark) == SIGNS - 1
    return columns.index(True)


def play(seed: int, delay: int) -> tuple[float, int, list[int]]:
    """Return and length when the sign of `delay` frames before is copied, and the signs."""
    env = gymnasium.make(DELAYED_COPY_ID)
    frame, _ = env.reset(seed=seed)
    signs, total, ended = [sign(frame)], 0.0, False
    while not ended:
        action = signs[-1 - delay] if len(signs) > delay else 1
        frame, reward, terminated, ended, _ = env.step(action)
        assert not terminated
        signs.append(sign(frame))
        total += reward
    return total, len(signs) - 1, signs


def test_who_remembers_long_enough_gets_all_and_others_a_third() -> None:
    results = [play(seed, DELAY) for seed in range(20)]
    assert {total for total, _, _ in results} == {STEPS - DELAY == 17 and 17.0}
    assert {length for _, length, _ in results} == {STEPS}
    for delay in (0, 1, 2, 4):
        totals = [play(seed, delay)[0] for seed in range(200)]
        assert np.mean(totals) == pytest.approx(17 / 3, abs=0.5)


def test_signs_are_even_independent_and_follow_from_the_seed() -> None:
    signs = np.array([play(seed, 0)[2] for seed in range(400)])
    np.testing.assert_allclose(np.bincount(signs.ravel()) / signs.size, 1 / 3, atol=0.02)
    for lag in (1, 2, 3):
        assert (signs[:, lag:] == signs[:, :-lag]).mean() == pytest.approx(1 / 3, abs=0.02)
    assert play(7, 1) == play(7, 1)


def test_it_is_played_as_any_other() -> None:
    env = make(EnvironmentSettings(id=DELAYED_COPY_ID, size=24), train=True)
    frame, _ = env.reset(seed=0)
    assert frame.shape == (24, 24, 3) and len(np.unique(frame.reshape(-1, 3), axis=0)) == 2
