"""`wm watch`: runs in progress, for a browser. Nothing here writes, or opens a payload except films.

One look a second serves all browsers. It reads the times of a run's folders, and only what changed since the last look.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wmcli.artifacts.lock import HOLDER, LOCK, read_holder
from wmcli.artifacts.manifest import CLOCK_TICK
from wmcli.artifacts.overview import (
    COLUMNS,
    describe_run,
    disk_usage,
    find_runs,
    is_locked,
    last_record,
    locked_folders,
    seconds_left,
)
from wmcli.artifacts.tail import Tail, WorkTime
from wmcli.browser.server import Message
from wmcli.errors import ArtifactError, UsageError, WmError
from wmcli.memory import PROC, peak_resident
from wmcli.stages.watched_run import RunDetail

RATE = 1.0  # looks a second
SOON = 10.0  # calls a second while something waits to be sent
LOOK_SHARE = 0.08  # of the time, if there are so many runs,
LONGEST_REST = 10.0  # but looks are at most so many seconds apart
NEW_SECONDS = 0.5  # of a look, for runs that were not there before
WALK_SECONDS = 0.05  # of a look, for the sizes of runs that changed
WALK_SHARE = 0.02  # of the time, for the size of one run that changes all the time
DescribeRun = Callable[[Path], Mapping[str, Any]]
DescribeSweep = Callable[[DescribeRun], Sequence[Mapping[str, Any]]]


class Watch:
    """Runs below some folders, or those of a sweep, as rows that stay up to date.

    Args:
        folders: Runs and folders of runs. They may appear later.
        sweep: Returns a row for each run of a sweep, as `wm sweep status`, from a function that describes a run
            directory. The folders are left alone then.
        resume: The command that goes on with all of them, if there is one.
    """

    def __init__(self, folders: Sequence[Path], sweep: DescribeSweep | None = None, resume: str | None = None) -> None:
        self.folders, self.sweep, self.resume = folders, sweep, resume
        self.rows: dict[str, dict[str, Any]] = {}
        """By name, see `_Run.row`; in a sweep with `attempts` and `last`, and its states as `status`."""
        self.paths: dict[str, Path] = {}
        """By name. The folder of a waiting run of a sweep may be missing."""
        self.unread = True
        """There are more runs to read at once."""
        self._runs: dict[Path, _Run] = {}
        self._due = 0.0  # the next look

    def look(self) -> None:
        """Look at all runs, unless that was done within the last second."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + 1 / RATE  # also where it fails
        self.unread = False
        rows = self._rows_of_sweep() if self.sweep else self._rows_of_folders()
        self.paths = {name: path for name, path, _ in rows}
        self.rows = {name: row for name, _, row in rows}
        kept = set(self.paths.values())
        self._runs = {path: run for path, run in self._runs.items() if path in kept}
        if not self.unread:
            self._measure_sizes()
        done = time.monotonic()
        rest = max(min((done - now) / LOOK_SHARE, LONGEST_REST), 0.9 / RATE - (done - now))
        self._due = done + (0.0 if self.unread else rest)

    def _rows_of_folders(self) -> list[tuple[str, Path, dict[str, Any]]]:
        found: dict[Path, str] = {}
        for folder in self.folders:
            with suppress(WmError, OSError):  # it may appear later
                for path in find_runs(folder):
                    found.setdefault(path.absolute(), self._name(path, folder))
        self._begin_new()
        rows = ((name, path, self._row(path)) for path, name in found.items())
        return [(name, path, {**row, "name": name}) for name, path, row in rows if row]

    def _rows_of_sweep(self) -> list[tuple[str, Path, dict[str, Any]]]:
        assert self.sweep is not None
        self._begin_new()
        try:
            states = self.sweep(self._row)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"a record of the sweep cannot be read: {error!r}") from None
        rows = []
        for state in states:
            path = Path(state["folder"])
            known = self._runs[path].row if path in self._runs else {}
            about = {key: value for key, value in state.items() if value is not None and key not in ("run", "folder")}
            peak = max(known.get("peak_bytes") or 0, state["peak_bytes"] or 0) or None
            about |= {"name": state["run"], "status": state["state"], "peak_bytes": peak}
            rows.append((state["run"], path, {**known, **about}))
        return rows

    def _begin_new(self) -> None:
        self._new_until = time.monotonic() + NEW_SECONDS

    def _row(self, path: Path) -> dict[str, Any]:
        """Return the row of a run, up to date; empty for a new run that must wait for the next look."""
        if path not in self._runs:
            if time.monotonic() > self._new_until:
                self.unread = True
                return {}
            self._runs[path] = _Run(path)
        return self._runs[path].look()

    def _name(self, path: Path, folder: Path) -> str:
        if len(self.folders) == 1:
            path = Path(path.absolute().name) if path == folder else path.relative_to(folder)
        return os.fsencode(path).decode(errors="backslashreplace")  # a name may be no text

    def _measure_sizes(self) -> None:
        """Measure the sizes of runs that changed, as many as time allows."""
        began = time.monotonic()
        for run in sorted(self._runs.values(), key=lambda run: run.measured):
            if time.monotonic() - began > WALK_SECONDS:
                return
            run.measure()


