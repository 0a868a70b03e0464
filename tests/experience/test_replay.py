from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from wmcli.errors import ArtifactError, MachineError
from wmcli.experience import Replay, SearchTargets, WindowSampler
from wmcli.experience.replay import FramesOn
from wmcli.experience.sampler import Windows
from wmcli.trainers.batches import gather


def experience(lengths: list[list[int]], unfinished: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    """Interleaved rows of streams whose episodes have these lengths; the last one of each stream may be unfinished.
    The first two pixels of a frame tell the stream and the time step, so that a row can be recognized."""
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


@pytest.mark.parametrize("cuts", [[], [11], [4, 11, 18, 19]])  # however the rows were cut into segments
def test_an_episode_that_another_one_follows_without_an_end_is_truncated(cuts: list[int]) -> None:
    data = experience([[5, 3], [2, 6]], [3, 3])
    cut = np.flatnonzero(data["terminated"])[[1, 2]]  # one of each stream
    data["terminated"][cut] = False
    parts = np.split(np.arange(len(data["action"])), cuts)
    replay = filled([{name: column[rows] for name, column in data.items()} for rows in parts])
    assert np.flatnonzero(replay.truncated.numpy()).tolist() == cut.tolist()
    assert (replay.terminated.numpy() == data["terminated"]).all()
    assert not data["truncated"].any()  # the arrays are the caller's


LENGTHS, UNFINISHED = [[5, 3, 9], [2, 14], [11, 1, 1]], [2, 0, 6]


def filled(parts: list[dict[str, np.ndarray]]) -> Replay:
    replay = Replay("cpu")
    for part in parts:
        replay.extend(part)
    return replay


@pytest.mark.parametrize("cuts", [[], [14], [9, 10, 19, 23, 24, 25]])
@pytest.mark.parametrize("lives_end_episodes", [True, False])
def test_a_game_goes_on_over_its_lost_lives(lives_end_episodes: bool, cuts: list[int]) -> None:
    """Stream 0 loses a life, then its game; the next game is cut right behind a lost life, which shows in the lives of
    the one after it. Stream 1 loses a life in the step of a time limit; its next game loses one and is cut amid an
    episode."""
    data = experience([[5, 3, 2, 4, 1], [3, 4, 2, 6]], [2, 2])
    rows = [np.flatnonzero(data["stream"] == stream) for stream in range(2)]
    data["lives"][rows[0]] = [3, 3, 3, 3, 2, 2, 2, 0, 3, 2, 3, 3, 3, 2, 0, 3, 3]
    data["lives"][rows[1]] = [3, 3, 2, 3, 3, 3, 2, 2, 2, 3, 3, 3, 3, 3, 2, 2, 2]
    data["truncated"][rows[1][2]], data["terminated"][rows[1][8]] = True, False
    parts = np.split(np.arange(len(data["action"])), cuts)
    replay = Replay("cpu", lives_end_episodes=lives_end_episodes)
    for part in parts:
        replay.extend({name: column[part] for name, column in data.items()})
    opens = [replay.opens_game.numpy()[mine] for mine in rows]
    over = [replay.ends_game.numpy()[mine] for mine in rows]
    if lives_end_episodes:
        assert [np.flatnonzero(each).tolist() for each in opens] == [[0, 8, 10, 15], [0, 3, 9]]
        assert [np.flatnonzero(each).tolist() for each in over] == [[7, 9, 14], [2, 8]]
    else:
        assert torch.equal(replay.opens_game, replay.first)
        assert torch.equal(replay.ends_game, replay.terminated | replay.truncated)
    assert torch.equal(replay.terminated, torch.from_numpy(data["terminated"]))


def test_episodes_are_contiguous_in_order_and_complete() -> None:
    data = experience(LENGTHS, UNFINISHED)
    replay = filled([data])
    start, length = replay.episodes
    order = replay.order
    assert len(replay) == len(data["action"]) == length.sum()
    assert sorted(order.tolist()) == list(range(len(replay)))
    assert sorted(length.tolist()) == sorted([5, 3, 9, 2, 2, 14, 11, 1, 1, 6])
    assert (np.diff(order[start]) > 0).all()  # by the row of their first frame
    for begin, frames in zip(start, length, strict=True):
        rows = order[begin : begin + frames]
        assert len(set(data["stream"][rows])) == 1
        assert (np.diff(replay.observation[rows][:, 0, 0, 1].int().numpy()) == 1).all()
        assert data["first"][rows].tolist() == [True] + [False] * (frames - 1)


@pytest.mark.parametrize("cuts", [[1], [13, 30], [7, 8, 9], [20, 29, 45]])
def test_segment_by_segment_equals_all_at_once(cuts: list[int]) -> None:
    data = experience(LENGTHS, UNFINISHED)
    whole = filled([data])
    edges = [0, *cuts, len(data["action"])]
    parts = [{name: array[a:b] for name, array in data.items()} for a, b in zip(edges, edges[1:], strict=False)]
    replay = filled(parts)
    assert (replay.order == whole.order).all()
    assert (replay.episodes.start == whole.episodes.start).all()
    assert (replay.episodes.length == whole.episodes.length).all()
    for name in ("observation", "action", "reward", "terminated", "truncated", "first"):
        got, want = getattr(replay, name), getattr(whole, name)
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_streams_are_whole_and_in_the_order_of_time() -> None:
    data = experience(LENGTHS, UNFINISHED)
    replay = filled([data])
    (start, length), order = replay.runs(across_ends=True)
    assert length.tolist() == [sum(episodes) + rest for episodes, rest in zip(LENGTHS, UNFINISHED, strict=True)]
    assert start.tolist() == [0, 19, 35] and sorted(order.tolist()) == list(range(len(replay)))
    for stream in range(3):
        rows = order[start[stream] : start[stream] + length[stream]]
        assert set(data["stream"][rows].tolist()) == {stream}
        assert replay.observation[rows][:, 0, 0, 1].tolist() == list(range(length[stream]))
        assert replay.first[rows].sum() == len(LENGTHS[stream]) + (UNFINISHED[stream] > 0)


@pytest.mark.parametrize("across_ends", [False, True])
@pytest.mark.parametrize("cuts", [[1], [13, 30], [7, 8, 9], [20, 29, 45]])
def test_runs_do_not_depend_on_the_cuts_between_segments(across_ends: bool, cuts: list[int]) -> None:
    data = experience(LENGTHS, UNFINISHED)
    edges = [0, *cuts, len(data["action"])]
    replay = filled([{name: array[a:b] for name, array in data.items()} for a, b in pairwise(edges)])
    runs, order = replay.runs(across_ends)
    want, its_order = filled([data]).runs(across_ends)
    assert (runs.start == want.start).all() and (runs.length == want.length).all() and (order == its_order).all()
    assert order.dtype == runs.start.dtype == runs.length.dtype == np.int64


def test_streams_may_have_any_numbers_and_rest() -> None:
    """Stream 7 has rows at both ends of the memory, stream 2 between them; the other numbers have none."""
    parts = [experience([[3]], [2]), experience([[2, 2]], [0]), experience([[4]], [0])]
    for part, number in zip(parts, [7, 2, 7], strict=True):
        part["stream"] = np.full_like(part["stream"], number)
    replay = filled(parts)
    runs, order = replay.runs(across_ends=True)
    assert runs.start.tolist() == [0, 4] and runs.length.tolist() == [4, 9]
    assert order.tolist() == [5, 6, 7, 8, 0, 1, 2, 3, 4, 9, 10, 11, 12]
    assert replay.episodes.length.tolist() == [3, 2, 2, 2, 4]


def test_windows_of_streams_run_over_the_ends_of_episodes() -> None:
    replay = filled([experience(LENGTHS, UNFINISHED)])
    sampler = WindowSampler(
        *replay.runs(across_ends=True),
        length=9,
        minimum=9,
        pad="right",
        sampling="windows",
        rng=np.random.default_rng(0),
    )
    assert sampler.windows == (19 - 8) + (16 - 8) + (19 - 8)
    windows = sampler.batch(sampler.windows)
    stream, time = replay.observation[windows.rows][:, :, 0, 0].unbind(-1)
    assert windows.valid.all() and (stream == stream[:, :1]).all() and (time.diff(dim=1) == 1).all()
    assert replay.first[windows.rows][:, 1:].any(1).sum() == 10 + 2 + 8  # those that an episode opens within


def test_tensors_have_the_given_values() -> None:
    data = experience(LENGTHS, UNFINISHED)
    replay = filled([data])
    assert torch.equal(replay.observation, torch.from_numpy(data["observation"]))
    assert replay.action.dtype == torch.int64 and (replay.action.numpy() == data["action"]).all()
    assert replay.reward.dtype == torch.float32 and (replay.reward.numpy() == data["reward"]).all()
    assert (replay.terminated.numpy() == data["terminated"]).all() and replay.first.dtype == torch.bool


def searched(data: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The same, played by a search among three actions."""
    rng, rows = np.random.default_rng(seed), len(data["action"])
    policy = rng.dirichlet([1.0, 1.0, 1.0], rows).astype(np.float32)
    return data | {"policy": policy, "value": rng.normal(size=rows).astype(np.float32)}


@pytest.mark.parametrize("reserve", [False, True])
def test_search_results_are_stored_with_their_rows(reserve: bool) -> None:
    plain = experience([[4]], [0])
    first, second = searched(plain, 0), searched(plain, 1)
    replay = Replay("cpu")
    if reserve:
        replay.reserve(20, experience([[1]], [0]))
    replay.extend(plain)
    assert replay.searched is None
    for part in (first, plain, second, plain):
        replay.extend(part)
    assert replay.searched is not None
    policy, value, found, sampled = replay.searched
    assert sampled is None
    assert found.tolist() == [4 <= row < 8 or 12 <= row < 16 for row in range(20)]
    assert torch.equal(policy[found], torch.from_numpy(np.concatenate([first["policy"], second["policy"]])))
    assert torch.equal(value[found], torch.from_numpy(np.concatenate([first["value"], second["value"]])))
    assert not policy[~found].any() and not value[~found].any()
    assert torch.equal(replay.observation[:4], replay.observation[16:])


def test_targets_are_those_of_the_newest_search_and_the_least_searched_come_first() -> None:
    plain = experience([[4]], [0])
    replay = filled([plain, searched(plain, 0)])
    targets = SearchTargets(replay, 3)
    assert targets.due(5).tolist() == [0, 1, 2, 3, 4] and targets.due(99).tolist() == list(range(8))
    rows, policy, value = np.array([1, 0, 6]), torch.eye(3), torch.tensor([1.0, 2.0, 3.0])
    targets.update(rows, policy, value)
    assert targets.due(8).tolist() == [2, 3, 0, 1, 4, 5, 7, 6]  # 0, 0, 1, 1, 1, 1, 1 and 2 searches
    assert targets.is_searched.tolist() == [True, True, False, False, True, True, True, True]
    assert torch.equal(targets.policy[rows], policy) and torch.equal(targets.value[rows], value)
    assert replay.searched is not None and not replay.searched[2][:4].any(), "the experience stays as it was"

    replay.extend(searched(plain, 1))
    grown = SearchTargets(replay, 3)
    grown.continue_from(targets.state())
    assert grown.due(12).tolist() == [2, 3, 0, 1, 4, 5, 7, 8, 9, 10, 11, 6]
    for name in ("policy", "value", "is_searched"):
        assert torch.equal(getattr(grown, name)[:8], getattr(targets, name))
    grown.update(np.array([6]), policy[:1], value[:1])
    once_more = SearchTargets(replay, 3)
    once_more.load(grown.state())
    assert (once_more.due(12) == grown.due(12)).all() and torch.equal(once_more.policy, grown.policy)


@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("counts", [(2, 4, 3), (4, 2, 2)], ids=str)
def test_the_number_of_samples_may_change_between_segments(counts: tuple[int, ...], reserve: bool) -> None:
    """Rows with fewer samples have shares of 0 behind their own."""
    plain, rng, replay = experience([[2, 2]], [0]), np.random.default_rng(0), Replay("cpu", closing=True)
    parts = []
    for count in counts:
        policy = rng.dirichlet(np.ones(count), 4).astype(np.float32)
        sampled = rng.uniform(-1, 1, (4, count, 5)).astype(np.float32)
        parts.append(searched(plain, 0) | {"policy": policy, "sampled": sampled, "closing": plain["observation"][:2]})
    if reserve:
        replay.reserve(30, {name: column for name, column in parts[1].items() if name != "closing"})
    replay.extend(plain | {"closing": plain["observation"][:2]})
    for part in parts:
        replay.extend(part)
    assert replay.searched is not None and replay.is_closing is not None
    policy, _, found, sampled = replay.searched
    assert policy.shape == (24, 4) and sampled is not None and sampled.shape == (24, 4, 5)
    rows = torch.arange(24)[found].split(4)
    assert len(rows) == 3 and not replay.is_closing[found].any()
    for row, count, part in zip(rows, counts, parts, strict=True):
        assert torch.equal(policy[row, :count], torch.from_numpy(part["policy"]))
        assert torch.equal(sampled[row, :count], torch.from_numpy(part["sampled"]))
        assert not policy[row, count:].any() and not sampled[row, count:].any()


def test_observations_that_close_episodes_are_never_due() -> None:
    plain, replay = experience([[3, 2]], [1]), Replay("cpu", closing=True)
    replay.extend(plain | {"closing": plain["observation"][:2]})
    targets = SearchTargets(replay, 3)
    assert len(replay) == 8 and targets.due(99).tolist() == [0, 1, 2, 4, 5, 7]
    targets.update(np.array([0, 1]), torch.eye(3)[:2], torch.ones(2))
    assert targets.due(4).tolist() == [2, 4, 5, 7] and targets.due(7).tolist() == [2, 4, 5, 7, 0, 1]


def test_targets_of_experience_that_nobody_searched() -> None:
    targets = SearchTargets(filled([experience([[4]], [0])]), 3)
    assert targets.policy.shape == (4, 3) and not targets.is_searched.any()
    assert {name: len(value) for name, value in targets.state().items()} == {
        "rows": 0,
        "again": 0,
        "policy": 0,
        "value": 0,
    }


def test_reserved_room_is_not_copied_again() -> None:
    data = experience([[4]], [0])
    replay = Replay("cpu")
    replay.reserve(12, data)
    replay.extend(data)
    place = replay.observation.data_ptr()
    replay.extend(data)
    replay.extend(data)
    assert replay.observation.data_ptr() == place and len(replay) == 12
    replay.extend(data)
    assert len(replay) == 16 and torch.equal(replay.observation[:4], replay.observation[12:])


def test_an_interrupted_episode_is_left_as_it_is_when_its_stream_starts_anew() -> None:
    replay = filled([experience([[]], [4]), experience([[3]], [0])])
    assert replay.episodes.length.tolist() == [4, 3]


def test_read_only_arrays_are_taken_without_a_warning(recwarn) -> None:
    data = experience([[4]], [0])
    for array in data.values():
        array.flags.writeable = False
    filled([data])
    assert not recwarn.list


@pytest.mark.parametrize("cuts", [[], [1], [20, 21, 40]])
def test_frames_in_blocks_are_as_good_as_all_at_once(cuts: list[int]) -> None:
    data = experience(LENGTHS, UNFINISHED)
    rest = {name: array for name, array in data.items() if name != "observation"}
    replay = Replay("cpu")
    replay.extend(rest, iter(np.split(data["observation"], cuts)))
    assert (
        torch.equal(replay.observation, torch.from_numpy(data["observation"]))
        and (replay.order == filled([data]).order).all()
    )
    with pytest.raises(AssertionError, match="frames for"):
        Replay("cpu").extend(rest, iter([data["observation"][1:]]))


def test_mismatches_are_refused() -> None:
    data = experience([[4], [5]], [3, 0])
    replay = filled([data])
    with pytest.raises(ArtifactError, match=r"\(5, 3, 2\) cannot join"):
        replay.extend({**data, "observation": np.zeros((len(data["action"]), 5, 3, 2), np.uint8)})
    with pytest.raises(ArtifactError, match="stream 7 starts in the middle"):
        replay.extend({**data, "stream": np.full(len(data["action"]), 7, np.int16), "first": data["first"] & False})
    assert len(replay) == len(data["action"])
    with pytest.raises(MachineError, match="do not fit in the memory of cpu"):
        Replay("cpu").reserve(1 << 44, data)


def test_frames_on_the_host_and_the_rest_on_the_device() -> None:
    """On a device that holds no numbers and takes part in no operation of the host's."""
    data = experience(LENGTHS, UNFINISHED)
    replay = Replay("meta", frames_on="host")
    for _ in range(2):  # the second grows the columns
        replay.extend(data)
    assert replay.frames_on_host and torch.equal(
        replay.observation, torch.from_numpy(data["observation"]).repeat(2, 1, 1, 1)
    )
    windows = Windows(np.arange(12).reshape(3, 4), np.ones((3, 4), bool))
    batch = gather(replay, replay.observation, windows)
    assert {column.device.type for column in batch if column is not None} == {"meta"}
    assert batch.inputs.shape == (3, 4, 4, 3, 2) and batch.inputs.dtype == torch.uint8
    everything = Replay("meta")
    everything.extend(data)
    assert everything.observation.device.type == "meta" and not everything.frames_on_host


def test_many_frames_go_to_the_host_by_themselves(monkeypatch) -> None:
    """Where they take more than half of the device's free memory, and what torch holds without use counts as free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)

    def place(size: int, frames_on: FramesOn) -> str:
        return Replay("cuda", frames_on=frames_on)._place_frames(size).type

    assert [place(size, "auto") for size in (40, 41)] == ["cuda", "cpu"]
    assert [place(41, frames_on) for frames_on in ("device", "host")] == ["cuda", "cpu"]
