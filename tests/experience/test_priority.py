"""Prioritized replay: which windows are sampled, and what goes on from one training to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_frequency import ROWS, beginnings, names, table

from wmcli.errors import UsageError
from wmcli.experience import PrioritySampler, WindowSampler, WindowTable


def sampler(seed: int = 1, **how: Any) -> PrioritySampler:
    how = {"length": 5, "minimum": 3, "share": 0.3, "temperature": 1.0} | how
    windows = WindowTable(*table(), length=how.pop("length"), minimum=how.pop("minimum"), pad="right")
    return PrioritySampler(windows, rng=np.random.default_rng(seed), **how)


@pytest.mark.parametrize(("length", "minimum"), [(1, 1), (5, 3), (5, 5), (12, 3)])
def test_its_windows_are_those_of_the_window_sampler(length: int, minimum: int) -> None:
    shape: Any = {"length": length, "minimum": minimum}
    other = WindowSampler(*table(), **shape, pad="right", sampling="windows", rng=np.random.default_rng(0))
    drawer = sampler(**shape)
    assert sorted(names(drawer.batch(drawer.windows))) == sorted(names(other.batch(other.windows)))


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_windows_of_a_batch_are_distinct_and_more_than_there_are_come_in_rounds(share: float) -> None:
    drawer = sampler(share=share)
    for _ in range(20):
        assert len(set(names(drawer.batch(10)))) == 10
    twice = names(drawer.batch(2 * drawer.windows + 3))
    assert {twice.count(name) for name in twice} == {2, 3}


def test_new_windows_come_first_and_then_those_with_a_high_loss() -> None:
    drawer = sampler(share=1.0, temperature=1e-3)
    seen: set[int] = set()
    for _ in range(drawer.windows):
        (row,) = beginnings(drawer.batch(1))
        assert row not in seen
        seen.add(int(row))
        drawer.learn(np.array([row], np.float32))
    assert list(beginnings(drawer.batch(3))) == sorted(seen)[:-4:-1]


@pytest.mark.slow
def test_probabilities_are_exponentials_of_standardized_losses() -> None:
    """Whatever the losses' unit; a hundredfold loss with the same ranks and spread changes nothing."""
    losses = np.random.default_rng(3).normal(size=ROWS)
    for factor, offset in ((1.0, 0.0), (100.0, -7.0)):
        drawer = sampler(share=1.0, temperature=0.5, length=1, minimum=1)
        everything = drawer.batch(drawer.windows)
        drawer.learn(factor * losses[beginnings(everything)] + offset)
        drawn = np.zeros(ROWS)
        for _ in range(20_000):
            drawn[beginnings(drawer.batch(1))] += 1 / 20_000
        want = np.exp(2 * (losses - losses.mean()) / losses.std())
        assert np.abs(drawn - want / want.sum()).max() < 0.015


def test_the_rest_of_a_batch_is_uniform() -> None:
    drawer = sampler(share=0.25, temperature=0.005, length=1, minimum=1)
    everything = drawer.batch(drawer.windows)
    drawer.learn(beginnings(everything))
    counts = np.zeros(ROWS)
    for _ in range(8000):
        rows = beginnings(drawer.batch(4))
        assert rows[0] == ROWS - 1
        counts[rows[1:]] += 1
    assert counts[-1] == 0
    assert np.abs(counts[:-1] / counts.sum() * (ROWS - 1) - 1).max() < 0.12


def test_it_goes_on_from_its_state_and_a_later_training_keeps_the_losses() -> None:
    drawer, losses = sampler(), iter(np.random.default_rng(0).normal(size=(20, 6)))
    for _ in range(5):
        drawer.batch(6)
        drawer.learn(next(losses))
    state = drawer.state()
    copy, later = sampler(seed=9), sampler(seed=9)
    copy.load(state)
    for each in losses:
        assert (drawer.batch(6).rows == copy.batch(6).rows).all()
        drawer.learn(each)
        copy.learn(each)
    later.continue_from(state)
    np.testing.assert_array_equal(later.state()["losses"], state["losses"])
    later.continue_from({"losses": np.array([3.0], np.float32)})  # of less experience
    later.continue_from({"rng": {}, "drawn": 4})  # of another sampling
    assert later.state()["losses"][0] == 3 and later.state()["losses"][1:].tolist() != state["losses"][:-1].tolist()
    with pytest.raises(AssertionError, match="other experience"):
        sampler(length=1, minimum=1).load(state)


def test_no_window_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UsageError, match=r"consecutive frames .*wm collect"):
        sampler(length=50, minimum=50)