class WatchSession:
    """What one browser sees: all runs, and the details of one. See `wmcli.browser.server.Session`.

    Requests are `{"do": "open", "run": name}` and `{"do": "close"}`. Messages have these types:

    - `hello` and `runs`: `rows`, all or those that changed; `gone`, the names of runs that are no more; `unread`,
      whether more rows follow at once.
    - `run`: what changed, or all, of the open run, see `RunDetail.news`.
    - `points`: its curves from a point on.
    """

    def __init__(self, watch: Watch, title: str) -> None:
        self._watch, self._title = watch, title
        self._sent: dict[str, dict[str, Any]] = {}
        self._sent_unread = True
        self._open: RunDetail | None = None
        self._waiting: deque[Message] = deque()

    @property
    def rate(self) -> float:
        """Calls of `advance` a second."""
        unread = self._watch.unread or (self._open is not None and self._open.unread)
        return SOON if self._waiting or unread else RATE

    def hello(self) -> Message:
        """Return all rows. Details of an open run follow."""
        with suppress(WmError):  # `advance` tells of it
            self._watch.look()
        self._sent = dict(self._watch.rows)
        self._waiting.clear()
        if self._open is not None:
            self._open.forget_sent()
            self._waiting += self._details()
        self._sent_unread = self._watch.unread
        head = {"type": "hello", "title": self._title, "rows": list(self._sent.values()), "unread": self._sent_unread}
        return Message(head | {"sweep": self._watch.sweep is not None})

    def receive(self, request: dict[str, Any]) -> Message | None:
        """Open or close the details of a run."""
        name = request.get("run")
        if request.get("do") == "close":
            self._open = None
            self._waiting.clear()
        elif request.get("do") == "open" and isinstance(name, str):
            self._watch.look()
            if name not in self._watch.paths:
                raise UsageError(f"there is no run {name} here.")
            path = self._watch.paths[name]
            if self._open is not None and (self._open.name, self._open.path) == (name, path):
                self._open.forget_sent()  # the page has connected again
            else:
                self._open = RunDetail(name, path, self._watch.resume)
            self._waiting.clear()
            self._waiting += self._details()
        else:
            raise UsageError('a request is {"do": "open", "run": name} or {"do": "close"}.')
        return self._waiting.popleft() if self._waiting else None

    def advance(self) -> Message | None:
        """Return what is new, one message at a time."""
        if not self._waiting:
            self._watch.look()
            self._waiting += [*self._changes(), *self._details()]
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> str | None:
        """End the session. There is nothing to say."""
        return None

    def _changes(self) -> list[Message]:
        rows = self._watch.rows
        changed = [row for name, row in rows.items() if row != self._sent.get(name)]
        gone = [name for name in self._sent if name not in rows]
        if not changed and not gone and self._sent_unread == self._watch.unread:
            return []
        self._sent, self._sent_unread = dict(rows), self._watch.unread
        return [Message({"type": "runs", "rows": changed, "gone": gone, "unread": self._sent_unread})]

    def _details(self) -> list[Message]:
        if self._open is None:
            return []
        return [Message(head) for head in self._open.news(self._watch.rows.get(self._open.name))]


