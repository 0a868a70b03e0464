"""Dynamic frequency-based sampling: scores, exact draws, and what is counted where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from wmcli.errors import UsageError
from wmcli.experience import Episodes, FrequencySampler, Windows, WindowSampler
from wmcli.experience.frequency import draw, dynamics_scores, imagination_scores
from wmcli.training.settings import FrequencySettings

# The worked example: six rows, v and b; batches of 16 and 1024.
V = np.array([20, 15, 10, 5, 0, 0])
B = np.array([640, 640, 1920, 640, 640, 0])
RATIO = 16 / 1024


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.fixture(autouse=True)
def floating_point_errors_are_errors() -> Iterator[None]:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        yield


# -- scores and draws -------------------------------------------------------------------------------------------------


def test_worked_example() -> None:
    for temperature, want in [
        (10.0, [0.0406, 0.0669, 0.1104, 0.1820, 0.3000, 0.3000]),
        (1.0, [1.027e-9, 1.524e-7, 2.262e-5, 0.00336, 0.4983, 0.4983]),
    ]:
        np.testing.assert_allclose(softmax(dynamics_scores(V, temperature)), want, rtol=2e-3)
    scores = imagination_scores(V, B, RATIO, 1.0, 1.0, 10.0)
    np.testing.assert_allclose(scores, np.array([0, 0, -20, -5, -10, 0]) / 10)
    np.testing.assert_allclose(softmax(scores), [0.2433, 0.2433, 0.0329, 0.1476, 0.0895, 0.2433], rtol=2e-3)
    unscaled = softmax(imagination_scores(V, B, 1.0, 1.0, 1.0, 1.0))
    assert unscaled[5] == 1.0 and unscaled[:5].max() < 1e-200


def test_imagination_scores_are_their_formula() -> None:
    got = imagination_scores(V.astype(np.int32), B.astype(np.int32), 0.03, 0.7, 0.4, 3.0)
    want = [(v - 0.7 * 0.03 * b - 0.4 * max(0.0, v - 0.03 * b)) / 3.0 for v, b in zip(V, B, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-14)
    assert got.dtype == dynamics_scores(V.astype(np.int32), 3.0).dtype == np.float64


@pytest.mark.parametrize(
    "scores",
    [dynamics_scores(V, 10.0), imagination_scores(V, B, RATIO, 1.0, 1.0, 10.0), np.zeros(6)],
    ids=["dynamics", "imagination", "uniform"],
)
def test_single_draws_have_the_frequencies_of_the_softmax(scores: np.ndarray) -> None:
    n, rng = 100_000, np.random.default_rng(0)
    counts = np.bincount([draw(scores, 1, rng)[0] for _ in range(n)], minlength=6)
    chance = softmax(scores)
    assert (np.abs(counts - n * chance) < 3 * np.sqrt(n * chance * (1 - chance))).all()


def test_two_are_drawn_one_after_the_other_without_replacement() -> None:
    n, rng = 30_000, np.random.default_rng(1)
    scores = np.array([0.0, 1.0, -1.0, 0.5])
    p = softmax(scores)
    counts = np.zeros((4, 4))
    for _ in range(n):
        counts[tuple(draw(scores, 2, rng))] += 1
    chance = p[:, None] * p / (1 - p[:, None])
    assert (np.diag(counts) == 0).all()
    off = ~np.eye(4, dtype=bool)
    assert (np.abs(counts - n * chance)[off] < 3.5 * np.sqrt(n * chance * (1 - chance))[off]).all()


@pytest.mark.parametrize("count", [1, 2, 16, 63, 64])
def test_samples_are_distinct(count: int) -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        drawn = draw(dynamics_scores(rng.integers(1000, size=64), 10.0), count, rng)
        assert drawn.dtype == np.int64 and len(set(drawn.tolist())) == len(drawn) == count


@pytest.mark.parametrize("count", [5, 7, 10, 23])
def test_too_few_candidates_come_once_a_round_and_the_rest_is_drawn(count: int) -> None:
    rng = np.random.default_rng(3)
    counts = np.zeros(5, int)
    for _ in range(200):
        each = np.bincount(draw(np.array([0.0, 0.0, 0.0, 0.0, 9.0]), count, rng), minlength=5)
        assert each.sum() == count and each.min() == count // 5 and each.max() == -(-count // 5)
        counts += each
    if count % 5:
        assert counts[4] > 195 * (count // 5 + 1)  # the rest goes by score


def test_large_counters_neither_overflow_nor_lose_their_differences() -> None:
    """v = 1e6 at temperature 10: exp(-v / 10) would be 0 for all, exp(v / 10) infinite."""
    n, rng = 20_000, np.random.default_rng(4)
    v = np.array([1_000_000, 1_000_010, 3_000_000])
    scores = dynamics_scores(v, 10.0)
    counts = np.bincount([draw(scores, 1, rng)[0] for _ in range(n)], minlength=3)
    chance = 1 / (1 + np.exp(-1))
    assert counts[2] == 0 and abs(counts[0] - n * chance) < 3 * np.sqrt(n * chance * (1 - chance))
    opposite = imagination_scores(v, np.array([1_000_000, 0, 9_000_000]), 1.0, 1.0, 1.0, 10.0)
    assert opposite.tolist() == [0.0, 0.0, -600_000.0] and sorted(draw(opposite, 2, rng).tolist()) == [0, 1]


# -- the sampler ------------------------------------------------------------------------------------------------------

LENGTHS = [9, 2, 4, 17, 1, 6]
ROWS = sum(LENGTHS)
SHARP = FrequencySettings(
    temperature=0.01, imagination_temperature=0.01
)  # draws the best scores for all practical ends


def table(lengths: list[int] = LENGTHS) -> tuple[Episodes, np.ndarray]:
    """Runs whose rows lie scattered: `order` is a permutation."""
    length = np.array(lengths, np.int64)
    order = np.random.default_rng(0).permutation(length.sum())
    return Episodes(np.cumsum(length) - length, length), order


def sampler(seed: int = 1, *, lengths: list[int] = LENGTHS, **how: Any) -> FrequencySampler:
    defaults = {"length": 5, "minimum": 3, "pad": "right", "kind": "dynamics", "settings": FrequencySettings()}
    return FrequencySampler(*table(lengths), rng=np.random.default_rng(seed), **{**defaults, "ratio": 1.0, **how})


def beginnings(windows: Windows) -> np.ndarray:
    """The row of each window's first real frame."""
    return windows.rows[np.arange(len(windows.rows)), windows.valid.argmax(1)]


