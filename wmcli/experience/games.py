"""The games that were played for the segments of a run, whole: over segments, and over lost lives.

n rows of one stream in order of time, G games.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from wmcli.experience.segment import IMPORTED, lives_left, opens_game

COLUMNS = ("reward", "terminated", "truncated", "first", "lives", "stream")
"""Columns of a segment that tell its games."""


class Games(NamedTuple):
    """Finished games, in the order in which they ended."""

    step: np.ndarray
    """int64 (G,): environment steps in the experience when the game ended, those of all environments together."""
    score: np.ndarray
    """float64 (G,): sum of the rewards, neither discounted nor clipped."""
    length: np.ndarray
    """int64 (G,): decisions."""


class Spans(NamedTuple):
    """Spans of rows of one stream."""

    last: np.ndarray
    """int64 (G,): their last rows."""
    total: np.ndarray
    """(G,): sums of the rewards, in the number type of the rewards."""
    length: np.ndarray
    """int64 (G,): rows."""


def finished_games(segments: Iterable[Mapping[str, np.ndarray]], *, lives_end_episodes: bool) -> Games:
    """Return the games that ended by a termination or a time limit.

    A game counts once, however many segments and lives it took. A game that was cut does not count: one that is still
    running, or that was given up after a fault of the environment or because it could not be restored. Imported rows
    are no games of the run's own, but their steps count.

    Args:
        segments: The columns `COLUMNS` of each segment from the first on. The environments of a segment took equally
            many steps, at the same time.
        lives_end_episodes: Whether a lost life ends an episode, see `lives_end_episodes` in `load.py`.
    """
    steps, streams = 0, dict[int, list[dict[str, np.ndarray]]]()
    for arrays in segments:
        played = [int(stream) for stream in np.unique(arrays["stream"]) if stream != IMPORTED]
        for stream in played:
            rows = np.flatnonzero(arrays["stream"] == stream)
            columns = {name: arrays[name][rows] for name in COLUMNS}
            # Whether rows of several environments alternate or not, they were made in turn.
            columns["step"] = steps + len(played) * np.arange(1, len(rows) + 1)
            streams.setdefault(stream, []).append(columns)
        steps += len(arrays["stream"])
    games = [
        _games({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, lives_end_episodes)
        for parts in streams.values()
    ]
    if not games:
        return Games(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))
    every = Games(*(np.concatenate(values) for values in zip(*games, strict=True)))
    order = np.argsort(every.step, kind="stable")
    return Games(*(values[order] for values in every))


def _games(columns: Mapping[str, np.ndarray], lives_end_episodes: bool) -> Games:
    """Return the finished games of one stream."""
    ended = columns["terminated"] | columns["truncated"]
    left = lives_left(columns) if lives_end_episodes else np.full(len(ended), -1, np.int16)
    opens = opens_game(columns["first"], columns["lives"], np.append(-1, left[:-1]))
    spans = finished_spans(columns["reward"].astype(np.float64), opens, ended & (left < 0))
    return Games(columns["step"][spans.last], spans.total, spans.length)


def finished_spans(reward: np.ndarray, opens: np.ndarray, ended: np.ndarray) -> Spans:
    """Return the spans from each row that `opens` on to the row before the next one, if that row `ended`.

    Args:
        reward: (n,).
        opens: bool (n,).
        ended: bool (n,): False in the last row of a span that was cut.
    """
    starts = np.flatnonzero(opens)
    if not len(starts):
        return Spans(starts, reward[:0], starts)
    lasts = np.append(starts[1:], len(reward)) - 1
    finished = ended[lasts]
    totals = np.add.reduceat(reward, starts)
    return Spans(lasts[finished], totals[finished], (lasts - starts + 1)[finished])


def running_mean(games: Games, count: int) -> np.ndarray:
    """Return the mean return of the last `count` games behind each game that has so many, (G - count + 1,).

    Source: Machado et al. (2018, arXiv 1709.06009); Drama (Wang et al. 2024, arXiv 2410.08893), section 4.1.
    """
    if len(games.score) < count:
        return np.zeros(0)
    return np.lib.stride_tricks.sliding_window_view(games.score, count).mean(1)
