"""One attempt at a run of a sweep: a process of `wm run`, its log, and a record of what became of it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from wmcli.errors import BusyError, Stopped
from wmcli.interrupt import STOPPING

if TYPE_CHECKING:
    from wmcli.sweeps.plan import PlannedRun

POLL_SECONDS = 0.1
BUSY_SECONDS = 60.0  # a predecessor that dies on another machine holds the run's locks so long at most
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes
_PR_SET_PDEATHSIG = 1

_children: set[subprocess.Popen[bytes]] = set()


def attempt(
    run: PlannedRun,
    records: Path,
    *,
    executor: str,
    job: str = "",
    environment: Mapping[str, str] | None = None,
    heard: list[int] | None = None,
) -> int:
    """Start or go on with a run, wait for its end, and record it.

    In a main thread, signals stop the run at a checkpoint. If this process dies, the run stops as well.

    Args:
        run: The run.
        records: Folder of records and logs.
        executor: What runs it, for the record.
        job: Its job there.
        environment: Variables for the process.
        heard: Gets the signals that arrive in a main thread.

    Returns:
        Its exit code; 75 after a checkpoint.
    """
    records.mkdir(parents=True, exist_ok=True)
    before = read_record(run, records) or {}
    began, started = datetime.now(UTC), time.monotonic()
    record = {
        "state": "running",
        "executor": executor,
        "job": job,
        "host": socket.gethostname(),
        "attempts": before.get("attempts", 0) + 1,
        "began": began.isoformat(timespec="seconds"),
        "ended": None,
        "seconds": before.get("seconds", 0.0),
        "peak_bytes": before.get("peak_bytes", 0),
        "code": None,
        "last": None,
        "arguments": list(run.arguments),
    }
    while True:
        with _started(run, records, environment, [] if heard is None else heard) as child:
            write_record(run, records, record | {"pid": child.pid})
            code, peak = _wait(child)
        if code != BusyError.exit_code or time.monotonic() - started > BUSY_SECONDS:
            break
        time.sleep(1.0)
    state = {0: "done", Stopped.exit_code: "stopped"}.get(code, "failed")
    record |= {"state": state, "code": code, "ended": datetime.now(UTC).isoformat(timespec="seconds")}
    record["seconds"] += time.monotonic() - started
    record["peak_bytes"] = max(record["peak_bytes"], peak)
    write_record(run, records, record | {"pid": None, "last": last_line(log_file(run, records))})
    return code


def stop_attempts() -> None:
    """Ask all runs of this process to stop at a checkpoint, each once."""
    for child in list(_children):
        _children.discard(child)
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)


@contextmanager
def _started(
    run: PlannedRun, records: Path, environment: Mapping[str, str] | None, heard: list[int]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process of a run. It is in a session of its own, since Ctrl-C goes to a whole one."""
    command = [sys.executable, "-m", "wmcli", *run.arguments]
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died before
                os._exit(Stopped.exit_code)

    path = os.pathsep.join(part for part in sys.path if part)  # a user's environments, and wm itself
    variables = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    with log_file(run, records).open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    _children.add(child)
    with _forwarding(child, heard):
        try:
            yield child
        finally:
            _children.discard(child)


@contextmanager
def _forwarding(child: subprocess.Popen[bytes], heard: list[int]) -> Iterator[None]:
    """Pass the first signal to stop on to the child. Only a main thread hears signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if child in _children:
            _children.discard(child)
            child.send_signal(signal.SIGTERM)

    previous = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Wait for the end of a process. Return its exit code, as a shell gives it, and its peak memory in bytes."""
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            child.returncode = code
            return code if code >= 0 else 128 - code, usage.ru_maxrss * RSS_UNIT
        time.sleep(POLL_SECONDS)


# -- records and logs -------------------------------------------------------------------------------------------------


def log_file(run: PlannedRun, records: Path) -> Path:
    """Return the file of all that a run printed, over all attempts."""
    return records / f"{_name(run)}.log"


def read_record(run: PlannedRun, records: Path) -> dict[str, Any] | None:
    """Return what the last attempt at a run recorded; None before the first."""
    try:
        record = json.loads((records / f"{_name(run)}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def write_record(run: PlannedRun, records: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a run atomically."""
    write_atomically(records / f"{_name(run)}.json", json.dumps(record, indent=1) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write a text so that readers see the old one or the new one whole."""
    draft = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
    draft.write_text(text)
    draft.replace(file)


def last_line(log: Path) -> str | None:
    """Return the last line of a log that is not empty."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _name(run: PlannedRun) -> str:
    return run.name.replace("/", "__")