def names(windows: Windows) -> list[bytes]:
    return [rows.tobytes() + valid.tobytes() for rows, valid in zip(windows.rows, windows.valid, strict=True)]


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize(("length", "minimum"), [(1, 1), (5, 3), (5, 5), (12, 3)])
def test_its_windows_are_those_of_the_window_sampler(pad: str, length: int, minimum: int) -> None:
    shape: Any = {"length": length, "minimum": minimum, "pad": pad}
    other = WindowSampler(*table(), **shape, sampling="windows", rng=np.random.default_rng(0))
    drawer = sampler(**shape)
    assert drawer.windows == other.windows
    batch = drawer.batch(drawer.windows)
    assert batch.rows.dtype == np.int64 and batch.rows.shape == batch.valid.shape == (drawer.windows, length)
    assert sorted(names(batch)) == sorted(names(other.batch(other.windows)))


@pytest.mark.parametrize("kind", ["dynamics", "imagination"])
@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("size", [1, 7, 26, 60])
def test_each_window_drawn_counts_once_at_its_first_real_frame(kind: str, pad: str, size: int) -> None:
    """Padded on the left, the first windows of an episode begin at the same frame and share a counter."""
    drawer = sampler(pad=pad, kind=kind, trained=None if kind == "dynamics" else np.arange(ROWS))
    want = np.zeros(ROWS, np.int64)
    for _ in range(20):
        np.add.at(want, beginnings(drawer.batch(size)), 1)
        counts = drawer.state()["counts"]
        assert counts.dtype == np.int64 and (counts == want).all()
    assert want.sum() == 20 * size


