"""Streams of episodes in chunks, and rows that are whole episodes."""

from __future__ import annotations

import numpy as np
import pytest

from wmcli.errors import UsageError
from wmcli.experience import Episodes, StreamSampler, WindowSampler

LENGTHS = np.array([5, 3, 8, 4])
STARTS = np.cumsum(LENGTHS) - LENGTHS
RUNS = Episodes(STARTS, LENGTHS)
ORDER = np.random.default_rng(0).permutation(LENGTHS.sum())  # rows lie anywhere
POSITION = np.argsort(ORDER)


def streams(length: int, seed: int = 1) -> StreamSampler:
    return StreamSampler(RUNS, ORDER, length=length, rng=np.random.default_rng(seed))


def walked(sampler: StreamSampler, size: int, batches: int) -> np.ndarray:
    """Positions (B, batches * L) that each stream went through."""
    return np.concatenate([POSITION[sampler.batch(size).rows] for _ in range(batches)], 1)


def test_a_stream_takes_whole_episodes_one_after_the_other() -> None:
    for line in walked(streams(3), size=2, batches=40):
        begun = np.flatnonzero(np.isin(line, STARTS))
        pieces = np.split(line, begun)
        assert len(pieces) > 20
        first, *whole, _ = pieces
        if len(first):  # from a random frame to the end
            assert (np.diff(first) == 1).all() and first[-1] + 1 in STARTS + LENGTHS
        for piece in whole:
            episode = STARTS.tolist().index(piece[0])
            assert piece.tolist() == list(range(STARTS[episode], STARTS[episode] + LENGTHS[episode]))


def test_every_episode_is_taken_before_any_comes_again() -> None:
    """By one stream: behind its first, rounds of all four."""
    line = walked(streams(4, seed=2), size=1, batches=100)[0]
    opened = line[np.isin(line, STARTS)]
    if line[0] not in STARTS:  # it began within one
        opened = np.concatenate([[STARTS[np.searchsorted(STARTS, line[0], "right") - 1]], opened])
    rounds = opened[: len(opened) // 4 * 4].reshape(-1, 4)
    assert len(rounds) > 10 and all(set(each) == set(STARTS) for each in rounds)
    assert len({tuple(each) for each in rounds.tolist()}) > 5


def test_chunks_of_any_length_leave_no_gap() -> None:
    assert np.array_equal(walked(streams(6), 1, 10), walked(streams(5), 1, 12))


def test_streams_do_not_begin_in_step() -> None:
    begun = {int(line[0]) for seed in range(30) for line in walked(streams(1, seed), 3, 1)}
    assert len(begun) > 12 and begun - set(STARTS.tolist())


def test_a_state_is_all_there_is_to_know() -> None:
    sampler = streams(3)
    walked(sampler, 2, 5)
    state = sampler.state()
    again = streams(3, seed=9)
    again.load(state)
    assert np.array_equal(walked(sampler, 2, 30), walked(again, 2, 30))


def test_no_episode_no_stream() -> None:
    nothing = Episodes(np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(UsageError, match="wm collect"):
        StreamSampler(nothing, np.zeros(0, np.int64), length=3, rng=np.random.default_rng(0))


def test_whole_episodes_begin_with_their_first_frame_and_are_padded() -> None:
    sampler = WindowSampler(
        RUNS,
        ORDER,
        length=8,
        minimum=2,
        pad="right",
        whole=True,
        sampling="windows",
        rng=np.random.default_rng(3),
    )
    assert sampler.windows == 4
    for _ in range(5):  # each once a round
        batch = sampler.batch(4)
        assert sorted(POSITION[batch.rows[:, 0]]) == STARTS.tolist()
        for rows, valid in zip(batch.rows, batch.valid, strict=True):
            episode = STARTS.tolist().index(POSITION[rows[0]])
            assert valid.sum() == LENGTHS[episode] and valid[: LENGTHS[episode]].all()
            assert (np.diff(POSITION[rows[valid]]) == 1).all()
