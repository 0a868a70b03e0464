from __future__ import annotations

import numpy as np
import pytest
import torch

from wmcli.errors import ArtifactError, MachineError
from wmcli.experience import Memory


def experience(lengths: list[list[int]], unfinished: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    """Interleaved rows of streams whose episodes have these lengths; the last one of each stream may be unfinished.
    The first two pixels of a frame tell the stream and the time step, so that a row can be recognised."""
    total = [sum(episodes) + rest for episodes, rest in zip(lengths, unfinished, strict=True)]
    rows = []
    for t in range(max(total)):
        for stream, episodes in enumerate(lengths):
            if t < total[stream]:
                opens = t in np.cumsum([0, *episodes])
                ends = t + 1 in np.cumsum(episodes)
                rows.append((stream, t, opens, ends))
    stream, time, first, ends = (np.array(column) for column in zip(*rows, strict=True))
    rng = np.random.default_rng(seed)
    frames = rng.integers(256, size=(len(rows), 4, 3, 2), dtype=np.uint8)
    frames[:, 0, 0, 0], frames[:, 0, 0, 1] = stream, time
    return {
        "observation": frames,
        "action": rng.integers(9, size=len(rows)).astype(np.int32),
        "reward": rng.normal(size=len(rows)).astype(np.float32),
        "terminated": ends.astype(bool),
        "truncated": np.zeros(len(rows), bool),
        "first": first.astype(bool),
        "lives": np.zeros(len(rows), np.int16),
        "stream": stream.astype(np.int16),
    }


LENGTHS, UNFINISHED = [[5, 3, 9], [2, 14], [11, 1, 1]], [2, 0, 6]


def filled(parts: list[dict[str, np.ndarray]]) -> Memory:
    memory = Memory.empty("cpu")
    for part in parts:
        memory.extend(part)
    return memory


def test_episodes_are_contiguous_in_order_and_complete() -> None:
    data = experience(LENGTHS, UNFINISHED)
    memory = filled([data])
    start, length = memory.episodes
    order = memory.order
    assert len(memory) == len(data["action"]) == length.sum()
    assert sorted(order.tolist()) == list(range(len(memory)))
    assert sorted(length.tolist()) == sorted([5, 3, 9, 2, 2, 14, 11, 1, 1, 6])
    assert (np.diff(order[start]) > 0).all()  # by the row of their first frame
    for begin, frames in zip(start, length, strict=True):
        rows = order[begin : begin + frames]
        assert len(set(data["stream"][rows])) == 1
        assert (np.diff(memory.frames[rows][:, 0, 0, 1].int().numpy()) == 1).all()
        assert data["first"][rows].tolist() == [True] + [False] * (frames - 1)


@pytest.mark.parametrize("cuts", [[1], [13, 30], [7, 8, 9], [20, 29, 45]])
def test_segment_by_segment_equals_all_at_once(cuts: list[int]) -> None:
    data = experience(LENGTHS, UNFINISHED)
    whole = filled([data])
    edges = [0, *cuts, len(data["action"])]
    parts = [{name: array[a:b] for name, array in data.items()} for a, b in zip(edges, edges[1:], strict=False)]
    memory = filled(parts)
    assert (memory.order == whole.order).all()
    assert (memory.episodes.start == whole.episodes.start).all()
    assert (memory.episodes.length == whole.episodes.length).all()
    for name in ("frames", "action", "reward", "terminated", "truncated", "first"):
        got, want = getattr(memory, name), getattr(whole, name)
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_tensors_hold_what_was_given() -> None:
    data = experience(LENGTHS, UNFINISHED)
    memory = filled([data])
    assert torch.equal(memory.frames, torch.from_numpy(data["observation"]))
    assert memory.action.dtype == torch.int64 and (memory.action.numpy() == data["action"]).all()
    assert memory.reward.dtype == torch.float32 and (memory.reward.numpy() == data["reward"]).all()
    assert (memory.terminated.numpy() == data["terminated"]).all() and memory.first.dtype == torch.bool


def test_reserved_room_is_not_copied_again() -> None:
    data = experience([[4]], [0])
    memory = Memory.empty("cpu")
    memory.reserve(12, (4, 3, 2))
    memory.extend(data)
    place = memory.frames.data_ptr()
    memory.extend(data)
    memory.extend(data)
    assert memory.frames.data_ptr() == place and len(memory) == 12
    memory.extend(data)
    assert len(memory) == 16 and torch.equal(memory.frames[:4], memory.frames[12:])


def test_an_interrupted_episode_is_left_as_it_is_when_its_stream_starts_anew() -> None:
    memory = filled([experience([[]], [4]), experience([[3]], [0])])
    assert memory.episodes.length.tolist() == [4, 3]


def test_read_only_arrays_are_taken_without_a_warning(recwarn) -> None:
    data = experience([[4]], [0])
    for array in data.values():
        array.flags.writeable = False
    filled([data])
    assert not recwarn.list


def test_what_does_not_fit_is_refused() -> None:
    data = experience([[4], [5]], [3, 0])
    memory = filled([data])
    with pytest.raises(ArtifactError, match=r"\(5, 3, 2\) cannot join"):
        memory.extend({**data, "observation": np.zeros((len(data["action"]), 5, 3, 2), np.uint8)})
    with pytest.raises(ArtifactError, match="stream 7 starts in the middle"):
        memory.extend({**data, "stream": np.full(len(data["action"]), 7, np.int16), "first": data["first"] & False})
    assert len(memory) == len(data["action"])
    with pytest.raises(MachineError, match="do not fit in the memory of cpu"):
        Memory.empty("cpu").reserve(1 << 44, (64, 64, 3))
