"""Weights & Biases and Trackio: processes beside a run that send what it logs.

A process for each library follows metrics.jsonl of its run, so it also sends what other processes write there. It notes
how far it came, and the next one goes on from there, whatever was killed. Library, network and server can neither stop
the run nor let it wait: all that they have to say is one warning.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from filelock import FileLock, Timeout

from wmcli.artifacts.store import refuse_link
from wmcli.errors import UsageError, WmError
from wmcli.reading import open_file, read_file

PROJECT = "wm"
ABOUT = ("stage", "update", "time", "job", "version")
"""Entries of a record that are not plotted."""
POLL_SECONDS = 1.0  # between two looks at metrics.jsonl
CLOSE_SECONDS = 30.0  # that a command waits at its end; the process goes on after that
MAX_NOTE_BYTES = 1 << 16
BATCH_BYTES = 1 << 20  # between two notes of how far it came
MOST_LETTERS = 300  # of an error


class Point(NamedTuple):
    """The numbers of a record, at a place on the x axis of its stage."""

    stage: str
    axis: str
    """Name of the x axis: `update` in a training stage, `environment_step` elsewhere."""
    step: int
    values: dict[str, float]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Point:
        axis = "update" if "update" in record else "environment_step"
        values = {key: value for key, value in record.items() if key not in ABOUT and isinstance(value, int | float)}
        return cls(record["stage"], axis, record[axis], values)


def check_installed(sinks: Iterable[str]) -> None:
    """Raise UsageError if a library is missing."""
    for name in sinks:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of this name is no library
            raise UsageError(
                f"training.log_to holds {name}, which is not installed: pip install 'wmcli[{name}]', or go on without:"
                " --set 'training.log_to=[\"tensorboard\"]'"
            )


# -- in the process of the run ----------------------------------------------------------------------------------------

_followers: dict[tuple[str, Path], _Follower] = {}


def follow(sinks: Iterable[str], metrics: Path, config: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Send a run's records from now on, and those that were not sent before. Pass on what the libraries have to say.

    Args:
        sinks: Names of libraries.
        metrics: metrics.jsonl of the run.
        config: Settings to show beside the curves.
        warn: Shows one line to the user.
    """
    for name in sinks:
        key = name, metrics.absolute()
        if key not in _followers:
            if not _followers:
                atexit.register(close)
            _followers[key] = _Follower(name, metrics.absolute(), config, warn)
        _followers[key].listen()


def close() -> None:
    """Let every process send the rest, and wait for them up to `CLOSE_SECONDS`."""
    deadline = time.monotonic() + CLOSE_SECONDS
    for follower in _followers.values():
        follower.end()
    for follower in _followers.values():
        follower.wait(max(0.0, deadline - time.monotonic()))
    _followers.clear()
    atexit.unregister(close)


