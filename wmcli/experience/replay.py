"""The replay: all experience in memory, on the training device. Many frames may be on the host, or on disk, instead.

Axes: N rows. Rows are in order of arrival: segment after segment, those of one stream in order of time. An *order*
(position -> row) sorts them by episode or by stream, so that a window is a range of positions. An observation is a tree
of parts, see `wmcli.spaces`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from wmcli.errors import ArtifactError, MachineError
from wmcli.experience.segment import CLOSING, IMAGE_AXES, SAMPLED, SEARCHED, SKETCH, kind_of, lives_left, opens_game
from wmcli.experience.stored import StoredColumn
from wmcli.spaces import column_names, first_part, from_columns

if TYPE_CHECKING:
    import torch
    import zarr

FramesOn = Literal["auto", "device", "host", "disk"]
"""Where a replay keeps its frames. See `TrainingSettings.replay`."""
SHARE = 0.5  # of the device's free memory: larger frames go to the host with "auto"


class Episodes(NamedTuple):
    """Positions of E episodes, or streams, in an order."""

    start: np.ndarray  # int64 (E,): position of the first frame
    length: np.ndarray  # int64 (E,): frames


class Replay:
    """A growing store of rows as tensors on one device, or with the frames on the host.

    An *episode* is the rows of one stream from one with `first` to the next. The last one of each stream may be
    unfinished and continues in the next segment. An episode that its environment abandoned is truncated. A *game*
    continues after lost lives with `lives_end_episodes`; else every episode is a game. With `closing`, the observation
    that closes an episode is a row of its own behind the last one, as far as segments have it. Its action and reward
    are zero, its flags are those of the row before.

    Attributes:
        upto: Digest of the newest artifact in the replay, set by the caller.
        device: Device of the rows, and of the frames that are taken with `wmcli.transfer.take_rows`.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        lives_end_episodes: bool = False,
        closing: bool = False,
        frames_on: FramesOn = "auto",
    ) -> None:
        import torch

        self.upto: str | None = None
        self.device = torch.device(device)
        self.closing = closing
        self._frames_on = frames_on
        self._lives_end_episodes = lives_end_episodes
        self._columns: dict[str, torch.Tensor] = {}
        self._stored: dict[str, StoredColumn] = {}
        self._rows = self._expected = 0
        self._episode = np.zeros(0, np.int64)  # (N,): episode of each row
        self._stream = np.zeros(0, np.int64)  # (N,): stream of each row
        self._left = np.zeros(0, np.int16)  # (N,): see `lives_left`
        self._running: dict[int, int] = {}  # stream -> its newest episode
        self._newest: dict[int, int] = {}  # stream -> its newest row
        self._count = 0  # episodes

    def __len__(self) -> int:
        """Return the number of rows N."""
        return self._rows

    @property
    def observation(self) -> Any:
        """Tree of (N, *part), on the device or on the host. Images on disk are `StoredColumn`s."""
        in_memory = {name: column[: self._rows] for name, column in self._columns.items()}
        return from_columns("observation", in_memory | self._stored)

    @property
    def frames_on_host(self) -> bool:
        """Whether the observations are on the host, and the rows are not."""
        if not self._rows or self._stored:
            return False
        return first_part(self.observation).device.type != self.device.type

    @property
    def frames_on_disk(self) -> bool:
        """Whether images are on disk."""
        return bool(self._stored)

    @property
    def keeps_images(self) -> bool:
        """Whether images are to be kept in memory."""
        return self._frames_on != "disk"

    @property
    def action(self) -> torch.Tensor:
        """int64 or float32 (N, *action)."""
        return self._column("action")

    @property
    def reward(self) -> torch.Tensor:
        """float32 (N,), unclipped."""
        return self._column("reward")

    @property
    def terminated(self) -> torch.Tensor:
        """bool (N,)."""
        return self._column("terminated")

    @property
    def truncated(self) -> torch.Tensor:
        """bool (N,)."""
        return self._column("truncated")

    @property
    def first(self) -> torch.Tensor:
        """bool (N,)."""
        return self._column("first")

    @property
    def stream(self) -> np.ndarray:
        """int64 (N,): the environment that each row is of."""
        return self._stream

    @property
    def opens_game(self) -> torch.Tensor:
        """bool (N,): the frame is the first of a game, not only of a life."""
        return self._column("opens_game")

    @property
    def ends_game(self) -> torch.Tensor:
        """bool (N,): the frame is the last of its game."""
        return self._column("ends_game")

    @property
    def is_closing(self) -> torch.Tensor | None:
        """bool (N,): the observation closes an episode, and no action was taken in it. None without `closing`."""
        return self._column("is_closing") if self.closing else None

    @property
    def searched(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Search results of the rows, None if no segment has any.

        Policy float32 (N, A), value float32 (N,), and bool (N,): whether a search chose the row's action; then the
        actions (N, A, *action) that the policy belongs to where the search chose among samples, else None. Rows with
        fewer samples than others have zeros behind their own.
        """
        if "is_searched" not in self._columns:
            return None
        sampled = self._column(SAMPLED) if SAMPLED in self._columns else None
        return self._column("policy"), self._column("value"), self._column("is_searched"), sampled

    @property
    def order(self) -> np.ndarray:
        """int64 (N,): position -> row, episode after episode, each in order of time."""
        return self.runs(across_ends=False)[1]

    @property
    def episodes(self) -> Episodes:
        """Positions of the episodes in `order`, sorted by the rows of their first frames."""
        return self.runs(across_ends=False)[0]

    def runs(self, across_ends: bool) -> tuple[Episodes, np.ndarray]:
        """Return runs of consecutive rows, and their order int64 (N,).

        Args:
            across_ends: Each run is a whole stream instead of an episode.
        """
        run = self._stream if across_ends else self._episode
        length = np.bincount(run)
        length = length[length > 0]  # numbers of streams may have gaps
        return Episodes(np.cumsum(length) - length, length), np.argsort(run, kind="stable")

    def expect(self, rows: int) -> None:
        """Let the next segment allocate memory for so many rows in all, as far as they are known beforehand.

        Memory is allocated once, then: to grow later takes that of the old rows and of the new ones at a time.
        """
        self._expected = rows

    def reserve(self, rows: int, like: Mapping[str, np.ndarray]) -> None:
        """Allocate memory, so that growing does not copy.

        Args:
            rows: Total number of rows.
            like: Columns of a segment of any length, for their shapes and number types.

        Raises:
            MachineError: The device, or the host for observations kept there, has not enough memory.
        """
        import torch

        held = {name: (tuple(array.shape[1:]), _tensor_type(array.dtype)) for name, array in like.items()}
        held |= {name: (tuple(column.shape[1:]), column.dtype) for name, column in self._columns.items()}
        seen = [name for name in held if kind_of(name) == "observation"]
        size = rows * sum(math.prod(held[name][0]) * held[name][1].itemsize for name in seen)
        device = self.device
        try:
            for name, (shape, dtype) in held.items():
                if name in self._columns and len(self._columns[name]) >= rows:
                    continue
                device = self._place_frames(size) if name in seen else self.device
                # Some segments have no search results.
                allocate = torch.zeros if name in (*SEARCHED, SAMPLED, "is_searched") else torch.empty
                grown = allocate((rows, *shape), dtype=dtype, device=device)
                if name in self._columns:
                    grown[: self._rows] = self._column(name)
                self._columns[name] = grown
        except (RuntimeError, MemoryError) as error:
            elsewhere = (
                "on disk: --set training.replay=disk"
                if device.type == "cpu"
                else "in host memory: --set training.replay=host"
            )
            remedy = f"; to keep them {elsewhere}"
            raise MachineError(
                f"{rows} frames of experience ({size / 1e9:.1f} GB) do not fit in the memory of {device}: "
                f"{str(error).splitlines()[0] if str(error) else 'out of memory'}{remedy}"
            ) from error

    def _place_frames(self, size: int) -> torch.device:
        """Return the device for observations of `size` bytes. Those on the host stay there."""
        import torch

        host = torch.device("cpu")
        if self._frames_on == "host" or self.frames_on_host:
            return host
        if self._frames_on == "device" or self.device.type != "cuda":
            return self.device
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused
        return host if size > SHARE * free else self.device

    def extend(
        self,
        arrays: Mapping[str, np.ndarray],
        frames: Iterable[Any] | None = None,
        stored: Mapping[str, zarr.Array] | None = None,
    ) -> None:
        """Append a segment.

        Args:
            arrays: Columns, see `wmcli.experience.segment`.
            frames: The observation in blocks, trees of (n, ...), of which one at a time is in memory twice.
            stored: Its columns on disk. Images are left there, and `frames` is not read.

        Raises:
            ArtifactError: Observations or actions have another shape, or a stream starts in the middle of an unknown
                episode.
        """
        on_disk = {name: array for name, array in (stored or {}).items() if array.ndim == IMAGE_AXES}
        if stored is not None:
            frames = [from_columns("observation", {name: _in_memory(array, on_disk) for name, array in stored.items()})]
        blocks = iter((from_columns("observation", arrays),) if frames is None else frames)
        block = next(blocks)
        columns = {name: array for name, array in arrays.items() if name not in (SKETCH, "stream", "lives")}
        closing = {name: columns.pop(name) for name in arrays if kind_of(name) == CLOSING}
        columns = {name: array for name, array in columns.items() if kind_of(name) != "observation"}
        seen = column_names("observation", block)
        self._check_shapes(seen | columns)
        flags = {name: arrays[name] for name in ("terminated", "truncated", "first", "lives", "stream")}
        ended = flags["terminated"] | flags["truncated"]
        place = np.arange(len(ended))  # of each row behind those that are here
        closed = np.zeros(0, np.int64)  # places of the rows that close an episode
        if self.closing and closing:
            place += np.cumsum(ended) - ended
            closed = place[ended] + 1
            flags = {name: np.repeat(array, 1 + ended) for name, array in flags.items()}
            flags["first"][closed] = False
        streams = flags["stream"]
        numbers = self._number_episodes(flags["first"], streams)
        before = self._rows_before(streams)
        left = lives_left(flags) if self._lives_end_episodes else np.full(len(numbers), -1, np.int16)
        self._left = np.concatenate([self._left, left])
        opens = opens_game(flags["first"], flags["lives"], np.where(before >= 0, self._left[before], -1))
        ends = (flags["terminated"] | flags["truncated"]) & (left < 0)
        flags |= {"opens_game": opens, "ends_game": ends}
        if self.closing:
            flags["is_closing"] = np.isin(np.arange(len(numbers)), closed)
        if "policy" in arrays:
            columns["is_searched"] = np.ones(len(ended), bool)
        if SAMPLED in arrays:
            columns |= self._with_room_for_samples({name: arrays[name] for name in ("policy", SAMPLED)})
        rows = self._rows + len(numbers)
        room = len(self._columns["action"]) if self._columns else 0
        if rows > room:
            # Without an expectation by halves, so that each row is copied a few times at most.
            room = max(rows, self._expected or self._rows * 3 // 2)
        flags = {name: array for name, array in flags.items() if name not in ("lives", "stream")}
        columns = {name: array for name, array in columns.items() if name not in flags}
        held = {name: array for name, array in (seen | columns | flags).items() if name not in on_disk}
        self.reserve(room, held)

        for name, array in flags.items():
            self._put(name, slice(self._rows, rows), array)
        where = slice(self._rows, self._rows + len(place)) if not len(closed) else self._rows + place
        for name, array in columns.items():
            if len(closed):
                self._columns[name][self._rows : rows] = 0  # the closing rows
            self._put(name, where, array)
        end = 0
        for part in itertools.chain((block,), blocks):
            begin, end = end, end + len(first_part(part))
            for name, array in column_names("observation", part).items():
                if name in on_disk:
                    continue
                some = slice(self._rows + begin, self._rows + end) if not len(closed) else self._rows + place[begin:end]
                self._put(name, some, array)
        assert end == len(place), f"{end} frames for {len(place)} rows"
        closings = column_names("observation", from_columns(CLOSING, closing)) if len(closed) else {}
        for name, array in closings.items():
            if name not in on_disk:
                self._put(name, self._rows + closed, array)
        for name, source in on_disk.items():
            index = np.empty(len(numbers), np.int64)
            index[place], index[closed] = np.arange(len(place)), -1 - np.arange(len(closed))
            column = self._stored.setdefault(name, StoredColumn(_empty_like(source)))
            column.append(source, index, closings.get(name, _empty_like(source)))
        self._episode = np.concatenate([self._episode, numbers])
        self._stream = np.concatenate([self._stream, streams])
        self._rows = rows
        # An episode or game is over when another one follows, whatever its last row has.
        closed_by_next = before[flags["first"] & (before >= 0)]
        self._columns["truncated"][closed_by_next] |= ~self._columns["terminated"][closed_by_next]
        self._columns["ends_game"][before[opens & (before >= 0)]] = True

    def _with_room_for_samples(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Widen new columns (n, A, ...) and those that are here to the larger number of samples A, with zeros."""
        import torch

        wide = {}
        for name, array in columns.items():
            column = self._columns.get(name)
            missing = 0 if column is None else column.shape[1] - array.shape[1]
            if column is not None and missing < 0:
                zeros = column.new_zeros(len(column), -missing, *column.shape[2:])
                self._columns[name] = torch.cat((column, zeros), 1)
            wide[name] = np.pad(array, [(0, 0), (0, max(missing, 0)), *[(0, 0)] * (array.ndim - 2)])
        return wide

    def _put(self, name: str, rows: slice | np.ndarray, source: np.ndarray) -> None:
        """Write a column's values at rows. Converts the number type."""
        import torch

        tensor = torch.from_numpy(np.require(source, requirements=["C", "W"]))
        column = self._columns[name]
        if isinstance(rows, slice):
            column[rows].copy_(tensor)
        else:
            column[torch.from_numpy(rows).to(column.device)] = tensor.to(column)

    def _check_shapes(self, columns: Mapping[str, np.ndarray]) -> None:
        """Raise ArtifactError where columns do not continue those that are here."""
        if not self._columns:
            return
        ours = {name for name in (*self._columns, *self._stored) if kind_of(name) == "observation"}
        theirs = {name for name in columns if kind_of(name) == "observation"}
        if ours != theirs:
            raise ArtifactError(
                f"experience with {', '.join(sorted(theirs))} cannot join experience with {', '.join(sorted(ours))}."
            )
        for name in sorted(theirs | {"action"}):
            before = self._stored[name] if name in self._stored else self._columns[name]
            shape, expected = tuple(columns[name].shape[1:]), tuple(before.shape[1:])
            if shape != expected:
                what = "frames" if name == "observation" else name
                raise ArtifactError(f"{what} of shape {shape} cannot join experience with {what} of shape {expected}.")

    def _rows_before(self, stream: np.ndarray) -> np.ndarray:
        """Return the row before each new row in its stream, int64 (n,), or -1."""
        before = np.empty(len(stream), np.int64)
        for s in np.unique(stream).tolist():
            places = np.flatnonzero(stream == s)
            rows = self._rows + places
            before[places] = np.append(self._newest.get(s, -1), rows[:-1])
            self._newest[s] = int(rows[-1])
        return before

    def _number_episodes(self, first: np.ndarray, stream: np.ndarray) -> np.ndarray:
        """Return the episode of each new row, int64 (n,).

        Episodes are numbered by the rows of their first frames. So the numbers do not depend on the segments.
        """
        opened = self._count - 1 + np.cumsum(first)  # number of the episode at rows that open one
        numbers = np.empty(len(first), np.int64)
        running = dict(self._running)
        for s in np.unique(stream).tolist():
            rows = np.flatnonzero(stream == s)
            if not first[rows[0]] and s not in running:
                raise ArtifactError(f"stream {s} starts in the middle of an episode: an earlier segment is missing.")
            # Each row has the number of the newest opening row at or before it. Numbers grow with the rows.
            numbers[rows] = np.maximum.accumulate(np.where(first[rows], opened[rows], running.get(s, -1)))
            running[s] = int(numbers[rows[-1]])
        self._running = running
        self._count += int(first.sum())
        return numbers

    def _column(self, name: str) -> torch.Tensor:
        assert self._columns, "the replay is empty"
        return self._columns[name][: self._rows]


def _in_memory(array: zarr.Array, on_disk: Mapping[str, zarr.Array]) -> np.ndarray:
    """Return a column; of one that stays on disk only its length, shape and number type."""
    if any(array is each for each in on_disk.values()):
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return np.asarray(array[...])


def _empty_like(array: zarr.Array) -> np.ndarray:
    return np.empty((0, *array.shape[1:]), array.dtype)


def _tensor_type(dtype: np.dtype) -> torch.dtype:
    """Return the type of a column in memory: integers, which index tables, are int64."""
    import torch

    if dtype.kind == "i":
        return torch.int64
    return {"f": torch.float32, "b": torch.bool, "u": torch.uint8}[dtype.kind]
