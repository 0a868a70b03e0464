"""Experience that is written, loaded, extended and sampled, against a list of rows in plain Python."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from searching import counts, searching

from wmcli.experience import Recorder, Replay, WindowSampler, read_segment, write_segment
from wmcli.experience.segment import open_frames
from wmcli.spaces import column_names
from wmcli.trainers.batches import gather
from wmcli.transfer import take_rows

STREAMS, STEPS, SEGMENTS = 3, 14, 4
CLOSES = 10_000  # added to the number of the row that a closing observation follows


class Step(NamedTuple):
    """What an environment does in a step. `lost` without an end is an episode that was abandoned behind it."""

    ends: str
    """"", "terminated", "truncated" or "abandoned"."""
    lost: bool
    """A life is lost, and only an episode ends, where lives end episodes."""


class Row(NamedTuple):
    """A row of the model."""

    number: int
    first: bool
    terminated: bool
    truncated: bool
    opens: bool
    """Opens a game."""
    closing: bool = False


ENDS = st.sampled_from(["", "", "", "terminated", "truncated", "abandoned"])
TIMELINES = st.integers(1, STREAMS).flatmap(
    lambda streams: st.lists(
        st.lists(st.builds(Step, ENDS, st.booleans()), min_size=streams, max_size=streams),
        min_size=1,
        max_size=STEPS,
    )
)


def observed(number: int | np.ndarray, parts: bool) -> dict[str, np.ndarray]:
    """Observations that tell the numbers of rows (E,)."""
    number = np.asarray(number)
    frame = np.zeros((*number.shape, 4, 3, 2), np.uint8)
    frame[..., 0, 0, 0], frame[..., 0, 0, 1], frame[..., 0, 1, 0] = number % 100, number // 100 % 100, number // 10_000
    return {"image": frame, "vector": number[..., None].astype(np.float32)} if parts else {"": frame}


def numbers_in(frames: np.ndarray) -> np.ndarray:
    frames = np.asarray(frames, np.int64)
    return frames[..., 0, 0, 0] + 100 * frames[..., 0, 0, 1] + 10_000 * frames[..., 0, 1, 0]


def tree(parts: dict[str, np.ndarray]) -> object:
    return parts.get("", parts)


class World:
    """Segments as they are recorded, and the rows of each stream as they are meant."""

    def __init__(self, steps: list[list[Step]], cuts: list[int], lives: bool, parts: bool) -> None:
        streams = len(steps[0])
        bounds = sorted({0, len(steps), *(cut % len(steps) for cut in cuts)})
        self.rows: list[list[Row]] = [[] for _ in range(streams)]
        self.arrival: dict[int, int] = {}  # number of a row -> place among all rows
        self.segments: list[dict[str, np.ndarray]] = []
        self.left = [5] * streams
        first, opens, number = [True] * streams, [True] * streams, 0
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            recorder = Recorder(end - begin, streams)
            for step in steps[begin:end]:
                columns = {"first": np.array(first), "reward": np.zeros(streams, np.float32)}
                ids = number + np.arange(streams)
                number += streams
                closing = {}
                flags = {name: np.zeros(streams, bool) for name in ("terminated", "truncated")}
                after = np.zeros(streams, np.int16)
                for stream, (ends, lost) in enumerate(step):
                    row = int(ids[stream])
                    self.arrival[row] = len(self.arrival)
                    if opens[stream]:
                        self.left[stream] = 5
                    ended = ends in flags
                    if ended:
                        flags[ends][stream] = True
                        closing[stream] = tree(observed(row + CLOSES, parts))
                    life_only = lives and ends == "terminated" and lost and self.left[stream] > 1
                    if life_only:
                        self.left[stream] -= 1
                    after[stream] = self.left[stream] if life_only or not ended else 0
                    over = ended or ends == "abandoned"
                    self.rows[stream].append(
                        Row(row, first[stream], ends == "terminated", ends == "truncated", opens[stream])
                    )
                    if ended:
                        self.rows[stream].append(
                            Row(row + CLOSES, False, ends == "terminated", ends == "truncated", False, True)
                        )
                    first[stream] = over
                    opens[stream] = over and not life_only
                columns |= flags | {"lives": after, "action": (ids % 7).astype(np.int32)}
                columns["reward"] = ids.astype(np.float32)
                columns |= column_names("observation", tree(observed(ids, parts)))
                recorder.add(columns, closing)
            self.segments.append(recorder.arrays())
        for rows in self.rows:  # an episode without an end is truncated where another one follows
            for place in range(len(rows) - 1):
                row, after_it = rows[place], rows[place + 1]
                if after_it.first and not row.closing and not row.terminated:
                    rows[place] = row._replace(truncated=True)

    def runs(self, across_ends: bool, closing: bool) -> list[list[Row]]:
        """Rows of the streams, or of their episodes in the order in which these began."""
        streams = [[row for row in rows if closing or not row.closing] for rows in self.rows]
        if across_ends:
            return streams
        episodes: list[list[Row]] = []
        for rows in streams:
            for row in rows:
                if row.first:
                    episodes.append([])
                episodes[-1].append(row)
        return sorted(episodes, key=lambda episode: self.arrival[episode[0].number])


def windows_of(run: list[Row], length: int, minimum: int, pad: str) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """All windows of a run, as numbers of rows, None where padded, by the words of the sampler's documentation."""
    found = []
    for place in range(len(run) - minimum + 1):
        begin = place if pad == "right" else place + minimum - length
        times = range(begin, begin + length)
        numbers = tuple(run[min(max(time, 0), len(run) - 1)].number for time in times)
        found.append((numbers, tuple(0 <= time < len(run) for time in times)))
    return found


