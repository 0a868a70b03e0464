"""The records of a run in progress: what has been appended since the last look, and the time of work so far."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from wmcli.artifacts.overview import moment, seconds_of_work
from wmcli.artifacts.store import records_in
from wmcli.errors import WmError
from wmcli.reading import open_file

MOST_BYTES = 1 << 20  # of one look, which takes some 0.2 s


class Growth(NamedTuple):
    """What one look at the records found."""

    records: list[dict[str, Any]]
    restarted: bool
    """The file is another one than before, or shorter: these are its first records. Without a file, not yet."""
    more: bool
    """There are more to read."""


class Tail:
    """Reads a metrics.jsonl as it grows, without lines that a crash cut short."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0

    def read(self, most: int = MOST_BYTES) -> Growth:
        """Return the whole lines that have been appended, of at most so many bytes."""
        try:
            with open_file(self._path) as file:
                status = os.fstat(file.fileno())
                restarted = (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset
                if restarted:
                    self._file, self._offset = (status.st_dev, status.st_ino), 0
                file.seek(self._offset)
                data = file.read(most)
        except (OSError, WmError):  # not yet there, or no longer, or no such file
            self._file = None
            return Growth([], False, False)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == most:  # no record is that long
            end = len(data)
        self._offset += end
        return Growth(records_in(data[:end]), restarted, len(data) == most)


class WorkTime:
    """When processes worked on a run, from its records one by one."""

    def __init__(self) -> None:
        self._processes: dict[datetime | None, list[datetime]] = {}  # by their start, the times of their records

    def add(self, record: Mapping[str, Any]) -> bool:
        """Add a record. Return whether it is the first of another process."""
        time, began = moment(record.get("time")), moment(record.get("began"))
        if time is None:
            return False
        self._processes.setdefault(began, []).append(time)
        return len(self._processes[began]) == 1

    @property
    def newest(self) -> datetime | None:
        """Time of the newest record."""
        return max((times[-1] for times in self._processes.values()), default=None)

    def until(self, end: datetime) -> float:
        """Return the seconds of work up to a moment, as `seconds_of_work` of these records."""
        ends = []
        for began, times in self._processes.items():
            for time in times[:1] + times[max(bisect_right(times, end) - 1, 0) :][:1]:
                ends.append({"time": time.isoformat()} | ({} if began is None else {"began": began.isoformat()}))
        return seconds_of_work(ends, end)
