"""Finished games, against a play that keeps its own account of them. E streams, T steps, N rows."""

from __future__ import annotations

import numpy as np
import pytest

from wmcli.experience.games import COLUMNS, Games, finished_games, running_mean
from wmcli.experience.segment import IMPORTED

STEPS = 400


def played(streams: int, lives: int, seed: int) -> tuple[dict[str, np.ndarray], list[tuple[int, float, int]]]:
    """Columns (T, E) of random games, and (step, return, length) of each that ended, in order.

    Of the games some end by a time limit, some are cut without a flag, and of those with `lives` each lost one but the
    last ends an episode.
    """
    rng = np.random.default_rng(seed)
    columns = {name: np.zeros((STEPS, streams)) for name in COLUMNS}
    ended = []
    for stream in range(streams):
        left, first, total, length = lives, True, 0.0, 0
        for t in range(STEPS):
            reward = float(rng.integers(-3, 9)) / 4
            total, length = total + reward, length + 1
            lost, cut = rng.random() < 0.12, rng.random() < 0.02
            limit = length == 30
            left -= lost and left > 0
            over = (lost and left <= 0) or limit
            step = {
                "reward": reward,
                "terminated": lost and not cut,
                "truncated": limit and not cut,
                "first": first,
                "lives": left if lives else -1,
                "stream": stream,
            }
            for name, value in step.items():
                columns[name][t, stream] = value
            if over and not cut:
                ended.append(((t + 1) * streams, stream, total, length))
            first = lost or limit or cut
            if over or cut:
                left, total, length = lives, 0.0, 0
    types = {"reward": np.float32, "lives": np.int16, "stream": np.int16}
    every = {name: array.astype(types.get(name, bool)) for name, array in columns.items()}
    return every, [(step, total, length) for step, _, total, length in sorted(ended)]


def cut_into(columns: dict[str, np.ndarray], ends: list[int], *, turned: bool) -> list[dict[str, np.ndarray]]:
    """Segments (N,) that end after these steps, with the streams in turn or one behind the other."""
    parts = zip([0, *ends], [*ends, STEPS], strict=True)
    return [
        {name: (array[a:b] if turned else array[a:b].T).reshape(-1) for name, array in columns.items()}
        for a, b in parts
        if b > a
    ]


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("streams", "lives"), [(1, 0), (3, 0), (1, 3), (4, 5)])
def test_games_are_those_of_the_play_however_segments_are_cut(streams: int, lives: int, turned: bool) -> None:
    columns, expected = played(streams, lives, seed=streams + lives)
    assert len(expected) > 10
    rng = np.random.default_rng(1)
    for cuts in (0, 1, 40):
        ends = np.sort(rng.choice(np.arange(1, STEPS), cuts, replace=False)).tolist()
        found = finished_games(cut_into(columns, ends, turned=turned), lives_end_episodes=lives > 0)
        assert list(zip(*(values.tolist() for values in found), strict=True)) == expected


def test_imported_rows_take_steps_and_are_no_games() -> None:
    columns, expected = played(2, 0, seed=5)
    first, second = cut_into(columns, [200], turned=True)
    imported = {name: array.copy() for name, array in first.items()} | {"stream": np.full(400, IMPORTED)}
    found = finished_games([imported, first, imported, second], lives_end_episodes=False)
    later = [step + 400 * (1 + (step > 400)) for step, _, _ in expected]
    assert found.step.tolist() == later and found.length.tolist() == [length for _, _, length in expected]
    assert len(finished_games([imported], lives_end_episodes=False).score) == 0


def test_the_running_mean_begins_with_the_first_full_set_of_games() -> None:
    scores = np.array([3.0, -1, 4, 1, 5, 9])
    games = Games(np.arange(6), scores, np.ones(6, int))
    assert running_mean(games, 5).tolist() == [scores[:5].mean(), scores[1:].mean()]
    assert running_mean(games, 1).tolist() == scores.tolist()
    assert running_mean(games, 7).tolist() == []


def test_large_returns_leave_no_errors_of_rounding_in_later_means() -> None:
    scores = np.array([1e17, 1e9, 1, 2, 3, 4, 0.125, 0.25])
    means = running_mean(Games(np.arange(8), scores, np.ones(8, int)), 2)
    assert means[2:].tolist() == [1.5, 2.5, 3.5, 2.0625, 0.1875]
