"""Images of the experience that stay on disk, for a replay that memory cannot hold.

A column looks like a tensor (N, H, W, C) and reads what it is asked for. Chunks that were decoded last stay in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zarr

from wmcli.reading import damage

if TYPE_CHECKING:
    import torch

CACHE_BYTES = 1 << 28
"""Decoded chunks of a column that stay in memory."""


class _Part(NamedTuple):
    """The rows of one segment."""

    array: zarr.Array
    where: np.ndarray
    """int64 (n,): the place of each row in the array, or -1 - its place in `closing`."""
    closing: np.ndarray
    """Observations that close episodes."""


class StoredColumn:
    """A column (N, ...) of segments on disk, one behind the other.

    Attributes:
        device: Of what it returns: the CPU.
    """

    def __init__(self, like: np.ndarray) -> None:
        """Begin an empty column of rows like those of `like` (n, ...)."""
        import torch

        self.device = torch.device("cpu")
        self._row, self._kind = tuple(like.shape[1:]), like.dtype
        self._parts: list[_Part] = []
        self._starts = np.zeros(1, np.int64)  # row at which each segment begins, and the end
        self._chunks: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        self._held = 0  # bytes

    def append(self, array: zarr.Array, where: np.ndarray, closing: np.ndarray) -> None:
        """Add the rows of a segment.

        Args:
            array: Its observations.
            where: int64 (n,): the place of each row in the array, or -1 - its place in `closing`.
            closing: Observations that close episodes.
        """
        self._parts.append(_Part(array, where, closing))
        self._starts = np.append(self._starts, self._starts[-1] + len(where))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._row)

    @property
    def dtype(self) -> torch.dtype:
        return self[:0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, decoded."""
        return int(len(self) * np.prod(self._row) * self._kind.itemsize)

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """Return the rows of a slice or of an array of numbers."""
        return self.take(np.arange(len(self))[rows] if isinstance(rows, slice) else np.asarray(rows))

    def take(self, rows: np.ndarray, *, pinned: bool = False) -> torch.Tensor:
        """Return rows (...) int64 as a tensor (..., *row), in pinned memory if wanted.

        Raises:
            ArtifactError: A file is missing or damaged.
        """
        import torch

        wanted = rows.reshape(-1)
        found = torch.empty(len(wanted), *self._row, dtype=torch.from_numpy(np.empty(0, self._kind)).dtype)
        found = found.pin_memory() if pinned else found
        values = found.numpy()
        of_part = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(of_part).tolist():
            places = np.flatnonzero(of_part == number)
            index = self._parts[number].where[wanted[places] - self._starts[number]]
            closes = index < 0
            values[places[closes]] = self._parts[number].closing[-1 - index[closes]]
            self._read(number, index[~closes], values, places[~closes])
        return found.view(*rows.shape, *self._row)

    def _read(self, number: int, index: np.ndarray, values: np.ndarray, places: np.ndarray) -> None:
        """Copy the rows `index` of a segment's array to `places` of `values`."""
        size = self._parts[number].array.chunks[0]
        of_chunk = index // size
        chunks = np.unique(of_chunk)
        missing = [chunk for chunk in chunks.tolist() if (number, chunk) not in self._chunks]
        fetched = self._fetch(number, missing, size)
        for chunk in chunks.tolist():
            key = number, chunk
            data = fetched[chunk] if chunk in fetched else self._chunks[key]
            if key in self._chunks:
                self._chunks.move_to_end(key)
            here = of_chunk == chunk
            values[places[here]] = data[index[here] - chunk * size]
        for chunk, data in fetched.items():
            self._chunks[number, chunk] = data
            self._held += data.nbytes
        while self._held > CACHE_BYTES:
            _, oldest = self._chunks.popitem(last=False)
            self._held -= oldest.nbytes

    def _fetch(self, number: int, chunks: list[int], size: int) -> dict[int, np.ndarray]:
        """Decode chunks, those that follow one another in one call."""
        array = self._parts[number].array
        fetched: dict[int, np.ndarray] = {}
        for run in np.split(np.array(chunks, np.int64), np.flatnonzero(np.diff(chunks) != 1) + 1):
            if not len(run):
                continue
            with damage(str(array.store_path)):
                data = np.asarray(array[int(run[0]) * size : (int(run[-1]) + 1) * size])
            fetched |= {int(chunk): data[(chunk - run[0]) * size :][:size].copy() for chunk in run}
        return fetched
