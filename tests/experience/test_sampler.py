from __future__ import annotations

import json

import numpy as np
import pytest

from wmcli.errors import UsageError
from wmcli.experience import Episodes, Windows, WindowSampler

LENGTHS = [9, 2, 4, 17, 1, 6]


def table(lengths: list[int] = LENGTHS) -> tuple[Episodes, np.ndarray]:
    """Episodes whose rows lie scattered: `order` is a permutation."""
    length = np.array(lengths, np.int64)
    order = np.random.default_rng(0).permutation(length.sum())
    return Episodes(np.cumsum(length) - length, length), order


def sampler(seed: int = 1, *, length=5, minimum=3, pad="right", sampling="windows", lengths=LENGTHS) -> WindowSampler:
    episodes, order = table(lengths)
    return WindowSampler(
        episodes, order, length=length, minimum=minimum, pad=pad, sampling=sampling, rng=np.random.default_rng(seed)
    )


def located(windows: Windows) -> list[tuple[int, tuple[int, ...], int]]:
    """Each window as (episode, its real frames, index of the first real one)."""
    episodes, order = table()
    position = np.argsort(order)
    found = []
    for rows, valid in zip(windows.rows, windows.valid, strict=True):
        places = position[rows]
        episode = np.searchsorted(episodes.start, places, side="right") - 1
        assert len(set(episode.tolist())) == 1, "a window crosses episodes"
        frames = places - episodes.start[episode[0]]
        real = frames[valid]
        assert (np.diff(real) == 1).all() and (np.diff(np.flatnonzero(valid)) == 1).all()
        nearest = np.where(np.arange(len(valid)) < np.flatnonzero(valid)[0], real[0], real[-1])
        assert (frames[~valid] == nearest[~valid]).all()
        found.append((int(episode[0]), tuple(real.tolist()), int(np.flatnonzero(valid)[0])))
    return found


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("sampling", ["windows", "episodes", "uniform"])
@pytest.mark.parametrize(("length", "minimum"), [(1, 1), (5, 3), (5, 5), (12, 3), (21, 1)])
def test_all_windows_and_no_others_are_drawn(pad: str, sampling: str, length: int, minimum: int) -> None:
    want = set()
    for episode, frames in enumerate(LENGTHS):
        for i in range(frames - minimum + 1):
            if pad == "right":  # starts at i
                want.add((episode, tuple(range(i, min(i + length, frames))), 0))
            else:  # ends with frame i + minimum - 1
                real = tuple(range(max(0, i + minimum - length), i + minimum))
                want.add((episode, real, length - len(real)))
    drawer = sampler(length=length, minimum=minimum, pad=pad, sampling=sampling)
    assert drawer.windows == len(want) == sum(max(0, frames - minimum + 1) for frames in LENGTHS)
    batch = drawer.batch(4000 if sampling == "episodes" else len(want))
    assert batch.rows.dtype == np.int64 and batch.rows.shape == batch.valid.shape == (len(batch.rows), length)
    assert set(located(batch)) == want


@pytest.mark.parametrize("pad", ["left", "right"])
def test_history_is_the_steps_before_the_sampled_window(pad: str) -> None:
    """The same windows in the same order, each with two frames more in front: where the episode begins later, its first
    frame again."""
    episodes, order = table()

    def drawn(length: int, history: int) -> Windows:
        rng = np.random.default_rng(1)
        table_of = {"length": length, "minimum": 3, "pad": pad, "history": history}
        return WindowSampler(episodes, order, sampling="windows", rng=rng, **table_of).batch(30)

    plain, longer = drawn(5, 0), drawn(7, 2)
    if pad == "right":
        assert (longer.rows[:, 2:] == plain.rows).all() and (longer.valid[:, 2:] == plain.valid).all()
    position = np.argsort(order)
    for rows, valid in zip(longer.rows, longer.valid, strict=True):
        places = position[rows]
        begin = episodes.start[np.searchsorted(episodes.start, places[0], side="right") - 1]
        first = int(np.flatnonzero(valid)[0])
        assert (places[:first] == begin).all()
        assert first == 0 or places[first] == begin
        assert (np.diff(places[first : np.flatnonzero(valid)[-1] + 1]) == 1).all()
    assert not longer.valid[:, :2].all() and longer.valid[:, :2].any()


