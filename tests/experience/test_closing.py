"""Closing observations: rows behind their episodes in a replay, and what a recorder of an older collection does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wmcli.experience import Recorder, Replay, read_segment, write_segment
from wmcli.spaces import column_names, map_parts

STREAMS, ROUNDS = 2, 9


def recorded(*, parts: bool, start: int = 0) -> Recorder:
    """Two streams with episodes of 3 and 4 steps. Numbers in observations: 100 * stream + time, half if they close."""
    recorder = Recorder(ROUNDS, STREAMS)

    def seen(number: np.ndarray) -> object:
        image = np.broadcast_to(number.astype(np.uint8)[..., None, None, None], (*number.shape, 2, 2, 3))
        return {"a.b": image, "speed": number[..., None].astype(np.float32)} if parts else image

    for time in range(start, start + ROUNDS):
        at = 100 * np.arange(STREAMS) + time
        ends = np.array([time % 3 == 2, time % 4 == 3])
        step = column_names("observation", seen(at)) | {
            "action": at.astype(np.int32),
            "reward": at.astype(np.float32),
            "terminated": ends & (at % 2 == 0),
            "truncated": ends & (at % 2 == 1),
            "first": np.array([time % 3 == 0, time % 4 == 0]),
            "lives": np.full(STREAMS, -1, np.int16),
        }
        closing = {int(stream): seen(at[stream] + np.array(50)) for stream in np.flatnonzero(ends)}
        recorder.add(step, closing)
    return recorder


@pytest.mark.parametrize("parts", [False, True])
def test_a_closing_observation_follows_the_last_action_of_its_episode(tmp_path, parts: bool) -> None:
    """Over two segments, of which the first ends amid episodes."""
    with_them, without = Replay("cpu", closing=True), Replay("cpu")
    for start in (0, ROUNDS):
        folder = tmp_path / str(start)
        write_segment(folder, recorded(parts=parts, start=start).arrays())
        for replay in (with_them, without):
            replay.extend(read_segment(folder))
    assert without.is_closing is None and with_them.is_closing is not None
    closing = with_them.is_closing
    ended = without.terminated | without.truncated
    assert closing.sum() == ended.sum() == 10 and len(with_them) == len(without) + 10
    for name in ("action", "reward", "terminated", "truncated", "first"):
        assert torch.equal(getattr(with_them, name)[~closing], getattr(without, name)), name
    map_parts(
        lambda ours, plain: torch.testing.assert_close(ours[~closing], plain),
        with_them.observation,
        without.observation,
    )
    assert not with_them.first[closing].any() and not with_them.reward[closing].any()
    assert not with_them.action[closing].any()

    order = with_them.order
    number = with_them.observation["speed"][:, 0] if parts else with_them.observation[:, 0, 0, 0]
    before = torch.from_numpy(order[np.flatnonzero(closing[order].numpy()) - 1])
    after = torch.from_numpy(order[closing[order].numpy()])
    assert torch.equal(number[after], number[before] + 50), "it is that of its own episode"
    assert torch.equal(with_them.terminated[after], with_them.terminated[before])
    assert (with_them.episodes.length - without.episodes.length <= 1).all()


def test_segments_without_closing_observations_have_none_in_memory() -> None:
    arrays = recorded(parts=False).arrays()
    replay = Replay("cpu", closing=True)
    replay.extend({name: array for name, array in arrays.items() if name != "closing"})
    assert len(replay) == STREAMS * ROUNDS and replay.is_closing is not None and not replay.is_closing.any()


def test_a_collection_that_began_without_them_ends_without_them(tmp_path) -> None:
    """One that an earlier version began: a segment has all closing observations or none."""
    begun = {name: array[:6] for name, array in recorded(parts=False).arrays().items() if name != "closing"}
    resumed = Recorder(ROUNDS, STREAMS)
    resumed.load(begun)
    steps = recorded(parts=False).arrays()
    for time in range(3, ROUNDS):
        rows = slice(STREAMS * time, STREAMS * time + STREAMS)
        step = {name: array[rows] for name, array in steps.items() if name not in ("stream", "closing")}
        resumed.add(step, {stream: np.zeros((2, 2, 3), np.uint8) for stream in range(STREAMS)})
    write_segment(tmp_path / "segment", resumed.arrays())
    ours = read_segment(tmp_path / "segment")
    assert "closing" not in ours
    for name, array in ours.items():
        np.testing.assert_array_equal(array, steps[name], err_msg=name)