def test_windows_of_a_batch_are_distinct() -> None:
    drawer = sampler(pad="left")
    for _ in range(50):
        assert len(set(names(drawer.batch(20)))) == 20


@pytest.mark.parametrize("kind", ["dynamics", "imagination"])
def test_a_batch_is_drawn_by_the_scores_of_the_rows_its_windows_begin_at(kind: str) -> None:
    of = FrequencySettings(temperature=2.0, imagination_temperature=3.0, alpha=0.7, beta=0.2)
    trained = np.random.default_rng(5).integers(9, size=ROWS) if kind == "imagination" else None
    how: Any = {"length": 1, "minimum": 1, "kind": kind, "settings": of, "ratio": 0.3, "trained": trained}
    drawer, rng, order = sampler(**how), np.random.default_rng(1), table()[1]
    counts = np.zeros(ROWS, np.int64)
    for _ in range(30):
        scores = dynamics_scores(counts, 2.0)
        if trained is not None:
            scores = imagination_scores(trained, counts, 0.3, 0.7, 0.2, 3.0)
        rows = order[draw(scores[order], 9, rng)]
        assert (drawer.batch(9).rows[:, 0] == rows).all()
        counts[rows] += 1


def test_a_sharp_temperature_draws_every_window_once_a_round() -> None:
    drawer = sampler(length=3, settings=SHARP)
    total = drawer.windows
    assert total == sum(max(0, frames - 2) for frames in LENGTHS)
    for k in range(1, 5 * total + 1):
        drawer.batch(1)
        counts = drawer.state()["counts"]
        assert counts.max() == -(-k // total) and np.sort(counts)[-total:].min() == k // total


def test_the_temperature_matters() -> None:
    """After many draws of one window at a time, counters differ the more the higher the temperature."""
    spread = []
    for temperature in (0.01, 5.0, 1e9):
        drawer = sampler(settings=FrequencySettings(temperature=temperature, imagination_temperature=0.01), minimum=5)
        for _ in range(2000):
            drawer.batch(1)
        spread.append(drawer.state()["counts"][drawer.state()["counts"] > 0].std())
    assert spread[0] <= 0.5 < spread[1] < spread[2]


@pytest.mark.parametrize("ratio", [1.0, 0.25])
def test_imagination_prefers_trained_rows_until_they_are_used_up(ratio: float) -> None:
    """Rows with v = 0 are drawn once, those with v = 1 until ratio * b is above 1; then all are equal again."""
    _, order = table([12])
    trained = np.zeros(12, np.int32)
    trained[order[:4]] = 1
    drawer = sampler(
        lengths=[12], length=1, minimum=1, kind="imagination", trained=trained, ratio=ratio, settings=SHARP
    )
    uses = round(1 / ratio)  # of a row until ratio * b = 1 = v
    drawn = [beginnings(drawer.batch(1))[0] for _ in range(12 + 4 * uses)]
    counts = np.bincount(drawn, minlength=12)[order]
    assert (counts[:4] == uses + 1).all() and (counts[4:] == 1).all()
    assert trained[order].tolist() == [1] * 4 + [0] * 8
    assert sorted(beginnings(drawer.batch(1))[0] for _ in range(12)) == list(range(12))


def test_rows_that_the_dynamics_model_did_not_know_count_nothing() -> None:
    short, full = np.arange(20), np.concatenate([np.arange(20), np.zeros(ROWS - 20, int)])
    batches = [
        sampler(kind="imagination", trained=trained).batch(20).rows
        for trained in (short, full, np.concatenate([full, [7, 7]]))
    ]
    assert (batches[0] == batches[1]).all() and (batches[1] == batches[2]).all()


def test_windows_may_run_over_the_ends_of_episodes() -> None:
    """Given streams, every window is full; the window that begins with the last frames of an episode exists."""
    drawer = sampler(lengths=[30], length=8, minimum=8)
    batch = drawer.batch(drawer.windows)
    assert drawer.windows == 23 and batch.valid.all()
    assert sorted(beginnings(batch).tolist()) == sorted(table([30])[1][:23].tolist())


@pytest.mark.parametrize("lengths", [[], [2, 1, 2]])
def test_no_window_is_an_error_with_a_remedy(lengths: list[int]) -> None:
    with pytest.raises(UsageError, match=r"no 3 consecutive frames .*wm collect"):
        sampler(lengths=lengths)


def test_imagination_needs_training_counts_and_dynamics_does_not() -> None:
    for kind, trained in [("imagination", None), ("dynamics", np.zeros(ROWS))]:
        with pytest.raises(AssertionError, match="imagination needs the counters"):
            sampler(kind=kind, trained=trained)


# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamics", "imagination"])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_resumed_sampler_draws_the_same_batches(kind: str, before: int) -> None:
    how: Any = {"kind": kind, "trained": None if kind == "dynamics" else np.arange(ROWS), "ratio": 0.5}
    drawer = sampler(**how)
    for _ in range(before):
        drawer.batch(6)
    state = drawer.state()
    plain = json.loads(json.dumps({key: value for key, value in state.items() if key != "counts"}))
    want = [drawer.batch(6) for _ in range(12)]
    assert state["counts"].sum() == 6 * before  # a state does not go on with the sampler that gave it
    resumed = sampler(seed=99, **how)
    resumed.batch(7)
    resumed.load({**plain, "counts": state["counts"]})
    for batch in want:
        got = resumed.batch(6)
        assert (got.rows == batch.rows).all() and (got.valid == batch.valid).all()
    assert state["counts"].sum() == 6 * before
    ours, theirs = resumed.state(), drawer.state()
    assert (ours.pop("counts") == theirs.pop("counts")).all() and ours == theirs


@pytest.mark.parametrize("lengths", [[4, 5], [*LENGTHS, 2]])
def test_a_state_of_other_experience_is_not_loaded(lengths: list[int]) -> None:
    with pytest.raises(AssertionError, match="other experience"):
        sampler(lengths=lengths).load(sampler().state())


def test_training_further_keeps_the_counts_and_begins_new_rows_at_nothing() -> None:
    first = sampler()
    for _ in range(30):
        first.batch(6)
    counts = first.state()["counts"]
    grown = sampler(seed=2, lengths=[*LENGTHS, 8])
    grown.continue_from(first.state())
    state = grown.state()
    assert (state["counts"][:ROWS] == counts).all() and (state["counts"][ROWS:] == 0).all()
    assert len(state["counts"]) == ROWS + 8
    assert state["rng"] == sampler(seed=2).state()["rng"]  # its own draws, not those of before once more
    less = sampler(lengths=LENGTHS[:4])
    less.continue_from(first.state())
    assert (less.state()["counts"] == counts[: sum(LENGTHS[:4])]).all()
    grown.batch(5)
    assert (first.state()["counts"] == counts).all()


def test_new_rows_are_drawn_first_by_a_sampler_that_goes_on() -> None:
    first = sampler(settings=SHARP, minimum=5)
    for _ in range(10):
        first.batch(first.windows)
    grown = sampler(settings=SHARP, minimum=5, lengths=[*LENGTHS, 8])
    grown.continue_from(first.state())
    new = {beginnings(grown.batch(1))[0] for _ in range(4)}
    counts = np.zeros(ROWS + 8, np.int64)
    counts[:ROWS] = first.state()["counts"]
    assert all(counts[row] == 0 for row in new) and len(new) == 4


def test_after_a_sampler_that_did_not_count_all_counts_are_nothing() -> None:
    other = WindowSampler(*table(), length=5, minimum=3, pad="right", sampling="windows", rng=np.random.default_rng(0))
    drawer = sampler()
    drawer.continue_from(other.state())
    assert not drawer.state()["counts"].any()