def test_every_window_is_drawn_once_a_round_for_any_batch_size() -> None:
    drawer = sampler(pad="left")
    total = drawer.windows
    drawn = [window for _ in range(12 * total // 4) for window in located(drawer.batch(4))]
    assert len(drawn) == 12 * total
    for begin in range(0, len(drawn), total):
        assert len(set(drawn[begin : begin + total])) == total
    assert drawn[:total] != drawn[total : 2 * total]
    assert len(located(drawer.batch(3 * total + 1))) == 3 * total + 1


def chi_square(counts: np.ndarray, chance: np.ndarray) -> float:
    want = counts.sum() * chance
    return float(((counts - want) ** 2 / want).sum())


def test_the_order_of_a_round_is_uniform() -> None:
    drawer = sampler()
    total = drawer.windows
    names = sorted(set(located(sampler().batch(total))))
    first = [names.index(located(Windows(*(part[:1] for part in drawer.batch(total))))[0]) for _ in range(800)]
    freedom = total - 1
    assert chi_square(np.bincount(first, minlength=total), np.full(total, 1 / total)) < freedom + 5 * np.sqrt(
        2 * freedom
    )


def test_episodes_are_uniform_and_windows_of_one_are_uniform_in_episodes_mode() -> None:
    minimum = 3
    windows = located(sampler(sampling="episodes", minimum=minimum).batch(20_000))
    usable = [episode for episode, frames in enumerate(LENGTHS) if frames >= minimum]
    names = [(episode, i) for episode in usable for i in range(LENGTHS[episode] - minimum + 1)]
    chance = np.array([1 / len(usable) / (LENGTHS[episode] - minimum + 1) for episode, _ in names])
    counts = np.zeros(len(names))
    for episode, real, _ in windows:
        counts[names.index((episode, real[0]))] += 1
    freedom = len(names) - 1
    bound = freedom + 5 * np.sqrt(2 * freedom)
    assert chi_square(counts, chance) < bound
    assert chi_square(counts, np.full(len(names), 1 / len(names))) > 10 * bound  # and not uniform over windows


def test_uniform_batches_are_distinct_in_themselves_and_know_nothing_of_each_other() -> None:
    drawer = sampler(sampling="uniform")
    total = drawer.windows
    names = sorted(set(located(sampler().batch(total))))
    counts = np.zeros(total)
    again = 0
    before: set[object] = set()
    for _ in range(2000):
        batch = located(drawer.batch(7))
        assert len(set(batch)) == 7
        again += len(before & set(batch))
        before = set(batch)
        for window in batch:
            counts[names.index(window)] += 1
    freedom = total - 1
    assert chi_square(counts, np.full(total, 1 / total)) < freedom + 5 * np.sqrt(2 * freedom)
    assert abs(again / 1999 - 49 / total) < 0.1  # two batches share 7 * 7 / W windows on average: here 1.8


def test_a_uniform_batch_larger_than_there_are_windows_has_each_once_a_round() -> None:
    drawer = sampler(sampling="uniform")
    total = drawer.windows
    for size in (total, 2 * total, 2 * total + 3):
        names, counts = np.unique(drawer.batch(size).rows, axis=0, return_counts=True)
        assert len(names) == total and counts.sum() == size
        assert counts.min() == size // total and counts.max() == -(-size // total)


def test_unknown_sampling_is_refused() -> None:
    with pytest.raises(AssertionError, match="unknown sampling dfs"):
        sampler(sampling="dfs")


def test_training_further_starts_the_rounds_anew() -> None:
    drawer = sampler(seed=7)
    drawer.continue_from(sampler(seed=1).state())
    assert (drawer.batch(9).rows == sampler(seed=7).batch(9).rows).all()


@pytest.mark.parametrize("sampling", ["windows", "episodes", "uniform"])
@pytest.mark.parametrize("before", [0, 1, 4, 5, 11])
def test_a_resumed_sampler_draws_the_same_batches(sampling: str, before: int) -> None:
    drawer = sampler(sampling=sampling)
    for _ in range(before):
        drawer.batch(6)
    state = json.loads(json.dumps(drawer.state()))
    want = [drawer.batch(6) for _ in range(12)]
    resumed = sampler(seed=99, sampling=sampling)
    resumed.batch(7)
    resumed.load(state)
    for batch in want:
        got = resumed.batch(6)
        assert (got.rows == batch.rows).all() and (got.valid == batch.valid).all()
    assert resumed.state() == drawer.state()


def test_seeds_matter() -> None:
    assert (sampler(1).batch(20).rows == sampler(1).batch(20).rows).all()
    assert (sampler(1).batch(20).rows != sampler(2).batch(20).rows).any()


@pytest.mark.parametrize("lengths", [[], [2, 1, 2]])
def test_no_window_is_an_error_with_a_remedy(lengths: list[int]) -> None:
    with pytest.raises(
        UsageError, match=rf"no 3 consecutive frames \(the longest sequence has {max(lengths, default=0)}\).*wm collect"
    ):
        sampler(lengths=lengths)


def test_a_state_of_other_experience_is_not_loaded() -> None:
    with pytest.raises(AssertionError, match="other experience"):
        sampler(lengths=[4, 5]).load(sampler().state())