class _Run:
    """A run, as it was at the last look."""

    def __init__(self, path: Path) -> None:
        self.row: dict[str, Any] = {}
        """As of `describe_run`, with the last `stage`, whether the last process was `killed`, `seconds` of work,
        `peak_bytes` of memory and, while it runs, `updates_per_second`, `steps_per_second`, `seconds_left`."""
        self.measured = 0.0
        """When the bytes on disk were measured; 0 before the first time."""
        self._path, self._metrics = path, path / "metrics.jsonl"
        self._folders = locked_folders(path)
        self._state: tuple[Any, ...] = ()
        self._settled = False  # what is seen now cannot change under the same times
        self._holders: list[Path] = []
        self._dead: set[tuple[int, ...]] = set()  # notes of processes that died
        self._usage: tuple[int | None, float] = None, 0.0
        self._is_measured, self._walk_took = False, 0.0
        self._logged: tuple[int, ...] | None = None
        self._tail: Tail | None = None  # from the first look at which a process writes
        self._work, self._last = WorkTime(), dict[str, Any]()
        self._unread = False
        self._peak = 0

    def look(self) -> dict[str, Any]:
        """Return the row, up to date."""
        folders = [_state(folder) for folder in self._folders]
        if not self._settled or folders != list(self._state[: len(folders)]):
            self._holders = [folder for folder in self._folders if (folder / HOLDER).exists()]
        notes = {folder: _state(folder / HOLDER) for folder in self._holders}
        locked = [folder for folder, note in notes.items() if note is not None and self._is_held(folder, note)]
        logged = _state(self._metrics)
        state = (*folders, *notes.values(), *locked)
        if state != self._state or not self._settled:
            self._describe(folders, bool(locked))
            newest = max((each[-1] for each in (*folders, *notes.values()) if each is not None), default=0)
            self._state, self._settled = state, abs(time.time_ns() - newest) > CLOCK_TICK
        if logged != self._logged or self._unread or (locked and self._tail is None):
            self._logged = logged
            self._read(bool(locked))
        if locked:
            self._peak = max(self._peak, _peak_of(locked))
        self.row |= self._progress(bool(locked)) | {"killed": bool(notes) and not locked}
        if self._logged is not None:
            self.row["active"] = max(self.row["active"], _iso(self._logged[-1]))
        return self.row

    def _is_held(self, folder: Path, note: tuple[int, ...]) -> bool:
        """Return whether a process holds the lock of a folder.

        The note of a process that died is remembered: to find out takes the lock for a moment, which is done once.
        """
        if note in self._dead:
            return False
        if not (held := is_locked(folder)):
            self._dead.add(note)
        return held

    def _describe(self, folders: Sequence[tuple[int, ...] | None], locked: bool) -> None:
        newest = max((each[-1] for each in folders if each is not None), default=0) / 1e9
        usage = self._usage[0], max(self._usage[1], newest)
        try:
            self.row = describe_run(self._path, locked=locked, usage=usage)
        except (OSError, WmError) as error:  # for example while it is being deleted
            unknown = dict.fromkeys(COLUMNS) | {"bytes": usage[0], "active": _iso(int(usage[1] * 1e9))}
            self.row = unknown | {"status": "damaged", "problem": str(error)}
        self._is_measured = False

    def measure(self) -> None:
        """Measure the bytes on disk, unless they are known or it was done too recently."""
        now = time.monotonic()
        if self._is_measured or now < self.measured + self._walk_took / WALK_SHARE:
            return
        self._usage = disk_usage(self._path)
        self._is_measured, self.measured, self._walk_took = True, time.monotonic(), time.monotonic() - now
        self.row["bytes"] = self._usage[0]
        self.row["active"] = max(self.row["active"], _iso(int(self._usage[1] * 1e9)))

    def _read(self, locked: bool) -> None:
        """Read the last record; while a process writes all of them, for the time of work."""
        if locked and self._tail is None:
            self._tail = Tail(self._metrics)
        if self._tail is None:
            self._last = last_record(self._metrics)
            return
        growth = self._tail.read()
        if growth.restarted:
            self._work = WorkTime()
        for record in growth.records:
            self._work.add(record)
        self._last, self._unread = (growth.records or [self._last])[-1], growth.more

    def _progress(self, locked: bool) -> dict[str, Any]:
        """Return what the records say of a run, and the process that writes it."""
        newest = self._work.newest
        seconds = None if newest is None or self._unread else self._work.until(newest)
        about = {"stage": _text(self._last.get("stage")), "seconds": seconds, "peak_bytes": self._peak or None}
        if not locked:
            return about | dict.fromkeys(("updates_per_second", "steps_per_second", "seconds_left"))
        epoch, step = (_number(self._last.get(key)) for key in ("epoch", "environment_step"))
        return about | {
            "epoch": epoch or self.row["epoch"],
            "updates_per_second": _number(self._last.get("updates_per_second")),
            "steps_per_second": step / seconds if step and seconds else None,
            "seconds_left": seconds_left(epoch, self.row["epochs"], seconds),
        }


def _state(path: Path) -> tuple[int, ...] | None:
    """Return numbers that change when a file or the entries of a folder change, the time last; None without it."""
    try:
        status = os.stat(path)  # noqa: PTH116 (twice as fast)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _peak_of(locked: Sequence[Path]) -> int:
    """Return the most memory that the processes behind some locks have had, those of this machine, in bytes."""
    processes = set()
    for folder in locked:
        with suppress(OSError):
            holder = read_holder(folder)
            if holder is not None and holder.is_here and _has_open(holder.process, folder / LOCK):
                processes.add(holder.process)
    total = 0
    for process in processes:
        with suppress(OSError):
            total += peak_resident(process)
    return total


def _has_open(process: int, path: Path) -> bool:
    """Return whether a process of this machine has a file open. Raises OSError if there is no such process."""
    sought = path.stat()
    with os.scandir(PROC / str(process) / "fd") as entries:
        for entry in entries:
            with suppress(OSError):
                if os.path.samestat(entry.stat(), sought):
                    return True
    return False


def _iso(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
