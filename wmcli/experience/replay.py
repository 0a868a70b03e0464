"""The replay: all experience in memory, on the training device. Many uint8 frames may be on the host instead.

Axes: N rows, H height, W width, C color channel. Rows are in order of arrival, with streams interleaved. An *order*
(position -> row) sorts them by episode or by stream, so that a window is a range of positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from wmcli.errors import ArtifactError, MachineError
from wmcli.experience.segment import lives_left, opens_game

if TYPE_CHECKING:
    import torch

FramesOn = Literal["auto", "device", "host"]
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
    continues after lost lives with `lives_end_episodes`; else every episode is a game.

    Attributes:
        upto: Digest of the newest artifact in the replay, set by the caller.
        device: Device of the rows, and of the frames that are taken with `wmcli.transfer.take_rows`.
    """

    def __init__(
        self, device: torch.device | str, *, lives_end_episodes: bool = False, frames_on: FramesOn = "auto"
    ) -> None:
        import torch

        self.upto: str | None = None
        self.device = torch.device(device)
        self._frames_on = frames_on
        self._lives_end_episodes = lives_end_episodes
        self._dtypes = {
            "observation": torch.uint8,
            "action": torch.int64,
            "reward": torch.float32,
            "terminated": torch.bool,
            "truncated": torch.bool,
            "first": torch.bool,
            "opens_game": torch.bool,
            "ends_game": torch.bool,
        }
        self._columns: dict[str, torch.Tensor] = {}
        self._rows = 0
        self._episode = np.zeros(0, np.int64)  # (N,): episode of each row
        self._stream = np.zeros(0, np.int64)  # (N,): stream of each row
        self._left = np.zeros(0, np.int16)  # (N,): see `lives_left`
        self._running: dict[int, int] = {}  # stream -> its newest episode
        self._newest: dict[int, int] = {}  # stream -> its newest row
        self._count = 0  # episodes

    @classmethod
    def empty(
        cls, device: torch.device | str, *, lives_end_episodes: bool = False, frames_on: FramesOn = "auto"
    ) -> Replay:
        """Return a replay without rows."""
        return cls(device, lives_end_episodes=lives_end_episodes, frames_on=frames_on)

    def __len__(self) -> int:
        """Return the number of rows N."""
        return self._rows

    @property
    def frames(self) -> torch.Tensor:
        """uint8 (N, H, W, C), on the device or on the host."""
        return self._column("observation")

    @property
    def frames_on_host(self) -> bool:
        """Whether the frames are on the host, and the rows are not."""
        return self._rows > 0 and self.frames.device.type != self.device.type

    @property
    def action(self) -> torch.Tensor:
        """int64 (N,)."""
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
    def opens_game(self) -> torch.Tensor:
        """bool (N,): the frame is the first of a game, not only of a life."""
        return self._column("opens_game")

    @property
    def ends_game(self) -> torch.Tensor:
        """bool (N,): the frame is the last of its game."""
        return self._column("ends_game")

    @property
    def searched(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Search results of the rows, None if no segment has any.

        Policy float32 (N, A), value float32 (N,), and bool (N,): whether the row's segment was played by search.
        """
        if "is_searched" not in self._columns:
            return None
        return self._column("policy"), self._column("value"), self._column("is_searched")

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

    def reserve(self, rows: int, frame: tuple[int, ...], actions: int | None = None) -> None:
        """Allocate memory, so that growing does not copy.

        Args:
            rows: Total number of rows.
            frame: Shape (H, W, C) of a frame.
            actions: Number of actions A, to allocate search results too.

        Raises:
            MachineError: The device, or the host for frames kept there, has not enough memory.
        """
        import torch

        dtypes, axes = dict(self._dtypes), {"observation": frame}
        if actions is not None or "policy" in self._columns:
            dtypes |= {"policy": torch.float32, "value": torch.float32, "is_searched": torch.bool}
            axes["policy"] = (actions or self._columns["policy"].shape[1],)
        device = self.device
        try:
            for name, dtype in dtypes.items():
                if name in self._columns and len(self._columns[name]) >= rows:
                    continue
                allocate = torch.empty if name in self._dtypes else torch.zeros  # some segments have no search results
                device = self._place_frames(rows * int(np.prod(frame))) if name == "observation" else self.device
                grown = allocate((rows, *axes.get(name, ())), dtype=dtype, device=device)
                if name in self._columns:
                    grown[: self._rows] = self._column(name)
                self._columns[name] = grown
        except (RuntimeError, MemoryError) as error:
            size = rows * int(np.prod(frame)) / 1e9
            remedy = "" if device.type == "cpu" else "; to keep them in host memory: --set training.replay=host"
            raise MachineError(
                f"{rows} frames of experience ({size:.1f} GB) do not fit in the memory of {device}: "
                f"{str(error).splitlines()[0] if str(error) else 'out of memory'}{remedy}"
            ) from error

    def _place_frames(self, size: int) -> torch.device:
        """Return the device for frames of `size` bytes. Frames on the host stay there."""
        import torch

        host = torch.device("cpu")
        if self._frames_on == "host" or self.frames_on_host:
            return host
        if self._frames_on == "device" or self.device.type != "cuda":
            return self.device
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused
        return host if size > SHARE * free else self.device

    def extend(self, arrays: Mapping[str, np.ndarray], frames: Iterable[np.ndarray] | None = None) -> None:
        """Append a segment.

        Args:
            arrays: See `segment.FIELDS` and `segment.SEARCHED`.
            frames: The observation in blocks (n, H, W, C), of which one at a time is in memory twice.

        Raises:
            ArtifactError: Frames have another shape, or a stream starts in the middle of an unknown episode.
        """
        import torch

        blocks = iter((arrays["observation"],) if frames is None else frames)
        block = next(blocks)
        frame = block.shape[1:]
        if self._columns and frame != tuple(self._columns["observation"].shape[1:]):
            shape = tuple(self._columns["observation"].shape[1:])
            raise ArtifactError(f"frames of shape {frame} cannot join experience with frames of shape {shape}.")
        numbers = self._number_episodes(arrays["first"], arrays["stream"])
        before = self._rows_before(arrays["stream"])
        left = lives_left(arrays) if self._lives_end_episodes else np.full(len(numbers), -1, np.int16)
        self._left = np.concatenate([self._left, left])
        opens = opens_game(arrays["first"], arrays["lives"], np.where(before >= 0, self._left[before], -1))
        ends = (arrays["terminated"] | arrays["truncated"]) & (left < 0)
        arrays = {**arrays, "opens_game": opens, "ends_game": ends}
        rows = self._rows + len(numbers)
        room = len(self._columns["action"]) if self._columns else 0
        if rows > room:
            room = max(rows, self._rows * 3 // 2)  # by halves, so that each row is copied a few times at most
        self.reserve(room, frame, arrays["policy"].shape[1] if "policy" in arrays else None)

        def put(name: str, begin: int, source: np.ndarray) -> int:
            end = begin + len(source)
            tensor = torch.from_numpy(np.require(source, requirements=["C", "W"]))
            self._columns[name][begin:end].copy_(tensor)  # converts the type, too
            return end

        for name in (self._dtypes.keys() - {"observation"}) | (arrays.keys() & {"policy", "value"}):
            put(name, self._rows, arrays[name])
        end = put("observation", self._rows, block)
        for block in blocks:
            end = put("observation", end, block)
        assert end == rows, f"{end - self._rows} frames for {rows - self._rows} rows"
        if "policy" in arrays:
            self._columns["is_searched"][self._rows : rows] = True
        self._episode = np.concatenate([self._episode, numbers])
        self._stream = np.concatenate([self._stream, arrays["stream"]])
        self._rows = rows
        # An episode or game is over when another one follows, whatever its last row has.
        closed = before[arrays["first"] & (before >= 0)]
        self._columns["truncated"][closed] |= ~self._columns["terminated"][closed]
        self._columns["ends_game"][before[opens & (before >= 0)]] = True

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