class _Follower:
    """A process that follows a run for one library. It ends when this one does."""

    def __init__(self, name: str, metrics: Path, config: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "wmcli.training.sinks", name, str(metrics)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run
            )
            assert self._process.stdin is not None and self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            self._process.stdin.write(json.dumps(config, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            warn(f"{name} gets nothing: {error.strerror}; metrics.jsonl has all of it.")

    def listen(self) -> None:
        """Pass on what the process has said since."""
        if self._process is not None and self._process.stdout is not None:
            for line in (self._process.stdout.read() or b"").decode(errors="replace").splitlines():
                self._warn(line)

    def end(self) -> None:
        """Let the process send the rest and end."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, and pass on what it said."""
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._warn(f"{self._name} is still at it; a process in the background sends the rest.")
            self._process.returncode = 0  # or Python would complain of a process that still runs
        self.listen()
        if self._process.stdout is not None:
            self._process.stdout.close()


# -- in the other process ---------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The run at a library, and how far it was sent."""

    run: str
    """Folder. A run that was moved or copied becomes another one, with all of its records."""
    id: str
    sent: int
    """Bytes of metrics.jsonl."""


class _Sink(Protocol):
    def log(self, point: Point) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    def __init__(self, place: _Place, config: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        import wandb

        run = Path(place.run)
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "id": place.id,
            "name": run.name,
            "dir": place.run,
            "config": config,
            "allow_val_change": True,
            "resume": "allow",
            "settings": wandb.Settings(console="off", silent=True),
        }
        try:
            self._run = wandb.init(**options)
        except Exception as error:
            self._run = wandb.init(**options, mode="offline")
            folder = shlex.quote(str(run / "wandb"))
            tell(f"wandb logs offline ({_one_line(error)}); send it later: wandb sync {folder}/offline-run-*")
        self._stages: set[str] = set()

    def log(self, point: Point) -> None:
        """Log a point over the stage's own axis: W&B's is one for all stages, and may not go back."""
        axis = f"{point.stage}/{point.axis}"
        if point.stage not in self._stages:
            self._stages.add(point.stage)
            self._run.define_metric(axis)
            self._run.define_metric(f"{point.stage}/*", step_metric=axis)
        self._run.log({f"{point.stage}/{name}": value for name, value in point.values.items()} | {axis: point.step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, place: _Place, config: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        import trackio

        warnings.showwarning = self._tell  # it raises nothing
        self._told, self._pass_on = False, tell
        self._run = trackio.init(
            project=PROJECT,
            name=f"{Path(place.run).name}-{place.id}",  # trackio knows runs by their names
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, point: Point) -> None:
        self._run.log({f"{point.stage}/{name}": value for name, value in point.values.items()}, step=point.step)

    def close(self) -> None:
        self._run.finish()

    def _tell(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if not self._told:
            self._told = True
            self._pass_on(f"trackio: {_one_line(message)}")


SINKS: dict[str, Callable[[_Place, Mapping[str, Any], Callable[[str], None]], _Sink]] = {
    "wandb": _Wandb,
    "trackio": _Trackio,
}


def serve(name: str, metrics: Path, requests: BinaryIO, tell: Callable[[str], None]) -> None:
    """Follow a run until `requests`, whose first line is the config, ends."""
    config = json.loads(requests.readline())
    ended = threading.Event()

    def wait() -> None:
        requests.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    folder = metrics.parent / name
    try:
        for path in (folder, folder / ".wm.lock", folder / "wm.partial"):
            refuse_link(path)
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / ".wm.lock")
        while not _acquire(lock):  # the process of another command sends this one's records as well
            if ended.is_set():
                return
        _send(SINKS[name], metrics, folder / "wm.json", config, ended, tell)
    except Exception as error:
        tell(f"{name} gets nothing more ({_one_line(error)}); the next command on this run tries again.")


def _acquire(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=POLL_SECONDS)
    except Timeout:
        return False
    return True


def _send(
    sink: Callable[[_Place, Mapping[str, Any], Callable[[str], None]], _Sink],
    metrics: Path,
    note: Path,
    config: Mapping[str, Any],
    ended: threading.Event,
    tell: Callable[[str], None],
) -> None:
    place = _read_place(note, metrics)
    opened: _Sink | None = None
    try:
        while True:
            is_last = ended.is_set()  # before reading, so that everything before the end is read
            for points, sent in _batches(metrics, place.sent):
                opened = opened or sink(place, config, tell)
                for point in points:
                    opened.log(point)
                place = place._replace(sent=sent)
                draft = note.with_suffix(".partial")
                draft.write_text(json.dumps(place._asdict()), encoding="utf-8")
                draft.replace(note)
            if is_last:
                return
            ended.wait(POLL_SECONDS)
    finally:
        if opened is not None:
            opened.close()


def _read_place(note: Path, metrics: Path) -> _Place:
    """Return how far the run was sent, a new place for a run that was not."""
    run, size = str(metrics.parent.resolve()), metrics.stat().st_size
    with suppress(OSError, ValueError, TypeError, RecursionError, WmError):
        place = _Place(**json.loads(read_file(note, MAX_NOTE_BYTES)))
        if place.run == run and isinstance(place.id, str) and 0 <= place.sent <= size:
            return place
    return _Place(run, secrets.token_hex(4), 0)


def _batches(metrics: Path, begin: int) -> Iterator[tuple[list[Point], int]]:
    """Yield the points of all whole lines from the byte `begin` on, some at a time, and the byte behind them."""
    with open_file(metrics) as file:
        file.seek(begin)
        while lines := file.readlines(BATCH_BYTES):
            is_cut = not lines[-1].endswith(b"\n")  # still being written, and read again as a whole by the next call
            if is_cut:
                lines.pop()
            begin += sum(map(len, lines))
            points = []
            for line in lines:
                with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a crash cut it short
                    points.append(Point.of(json.loads(line)))
            if lines:
                yield points, begin
            if is_cut:
                return


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:MOST_LETTERS] or type(error).__name__


def main(name: str, metrics: str) -> None:
    """Serve, deaf to the signals that are for the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    reports = os.dup(1)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 (libraries print)
        os.dup2(nowhere.fileno(), 1)

    def tell(line: str) -> None:
        with suppress(OSError):  # nobody listens any more
            os.write(reports, f"{line}\n".encode())

    serve(name, Path(metrics), sys.stdin.buffer, tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
