"""Statistics against published tables, against cases known by hand, and against each other."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from wmcli.errors import UsageError
from wmcli.metrics import atari, statistics

# mean, median, IQM, optimality gap, games at human level: Cohen et al. 2024, tables 1 (26 games) and 9 (8 games)
PUBLISHED = {
    "SimPLe": (0.332, 0.134, 0.130, 0.729, 1),
    "DreamerV3": (1.124, 0.485, 0.487, 0.510, 9),
    "TWM": (0.956, 0.505, 0.459, 0.513, 8),
    "STORM": (1.222, 0.425, 0.561, 0.472, 9),
    "IRIS": (1.046, 0.289, 0.501, 0.512, 10),
    "REM": (1.222, 0.280, 0.673, 0.482, 12),
    "REM-separate-wm-embeddings": (1.778, 1.821, 1.794, 0.214, 6),
    "REM-4x4-tokenizer": (1.341, 1.384, 1.026, 0.289, 4),
    "REM-no-latent-ac": (1.340, 1.357, 1.234, 0.261, 5),
    "REM-no-action-input": (1.571, 1.699, 1.535, 0.208, 6),
}
EIGHT_GAMES = {  # the columns of table 9 whose runs cover all 26 games
    "REM": (1.947, 2.339, 2.201, 0.198, 6),
    "IRIS": (1.564, 1.130, 1.191, 0.298, 5),
    "REM-no-pop": (2.357, 2.221, 2.068, 0.209, 6),
}


def value(name, scores):
    return float(statistics.STATISTICS[name](statistics.by_task(scores)))


def improvement(ours, theirs):
    return statistics.bootstrap_improvement(ours, theirs, np.random.default_rng(0), repetitions=1).value


def every(scores):
    return tuple(value(name, scores) for name in statistics.STATISTICS)


def eight(column):
    games = atari.normalized_runs("REM-4x4-tokenizer")
    return {game: runs for game, runs in atari.normalized_runs(column).items() if game in games}


@pytest.mark.parametrize("column", PUBLISHED)
def test_the_published_aggregates(column):
    assert every(atari.normalized_runs(column)) == pytest.approx(PUBLISHED[column], abs=6e-4)


@pytest.mark.parametrize("column", EIGHT_GAMES)
def test_the_published_aggregates_over_eight_games(column):
    assert every(eight(column)) == pytest.approx(EIGHT_GAMES[column], abs=6e-4)


def test_the_published_mean_and_median_of_columns_without_runs():
    # Ye et al.; De Dios Allegue et al., table 1
    for column, expected in {
        "EfficientZero": (1.943, 1.090),
        "MuZero": (0.4422, 0.1295),
        "UniZero": (0.1270, 0.0525),
        "UniZero-adaptive": (0.0897, 0.0404),
        "UniZero-gaussian": (0.2345, 0.1021),
        "UniZero-gaussian-adaptive": (0.0035, 0.0160),
    }.items():
        assert every(atari.normalized_runs(column))[:2] == pytest.approx(expected, abs=6e-4), column


@pytest.mark.parametrize(
    ("column", "expected"), [("IRIS", 0.594), ("TWM", 0.555), ("SimPLe", 0.793), ("DreamerV3", 0.495)]
)
def test_the_published_probability_of_improvement(column, expected):
    rem, other = atari.normalized_runs("REM"), atari.normalized_runs(column)
    assert improvement(rem, other) == pytest.approx(expected, abs=6e-4)
    assert improvement(other, rem) == pytest.approx(1 - expected, abs=6e-4)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("REM-no-pop", 0.530),
        ("REM-no-latent-ac", 0.790),
        ("REM-no-action-input", 0.675),
        ("REM-4x4-tokenizer", 0.765),
        ("REM-separate-wm-embeddings", 0.665),
        ("IRIS", 0.755),
    ],
)
def test_the_published_probability_of_improvement_over_the_ablations(column, expected):
    assert improvement(eight("REM"), eight(column)) == pytest.approx(expected, abs=6e-4)


def test_cases_known_by_hand():
    scores = {"a": [0.0, 2.0], "b": [1.0, 1.0, 4.0], "c": [10.0]}
    assert statistics.mean(scores) == pytest.approx((1 + 2 + 10) / 3)
    assert statistics.median(scores) == 2
    assert value("iqm", scores) == pytest.approx((1 + 1 + 2 + 4) / 4)  # 0 and 10 are dropped of six
    assert value("optimality_gap", scores) == pytest.approx(1 - 5 / 6)
    assert improvement([[3.0, 1.0]], [[1.0, 2.0]]) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert value("iqm", [[7.0]]) == 7  # fewer than four values: nothing to trim


def test_the_three_spellings_agree():
    table = np.random.default_rng(1).normal(size=(4, 7))  # runs, tasks
    by_name = {f"game {task}": table[:, task] for task in range(7)}
    assert every(table) == every(by_name) == every([list(column) for column in table.T])
    assert statistics.mean(table) == pytest.approx(table.mean())


def test_the_order_of_runs_and_tasks_does_not_matter():
    rng = np.random.default_rng(2)
    table = rng.normal(size=(5, 6))
    assert every(rng.permuted(table, axis=0)[:, rng.permutation(6)]) == pytest.approx(every(table))


def test_tasks_are_matched_by_name():
    ours, theirs = {"a": [1.0], "b": [5.0]}, {"b": [6.0], "a": [0.0]}
    assert improvement(ours, theirs) == 0.5
    with pytest.raises(UsageError, match="only one of them has: c"):
        improvement(ours, {**theirs, "c": [1.0]})
    with pytest.raises(UsageError, match="different tasks"):
        improvement([[1.0]], [[1.0], [2.0]])


@pytest.mark.parametrize("scores", [{}, [], {"Pong": []}, {"Pong": [1.0, np.nan]}, np.ones(3), [[[1.0]]]])
def test_unusable_scores_are_refused(scores):
    with pytest.raises(UsageError):
        statistics.mean(scores)


def test_performance_profile_counts_scores_strictly_above():
    profile = statistics.performance_profile([[0.0, 1.0], [2.0, 2.0, 3.0]], [-1.0, 0.0, 2.0, 3.0])
    np.testing.assert_allclose(profile.value, [1.0, 0.8, 0.2, 0.0])
    assert profile.low is None and profile.high is None


def test_performance_profile_band_holds_the_profile_and_agrees_with_a_plain_bootstrap():
    scores, taus = atari.normalized_runs("REM"), np.array([0.1, 0.5, 1.7])
    profile = statistics.performance_profile(scores, taus, np.random.default_rng(3), repetitions=1500)
    assert (profile.low <= profile.value).all() and (profile.value <= profile.high).all()
    rng = np.random.default_rng(4)
    plain = [
        [np.mean(np.concatenate([rng.choice(runs, len(runs)) for runs in scores.values()]) > tau) for tau in taus]
        for _ in range(600)
    ]
    np.testing.assert_allclose(profile.low, np.quantile(plain, 0.025, axis=0), atol=0.02)
    np.testing.assert_allclose(profile.high, np.quantile(plain, 0.975, axis=0), atol=0.02)


@pytest.mark.parametrize("name", ["mean", "iqm"])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(name):
    """Ragged synthetic tasks with symmetric noise, so that mean and IQM of all of them have a known true value."""
    rng = np.random.default_rng(5)
    sizes, trials, covered = (9, 12, 10, 14), 250, 0
    for _ in range(trials):
        scores = [0.3 + rng.normal(size=size) for size in sizes]
        estimate = statistics.bootstrap(scores, name, rng, repetitions=300)
        covered += estimate.low <= 0.3 <= estimate.high
    assert 0.89 <= covered / trials <= 0.98


def test_the_interval_is_stratified():
    """Far apart tasks without spread inside: resampling across tasks would give an interval, within them a point."""
    estimate = statistics.bootstrap([[0.0, 0.0, 0.0], [9.0, 9.0]], "mean", np.random.default_rng(6))
    assert estimate == (4.5, 4.5, 4.5)


def test_the_bootstrap_spread_of_a_mean_is_the_one_known_in_theory():
    runs = np.random.default_rng(7).normal(size=40)
    low, high = statistics.bootstrap([runs], "mean", np.random.default_rng(8), repetitions=20000)[1:]
    assert high - low == pytest.approx(2 * 1.96 * runs.std() / 40**0.5, rel=0.03)


def test_bootstrap_depends_on_its_generator_only(monkeypatch):
    scores = atari.normalized_runs("IRIS")
    first = statistics.aggregate(scores, np.random.default_rng(9), repetitions=200)
    assert first == statistics.aggregate(scores, np.random.default_rng(9), repetitions=200)
    assert first != statistics.aggregate(scores, np.random.default_rng(10), repetitions=200)
    assert set(first) == {"mean", "median", "iqm", "optimality_gap", "superhuman"}
    assert statistics.aggregate(scores, None) == {name: (first[name].value, None, None) for name in first}
    assert list(statistics.aggregate(scores, None, ["iqm"])) == ["iqm"]
    assert first["iqm"].value == value("iqm", scores)
    monkeypatch.setattr(statistics, "_CHUNK", 130 * 7)  # seven resamples at a time: another order, the same interval
    chunked = statistics.aggregate(scores, np.random.default_rng(9), repetitions=200)
    assert chunked["iqm"] == pytest.approx(first["iqm"], abs=0.03)


def test_the_interval_of_the_superhuman_count_is_over_runs_within_each_game():
    scores = {"sure": [1.2, 1.4], "as a coin falls": [0.0, 2.0], "never": [0.1, 0.9]}
    count = statistics.bootstrap(scores, "superhuman", np.random.default_rng(0))
    assert count == (2.0, 1.0, 2.0)  # the mean of "as a coin falls" is 0, 1, 1 or 2: superhuman in three of four
    assert value("superhuman", {"rounded": [0.9, 1.1 - 1e-15]}) == 1


def test_the_limits_hardly_depend_on_the_seed():
    first, second = (statistics.aggregate(atari.normalized_runs("REM"), np.random.default_rng(seed)) for seed in (0, 1))
    for name in first:
        assert first[name] == pytest.approx(second[name], abs=0.002), name  # limits of counts are whole


@pytest.mark.parametrize(("ours", "theirs"), [([50_000], None), ([5] * 26, None), ([5] * 26, [5] * 26), ([300], [300])])
def test_bootstrapping_holds_little_at_once(ours, theirs):
    sides = [[np.arange(float(size)) for size in sizes] for sizes in (ours, theirs) if sizes]
    tracemalloc.start()
    if theirs:
        statistics.bootstrap_improvement(*sides, np.random.default_rng(12), repetitions=200)
    else:
        statistics.aggregate(*sides, np.random.default_rng(12), repetitions=200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6  # bytes


def test_no_interval_without_a_second_run():
    single = {"Pong": [0.4], "Alien": [0.2]}
    assert statistics.bootstrap(single, "iqm", np.random.default_rng(0)) == (pytest.approx(0.3), None, None)
    assert statistics.bootstrap_improvement(single, single, np.random.default_rng(0)) == (0.5, None, None)
    assert statistics.performance_profile(single, [0.0], np.random.default_rng(0)).low is None


def test_improvement_interval_holds_the_estimate():
    rem, iris = atari.normalized_runs("REM"), atari.normalized_runs("IRIS")
    estimate = statistics.bootstrap_improvement(rem, iris, np.random.default_rng(11), repetitions=500)
    assert 0.5 < estimate.low < estimate.value < estimate.high < 0.7


def test_a_share_has_the_interval_of_its_clusters() -> None:
    hits, counts = np.array([90, 0, 0]), np.array([90, 10, 0])  # nothing to hit in the third
    assert statistics.bootstrap_share(hits, counts, np.random.default_rng(0)) == (0.9, 0.0, 1.0)
    assert statistics.bootstrap_share(hits[:1], counts[:1], np.random.default_rng(0)) == (1.0, None, None)
    number = np.full(400, 5)
    hits = np.random.default_rng(1).binomial(number, 0.3)
    found = statistics.bootstrap_share(hits, number, np.random.default_rng(2), repetitions=2000)
    half = 1.96 * np.sqrt(0.3 * 0.7 / 2000)
    assert found.low == pytest.approx(found.value - half, abs=0.003)
    assert found.high == pytest.approx(found.value + half, abs=0.003)
