"""One attempt at a run of a sweep: `wm` in a process of its own, with a log and a record beside the runs.

Every executor runs this function, wherever it starts the runs. An attempt that ends early is followed by another one,
which goes on from the run's last checkpoint.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wmcli.artifacts.files import make_folder, write_durable
from wmcli.artifacts.manifest import Table
from wmcli.errors import BusyError, Stopped
from wmcli.interrupt import ASKING, ENDING, PASSED_ON, PATIENCE, StopRequest, stop_requests
from wmcli.memory import peak_of, peak_resident
from wmcli.reading import damage, read_file

if TYPE_CHECKING:
    from wmcli.sweeps.plan import PlannedRun

DONE, FAILED, STOPPED, RUNNING = "done", "failed", "stopped", "running"
MAX_RECORD_BYTES = 1 << 20
POLL_SECONDS = 0.1
BUSY_SECONDS = 60.0  # a predecessor on another node may hold the run's lock until it has noticed its end
BUSY_INTERVAL = 2.0
LONGER = 4.0  # seconds more patience than `wm` has, to see and record its end


def attempt(
    run: PlannedRun, records: Path, *, executor: str, job: str = "", environment: Mapping[str, str] | None = None
) -> int:
    """Start `wm` for a run, wait for its end and record it.

    A signal that asks this process to stop makes `wm` stop at a checkpoint. `wm` does not outlive this process (on
    Linux). While another process holds the run's lock, it is tried again for a minute.

    Args:
        run: The run.
        records: Folder of the sweep's records and logs.
        executor: Name of the executor, for the record.
        job: The executor's name for this job, for the record.
        environment: Variables in addition to those of this process.

    Returns:
        The exit code of `wm`; 75 if it stopped and the same run can go on, 128 + N if signal N ended it.
    """
    make_folder(records)
    record = _begin(run, records, executor, job)
    before, began = record["seconds"], time.monotonic()
    write_record(run, records, record)
    with stop_requests(PATIENCE + LONGER) as stop:
        end = _run_wm(run, records, os.environ | dict(environment or {}), stop)
    ours = read_record(run, records)
    if ours is None or all(ours[key] == record[key] for key in ("host", "pid", "attempts")):  # else a successor runs
        record["seconds"] = before + time.monotonic() - began
        record["peak_bytes"] = max(record["peak_bytes"], end.peak_bytes)
        write_record(run, records, record | _ending(end.code, _last_line(log_of(run, records))))
    return end.code


# -- records ----------------------------------------------------------------------------------------------------------


def read_record(run: PlannedRun, records: Path) -> dict[str, Any] | None:
    """Return the record of a run's newest attempt, None before the first.

    `state` is "running", "stopped" (it can go on), "failed" or "done". `seconds` of work and `attempts` add up over the
    attempts with these `arguments`, and `peak_bytes` of memory is the largest; times are those of the newest.
    """
    path = _file(run, records, ".json")
    if not path.exists():
        return None
    with damage(path):
        record: dict[str, Any] = json.loads(
            read_file(path, MAX_RECORD_BYTES), object_hook=lambda table: Table(str(path), table)
        )
        if not isinstance(record, dict):
            raise ValueError("no record")
    return record


def write_record(run: PlannedRun, records: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a run's newest attempt atomically."""
    write_durable(_file(run, records, ".json"), [json.dumps(record, indent=2).encode() + b"\n"])


def record_end(run: PlannedRun, records: Path, *, executor: str, job: str, code: int, last: str) -> None:
    """Record the end of a job that could not do so itself, because it was killed or never began."""
    make_folder(records)
    record = read_record(run, records)
    if record is None or record["job"] != job:
        record = _begin(run, records, executor, job)
    write_record(run, records, record | _ending(code, last))


def log_of(run: PlannedRun, records: Path) -> Path:
    """Return the path of the log of all attempts at a run."""
    return _file(run, records, ".log")


def _begin(run: PlannedRun, records: Path, executor: str, job: str) -> dict[str, Any]:
    """Return the record of an attempt that begins."""
    before = read_record(run, records)
    if before is None or before["arguments"] != list(run.arguments):
        before = {"attempts": 0, "seconds": 0.0, "peak_bytes": 0}
    return {
        "state": RUNNING,
        "executor": executor,
        "job": job,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "attempts": before["attempts"] + 1,
        "began": _now(),
        "ended": None,
        "seconds": before["seconds"],
        "peak_bytes": before["peak_bytes"],
        "code": None,
        "last": "",
        "arguments": list(run.arguments),
    }


def _ending(code: int, last: str) -> dict[str, Any]:
    """Return what an end adds to a record."""
    return {
        "state": {0: DONE, Stopped.exit_code: STOPPED}.get(code, FAILED),
        "ended": _now(),
        "code": code,
        "last": last,
    }


def _file(run: PlannedRun, records: Path, suffix: str) -> Path:
    return records / f"{run.stem}{suffix}"


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 4096, 0))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- the process ------------------------------------------------------------------------------------------------------


class _End(NamedTuple):
    code: int
    peak_bytes: int


def _run_wm(run: PlannedRun, records: Path, environment: Mapping[str, str], stop: StopRequest) -> _End:
    """Run `wm` to its end, again while another process holds the run's lock."""
    deadline = time.monotonic() + BUSY_SECONDS
    while not stop:
        end = _run_once(run, records, environment, stop)
        if end.code != BusyError.exit_code or time.monotonic() > deadline:
            return end
        time.sleep(BUSY_INTERVAL)
    return _End(Stopped.exit_code, 0)


def _run_once(run: PlannedRun, records: Path, environment: Mapping[str, str], stop: StopRequest) -> _End:
    line = [sys.executable, "-m", "wmcli.sweeps.child", str(os.getpid()), *run.arguments]
    with log_of(run, records).open("ab") as log:
        process = subprocess.Popen(
            line,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C goes to a whole process group; here we pass it on, once
        )
    asked, peak = False, 0
    try:
        while True:
            with suppress(OSError):  # it has ended, or this is not Linux
                peak = peak_resident(process.pid)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)  # `Popen.wait` would drop the usage
            if ended:
                break
            if stop and not asked:
                process.send_signal(PASSED_ON)
                asked = True
            time.sleep(POLL_SECONDS)
        code = process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if process.returncode is None:  # an exception in this process
            process.kill()
            process.wait()
    if -code in (*ENDING, *ASKING):  # it had not begun to catch them
        code = Stopped.exit_code
    return _End(code if code >= 0 else 128 - code, peak or peak_of(usage))
