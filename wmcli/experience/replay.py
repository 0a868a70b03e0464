"""All experience in memory, once: frames as uint8 on the training device.

N rows, H height, W width, C color channel. Rows stand as they arrived, streams interleaved. An *order*, position ->
row, lists them episode by episode or stream by stream, so that a window of either is a run of positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wmcli.errors import ArtifactError, MachineError
from wmcli.experience.segment import lives_left, opens_game

if TYPE_CHECKING:
    import torch


class Episodes(NamedTuple):
    """Where each of E episodes, or streams, lies in its order."""

    start: np.ndarray  # int64 (E,): position of the first frame
    length: np.ndarray  # int64 (E,): frames


class Replay:
    """A growing store of rows as tensors on one device.

    `frames` uint8 (N, H, W, C); `action` int64, `reward` float32, `terminated`, `truncated`, `first` bool, each (N,).
    Once a segment was played by a search: `policy` float32 (N, A) and `value` float32 (N,), what each search found, and
    `found` bool (N,), False in the rows of other segments.
    An *episode* is a run of rows of one stream from a row that opens one to the next; the last one of each stream may
    be unfinished and goes on with the next segment. One that was cut, because its environment began anew without ending
    it, is truncated. A *game* runs on over the lives that are lost in it where `lives_end_episodes`; elsewhere every
    episode is a game. `upto`: digest of the newest artifact in it, set by the caller.
    """

    def __init__(self, device: torch.device | str, *, lives_end_episodes: bool = False) -> None:
        import torch

        self.upto: str | None = None
        self.device = torch.device(device)
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
        self._episode = np.zeros(0, np.int64)  # (N,): which episode a row belongs to
        self._stream = np.zeros(0, np.int64)  # (N,): which stream a row belongs to
        self._left = np.zeros(0, np.int16)  # (N,): see `lives_left`
        self._running: dict[int, int] = {}  # stream -> its newest episode
        self._newest: dict[int, int] = {}  # stream -> its newest row
        self._count = 0  # episodes

    @classmethod
    def empty(cls, device: torch.device | str, *, lives_end_episodes: bool = False) -> Replay:
        """A memory without rows on `device`."""
        return cls(device, lives_end_episodes=lives_end_episodes)

    def __len__(self) -> int:
        """Rows."""
        return self._rows

    @property
    def frames(self) -> torch.Tensor:
        """uint8 (N, H, W, C)."""
        return self._column("observation")

    @property
    def action(self) -> torch.Tensor:
        """int64 (N,)."""
        return self._column("action")

    @property
    def reward(self) -> torch.Tensor:
        """float32 (N,), as the environment gave it."""
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
        """bool (N,): the frame opens a game, and not only its next life."""
        return self._column("opens_game")

    @property
    def ends_game(self) -> torch.Tensor:
        """bool (N,): the frame is the last of its game."""
        return self._column("ends_game")

    @property
    def searched(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """policy, value, found; None where no row was played by a search."""
        if "found" not in self._columns:
            return None
        return self._column("policy"), self._column("value"), self._column("found")

    @property
    def order(self) -> np.ndarray:
        """int64 (N,): position -> row, the episodes one after the other, each in the order of time."""
        return self.runs(across_ends=False)[1]

    @property
    def episodes(self) -> Episodes:
        """Where each episode lies in `order`, by the row of their first frame."""
        return self.runs(across_ends=False)[0]

    def runs(self, across_ends: bool) -> tuple[Episodes, np.ndarray]:
        """Runs of rows that follow each other in time, and the order, int64 (N,), in which they lie.

        Each run is an episode or, `across_ends`, a whole stream: its episodes one after the other.
        """
        run = self._stream if across_ends else self._episode
        length = np.bincount(run)
        length = length[length > 0]  # streams need not be numbered without gaps
        return Episodes(np.cumsum(length) - length, length), np.argsort(run, kind="stable")

    def reserve(self, rows: int, frame: tuple[int, ...], actions: int | None = None) -> None:
        """Make room for `rows` rows in all, of frames (H, W, C), so that growing does not copy; for what searches found
        as well, if the number of `actions` is given.

        Raises MachineError when the device has no room for them.
        """
        import torch

        dtypes, axes = dict(self._dtypes), {"observation": frame}
        if actions is not None or "policy" in self._columns:
            dtypes |= {"policy": torch.float32, "value": torch.float32, "found": torch.bool}
            axes["policy"] = (actions or self._columns["policy"].shape[1],)
        try:
            for name, dtype in dtypes.items():
                if name in self._columns and len(self._columns[name]) >= rows:
                    continue
                allocate = torch.empty if name in self._dtypes else torch.zeros  # not every segment was searched
                grown = allocate((rows, *axes.get(name, ())), dtype=dtype, device=self.device)
                if name in self._columns:
                    grown[: self._rows] = self._column(name)
                self._columns[name] = grown
        except (RuntimeError, MemoryError) as error:
            size = rows * int(np.prod(frame)) / 1e9
            raise MachineError(
                f"{rows} frames of experience ({size:.1f} GB) do not fit in the memory of {self.device}: "
                f"{str(error).splitlines()[0] if str(error) else 'out of memory'}"
            ) from error

    def extend(self, arrays: Mapping[str, np.ndarray], frames: Iterable[np.ndarray] | None = None) -> None:
        """Add a segment's arrays (see `segment.FIELDS` and `segment.SEARCHED`) behind what is there. `frames`: the
        observation in blocks (n, H, W, C), so that no more than one of them is in memory twice.

        Raises ArtifactError when its frames have another shape, or when a stream starts in the middle of an episode
        that this memory does not hold.
        """
        import torch

        blocks = iter((arrays["observation"],) if frames is None else frames)
        block = next(blocks)
        frame = block.shape[1:]
        if self._columns and frame != tuple(self._columns["observation"].shape[1:]):
            held = tuple(self._columns["observation"].shape[1:])
            raise ArtifactError(f"frames of shape {frame} cannot join experience with frames of shape {held}.")
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
            room = max(rows, self._rows * 3 // 2)  # by halves: each row is copied a few times at most
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
            self._columns["found"][self._rows : rows] = True
        self._episode = np.concatenate([self._episode, numbers])
        self._stream = np.concatenate([self._stream, arrays["stream"]])
        self._rows = rows
        # An episode or game that another one follows is over, whatever its last row says.
        closed = before[arrays["first"] & (before >= 0)]
        self._columns["truncated"][closed] |= ~self._columns["terminated"][closed]
        self._columns["ends_game"][before[opens & (before >= 0)]] = True

    def _rows_before(self, stream: np.ndarray) -> np.ndarray:
        """The row before each new row in its stream, int64 (n,), -1 where there is none."""
        before = np.empty(len(stream), np.int64)
        for s in np.unique(stream).tolist():
            places = np.flatnonzero(stream == s)
            rows = self._rows + places
            before[places] = np.append(self._newest.get(s, -1), rows[:-1])
            self._newest[s] = int(rows[-1])
        return before

    def _number_episodes(self, first: np.ndarray, stream: np.ndarray) -> np.ndarray:
        """The episode of each new row, int64 (n,). Episodes are numbered by the row of their first frame, so that the
        numbers do not depend on how the rows were cut into segments."""
        opened = self._count - 1 + np.cumsum(first)  # at rows that open one: its number
        numbers = np.empty(len(first), np.int64)
        running = dict(self._running)
        for s in np.unique(stream).tolist():
            rows = np.flatnonzero(stream == s)
            if not first[rows[0]] and s not in running:
                raise ArtifactError(f"stream {s} starts in the middle of an episode: an earlier segment is missing.")
            # each row takes the number of the newest opening row at or before it; numbers grow with the rows
            numbers[rows] = np.maximum.accumulate(np.where(first[rows], opened[rows], running.get(s, -1)))
            running[s] = int(numbers[rows[-1]])
        self._running = running
        self._count += int(first.sum())
        return numbers

    def _column(self, name: str) -> torch.Tensor:
        assert self._columns, "nothing in memory yet"
        return self._columns[name][: self._rows]