@counts(12, 400)
def test_what_is_written_loaded_and_sampled_is_what_was_played(examples: int) -> None:
    @searching(examples)
    @given(
        TIMELINES,
        st.lists(st.integers(1, STEPS), max_size=SEGMENTS - 1),
        *(st.booleans() for _ in range(4)),
        st.integers(1, 6),
        st.integers(1, 6),
        st.sampled_from(["left", "right"]),
        st.sampled_from(["windows", "uniform", "episodes"]),
    )
    def holds(
        steps: list[list[Step]],
        cuts: list[int],
        lives: bool,
        parts: bool,
        closing: bool,
        disk: bool,
        length: int,
        minimum: int,
        pad: str,
        sampling: str,
    ) -> None:
        minimum = min(minimum, length)
        world = World(steps, cuts, lives, parts)
        replay = Replay("cpu", lives_end_episodes=lives, closing=closing, frames_on="disk" if disk else "auto")
        with tempfile.TemporaryDirectory() as folder:
            for index, segment in enumerate(world.segments):
                path = Path(folder) / f"{index}.zarr"
                write_segment(path, segment)
                loaded = read_segment(path, frames=not disk)
                for name, column in loaded.items():
                    assert column.dtype == segment[name].dtype
                    np.testing.assert_array_equal(column, segment[name], err_msg=name)
                replay.extend(loaded, stored=open_frames(path) if disk else None)
            image = replay.observation["image"] if parts else replay.observation
            numbers = numbers_in(take_rows(image, np.arange(len(replay)), replay.device).numpy())
            sampled(world, replay, numbers)
            for across_ends in (False, True):
                runs, order = replay.runs(across_ends)
                mine = world.runs(across_ends, closing)
                assert [numbers[order[s : s + n]].tolist() for s, n in zip(*runs, strict=True)] == [
                    [row.number for row in run] for run in mine
                ]
                want = [window for run in mine for window in windows_of(run, length, minimum, pad)]
                if not want:
                    continue
                rng = np.random.default_rng(0)
                sampler = WindowSampler(
                    runs, order, length=length, minimum=minimum, pad=pad, sampling=sampling, rng=rng
                )
                assert sampler.windows == len(want)
                batch = sampler.batch(len(want) * (1 if sampling != "episodes" else 40))
                got = {
                    (tuple(numbers[rows].tolist()), tuple(valid.tolist()))
                    for rows, valid in zip(batch.rows, batch.valid, strict=True)
                }
                assert got == set(want) if sampling != "episodes" else got <= set(want)
                by_number = {row.number: row for rows in world.rows for row in rows}
                made = gather(replay, image, batch, across_ends=across_ends)
                opens = "opens" if across_ends else "first"
                firsts = [[getattr(by_number[n], opens) for n in row] for row in numbers[batch.rows].tolist()]
                np.testing.assert_array_equal(made.is_first.numpy(), np.array(firsts) & batch.valid)
                np.testing.assert_array_equal(numbers_in(made.inputs.numpy()), numbers[batch.rows])

    def sampled(world: World, replay: Replay, numbers: np.ndarray) -> None:
        by_number = {row.number: row for rows in world.rows for row in rows}
        rows = [by_number[int(number)] for number in numbers]
        assert len(rows) == len({row.number for row in rows})
        assert replay.first.tolist() == [row.first for row in rows]
        assert replay.terminated.tolist() == [row.terminated for row in rows]
        assert replay.truncated.tolist() == [row.truncated for row in rows]
        assert replay.opens_game.tolist() == [row.opens for row in rows]
        assert replay.reward.tolist() == [0.0 if row.closing else float(row.number) for row in rows]
        assert replay.action.tolist() == [0 if row.closing else row.number % 7 for row in rows]
        if replay.closing:
            assert replay.is_closing.tolist() == [row.closing for row in rows]
        vectors = replay.observation.get("vector") if isinstance(replay.observation, dict) else None
        if vectors is not None:
            assert vectors[:, 0].tolist() == [float(number) for number in numbers]

    holds()
