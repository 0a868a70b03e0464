"""An attempt starts `wm`, passes on a request to stop once, records the end, and takes `wm` with it when it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import wmcli.sweeps.attempt as module
from wmcli.interrupt import stop_requests
from wmcli.sweeps.attempt import attempt, log_of, read_record, write_record
from wmcli.sweeps.plan import PlannedRun

STAND_IN = f"""#!{sys.executable}
# Started as `python -m wmcli.sweeps.child PARENT WORDS`.
import os, signal, sys, time
folder, words = {{folder!r}}, sys.argv[4:]
count = len(os.listdir(folder))
open(os.path.join(folder, str(count)), "w").close()
print("begins with", *words, os.environ.get("EXTRA"), flush=True)
if words[0] == "codes":
    print("ends\\n", file=sys.stderr)
    time.sleep(0.3)  # its memory is looked at every tenth
    sys.exit(int(words[1:][count]))
if words[0] == "die":
    os.kill(os.getpid(), int(words[1]))
asked = []
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, lambda number, frame: asked.append(number))
open(os.path.join(folder, "ready"), "w").close()
while not asked:
    time.sleep(0.01)
time.sleep(0.5)
print("asked", len(asked), flush=True)
sys.exit(75)
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program stands for Python and `wm`; it notes its starts in this folder."""
    folder, script = tmp_path / "starts", tmp_path / "stand-in"
    folder.mkdir()
    script.write_text(STAND_IN.replace("{folder!r}", repr(str(folder))))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(module, "BUSY_INTERVAL", 0.1)
    return folder


def planned(tmp_path: Path, *words: str) -> PlannedRun:
    return PlannedRun("Catch-v0/seed-1", tmp_path / "Catch-v0" / "seed-1", words)


def signal_when(path: Path, *numbers: int) -> threading.Thread:
    """Send signals to this process when a file appears."""

    def work() -> None:
        while not path.exists():
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (75, "stopped"), (5, "failed")])
def test_the_end_is_recorded(tmp_path: Path, starts: Path, code: int, state: str) -> None:
    records, run = tmp_path / "sweep" / ".sweep", planned(tmp_path, "codes", str(code))
    assert bytearray(b"x") * 200_000_000  # the memory of this process is not that of the run
    assert attempt(run, records, executor="local", job="17", environment={"EXTRA": "more"}) == code
    record = read_record(run, records)
    assert record is not None
    assert record == json.loads((records / "Catch-v0__seed-1.json").read_text())
    expected = {"state": state, "executor": "local", "job": "17", "pid": os.getpid(), "attempts": 1, "code": code}
    assert record.items() >= (expected | {"last": "ends", "arguments": ["codes", str(code)]}).items()
    assert 0 < record["seconds"] < 30 and 10**6 < record["peak_bytes"] < 10**8
    assert record["began"] <= record["ended"]
    assert log_of(run, records) == records / "Catch-v0__seed-1.log"
    assert log_of(run, records).read_text() == f"begins with codes {code} more\nends\n\n"


def test_attempts_add_up_while_the_arguments_stay(tmp_path: Path, starts: Path) -> None:
    run = planned(tmp_path, "codes", "75", "5", "0")
    seconds = []
    for number in (1, 2, 3):
        attempt(run, tmp_path, executor="local")
        record = read_record(run, tmp_path)
        assert record is not None and record["attempts"] == number
        seconds.append(record["seconds"])
    assert seconds[0] < seconds[1] < seconds[2]
    assert log_of(run, tmp_path).read_text().count("begins") == 3
    other = planned(tmp_path, "codes", "-", "-", "-", "0")
    attempt(other, tmp_path, executor="local")
    record = read_record(other, tmp_path)
    assert record is not None and record["attempts"] == 1 and record["seconds"] < seconds[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_passed_on_once(tmp_path: Path, starts: Path, number: int) -> None:
    handlers = signal.getsignal(signal.SIGTERM)
    run = planned(tmp_path, "wait")
    thread = signal_when(starts / "ready", number, signal.SIGUSR1, signal.SIGUSR2)
    assert attempt(run, tmp_path, executor="local") == 75
    thread.join()
    record = read_record(run, tmp_path)
    assert record is not None and record["state"] == "stopped" and record["last"] == "asked 1"
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_the_request_reaches_attempts_in_other_threads(tmp_path: Path, starts: Path) -> None:
    codes = []
    with stop_requests():
        run = planned(tmp_path, "wait")
        thread = threading.Thread(target=lambda: codes.append(attempt(run, tmp_path, executor="local")))
        thread.start()
        signal_when(starts / "ready", signal.SIGTERM).join()
        thread.join(timeout=30)
    assert codes == [75]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGKILL, 137)])
def test_death_by_a_signal(tmp_path: Path, starts: Path, number: int, code: int) -> None:
    """The scheduler signals `wm` before it can catch that, or its memory is up."""
    assert attempt(planned(tmp_path, "die", str(int(number))), tmp_path, executor="local") == code


def test_it_waits_for_a_predecessor_that_holds_the_lock(tmp_path: Path, starts: Path) -> None:
    run = planned(tmp_path, "codes", "4", "4", "0")
    assert attempt(run, tmp_path, executor="local") == 0
    record = read_record(run, tmp_path)
    assert record is not None and record["attempts"] == 1
    assert len(list(starts.iterdir())) == 3


def test_it_waits_for_the_lock_for_a_minute_at_most(
    tmp_path: Path, starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.0)
    run = planned(tmp_path, "codes", "4", "4", "0")
    assert attempt(run, tmp_path, executor="local") == 4
    assert len(list(starts.iterdir())) == 1


def test_the_record_of_a_successor_stays(tmp_path: Path, starts: Path) -> None:
    """A node that was cut off ends its attempt late."""
    run = planned(tmp_path, "wait")
    successor = {"state": "running", "host": "other", "pid": 1, "attempts": 2}

    def take_over() -> None:
        while not (starts / "ready").exists():
            time.sleep(0.01)
        write_record(run, tmp_path, successor)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=take_over)
    thread.start()
    attempt(run, tmp_path, executor="local")
    thread.join()
    assert read_record(run, tmp_path) == successor


# -- with the real `wm` -----------------------------------------------------------------------------------------------


def test_who_has_lost_the_parent_before_does_not_begin() -> None:
    line = [sys.executable, "-m", "wmcli.sweeps.child"]
    ended = subprocess.run([*line, "1", "--version"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (75, "")
    ended = subprocess.run([*line, str(os.getpid()), "--version"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.startswith("wm ")


PARENT = """
import sys
from pathlib import Path
from wmcli.sweeps.attempt import attempt
from wmcli.sweeps.plan import PlannedRun
folder = Path(sys.argv[1])
attempt(PlannedRun("one", folder / "one", tuple(sys.argv[2:])), folder, executor="local")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the tie to the parent is Linux's")
def test_it_does_not_outlive_its_parent_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    """As when Ray or SLURM kills a worker: `wm` stops at a checkpoint, and lets go of the lock."""
    settings = ("environment.count=1", "collect.steps=400", "training.checkpoint_seconds=0", "training.device=cpu")
    words = ("collect", "--preset", "rem-quick", "--run", str(tmp_path / "one"))
    run = PlannedRun("one", tmp_path / "one", (*words, *(word for each in settings for word in ("--set", each))))
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), *run.arguments]) as parent:
        try:
            deadline = time.monotonic() + 60
            while not list(run.folder.glob("experience/.work-*/checkpoint.safetensors")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            parent.kill()
    record = read_record(run, tmp_path)
    assert record is not None and record["state"] == "running"  # nobody was left to write another word
    assert attempt(run, tmp_path, executor="local") == 0
    record = read_record(run, tmp_path)
    assert record is not None and (record["state"], record["attempts"]) == ("done", 2)
    assert "stopped after step" in log_of(run, tmp_path).read_text()
