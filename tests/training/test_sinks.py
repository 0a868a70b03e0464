"""Weights & Biases and Trackio get every record once, and nothing that they do stops a run or lets it wait."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in_wandb import entries, install

from wmcli.artifacts import Run
from wmcli.errors import UsageError
from wmcli.training import sinks
from wmcli.training.logs import EventLog
from wmcli.training.sinks import Point

CONFIG = {"preset": "quickstart", "dynamics": {"learning_rate": 1e-3}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(tmp_path / "catch", create=True)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    sinks.close()


def training(update: int, loss: float = 0.5) -> dict[str, Any]:
    about = {"time": "2026-01-01T00:00:00", "job": "abc", "version": 1, "environment_step": 90}
    return {"stage": "train-dynamics", "update": update, "loss": loss, **about, "priors": {"width": [1.0]}}


def played(step: int, value: float) -> dict[str, Any]:
    return {"stage": "collect", "environment_step": step, "mean_return": value, "time": "2026-01-01T00:00:00"}


def command(run: Run, names: list[str], records: list[dict[str, Any]], warned: list[str]) -> None:
    """Log as one command does that ends behind it."""
    log = EventLog(run, names, CONFIG, warned.append)
    for record in records:
        run.log(record)
        log.add(record)
    sinks.close()


# -- the libraries themselves -----------------------------------------------------------------------------------------


def chunks(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log in blocks of 32 KiB, behind a header of seven bytes."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


def stored_by_wandb(file: Path) -> tuple[Any, list[dict[str, float]], dict[str, str]]:
    """Return the run, the history and the axis of each metric in a file of an offline run."""
    from wandb.proto import wandb_internal_pb2 as records

    about, history, axes = None, [], {}
    for data in chunks(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            about = record.run
        elif record.HasField("metric"):
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif record.HasField("history"):
            items = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
            history.append({key: value for key, value in items.items() if not key.startswith("_")})
    return about, history, axes


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the extra wandb")
def test_wandb_offline_stores_all_records_of_two_commands_as_one_run(
    run: Run, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(run.path.parent))  # no account
    command(run, ["wandb"], [training(2), training(4, 0.25), played(90, -1.0)], warned)
    command(run, ["wandb"], [training(3), played(60, 1.0)], warned)  # from an earlier checkpoint
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2
    (first, before, axes), (second, after, _) = map(stored_by_wandb, files)
    assert first.run_id == second.run_id and len(first.run_id) == 8
    assert (first.project, first.display_name) == ("wm", "catch")
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["preset"] == "quickstart" and config["dynamics"] == {"learning_rate": 1e-3}
    x = "train-dynamics/update"
    assert before == [
        {x: 2, "train-dynamics/loss": 0.5, "train-dynamics/environment_step": 90},
        {x: 4, "train-dynamics/loss": 0.25, "train-dynamics/environment_step": 90},
        {"collect/environment_step": 90, "collect/mean_return": -1.0},
    ]
    assert after == [
        {x: 3, "train-dynamics/loss": 0.5, "train-dynamics/environment_step": 90},
        {"collect/environment_step": 60, "collect/mean_return": 1.0},
    ]
    assert axes["train-dynamics/*"] == x and axes["collect/*"] == "collect/environment_step"
    assert len(warned) == 2 and warned[0].startswith("wandb logs offline (") and "wandb sync " in warned[0]
    assert not (run.path / "tensorboard").exists(), "only what was asked for"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the extra trackio")
def test_trackio_stores_all_records_of_two_commands_as_one_run(
    run: Run, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(run.path.parent / "trackio"))
    command(run, ["trackio", "tensorboard"], [training(2), training(4, 0.25), played(90, -1.0)], warned)
    command(run, ["trackio", "tensorboard"], [training(3), played(60, 1.0)], warned)
    with sqlite3.connect(run.path.parent / "trackio" / "wm.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    database.close()
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("catch-")
    at_90 = {"train-dynamics/environment_step": 90}
    assert [(step, json.loads(metrics)) for _, step, metrics in rows] == [
        (2, {"train-dynamics/loss": 0.5} | at_90),
        (4, {"train-dynamics/loss": 0.25} | at_90),
        (90, {"collect/mean_return": -1.0, "collect/environment_step": 90}),
        (3, {"train-dynamics/loss": 0.5} | at_90),
        (60, {"collect/mean_return": 1.0, "collect/environment_step": 60}),
    ]
    assert not warned
    assert sorted(folder.name for folder in (run.path / "tensorboard").iterdir()) == ["collect", "train-dynamics"]


# -- a stand-in for a library -----------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path, monkeypatch)


def updates(stored: Path) -> list[int]:
    return [each["train-dynamics/update"] for each in entries(stored, "log")]


def wait_for(condition: Any, seconds: float = 20) -> None:
    since = time.monotonic()
    while not condition():
        assert time.monotonic() - since < seconds
        time.sleep(0.02)


def test_without_an_account_one_line_says_how_to_send_it_later(
    run: Run, stored: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_ACCOUNT", "1")
    command(run, ["wandb"], [training(1), training(2)], warned)
    folder = run.path / "wandb"
    assert warned == [f"wandb logs offline (no account); send it later: wandb sync {folder}/offline-run-*"]
    (given,) = entries(stored, "init")
    assert given.pop("id") == json.loads((folder / "wm.json").read_text())["id"]
    how = {"mode": "offline", "dir": str(run.path), "resume": "allow", "allow_val_change": True}
    assert given == {"project": "wm", "name": "catch", "config": CONFIG} | how
    assert updates(stored) == [1, 2] and entries(stored, "finish") == [2]
    assert capfd.readouterr() == ("", ""), "stdout is for results"


@pytest.mark.slow
def test_a_failure_in_the_middle_is_one_warning_and_the_next_command_sends_the_rest(
    run: Run, stored: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(run, ["wandb"], CONFIG, warned.append)
    monkeypatch.setenv("FAILS_AFTER", "2")
    for update in range(1, 6):
        run.log(training(update))
        log.add(training(update))
    wait_for(lambda: entries(stored, "finish"))
    for update in range(6, 9):
        run.log(training(update))
        log.add(training(update))
    sinks.close()
    assert warned == ["wandb gets nothing more (the server is gone); the next command on this run tries again."]
    assert len(run.history()) == 8
    monkeypatch.delenv("FAILS_AFTER")
    stored.unlink()
    command(run, ["wandb"], [training(9)], warned)
    assert updates(stored) == [*range(1, 10)] and len(warned) == 1  # the batch that failed is sent again


@pytest.mark.slow
def test_a_library_that_hangs_lets_nobody_wait(
    run: Run, stored: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGS", "2")
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.5)
    log = EventLog(run, ["wandb"], CONFIG, warned.append)
    began = time.monotonic()
    for update in range(3000):
        record = training(update)
        run.log(record)
        log.add(record)
    assert time.monotonic() - began < 2
    began = time.monotonic()
    sinks.close()
    assert time.monotonic() - began < 1.5
    assert warned == ["wandb is still at it; a process in the background sends the rest."]
    wait_for(lambda: entries(stored, "finish"))
    assert updates(stored) == [*range(3000)]


def test_a_kill_of_the_run_loses_nothing(run: Run, stored: Path, warned: list[str]) -> None:
    """Its end closes the pipe, and the other process sends the rest; signals are not for it."""
    log = EventLog(run, ["wandb"], CONFIG, warned.append)
    run.log(training(1))
    log.add(training(1))
    (follower,) = sinks._followers.values()
    process = follower._process
    assert process is not None and process.stdin is not None
    wait_for(lambda: updates(stored) == [1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(process.pid, number)
    run.log(training(2))
    process.stdin.close()
    assert process.wait(20) == 0
    assert updates(stored) == [1, 2] and entries(stored, "finish") == [2]


def test_a_kill_of_both_sends_the_rest_with_the_next_command(run: Run, stored: Path, warned: list[str]) -> None:
    log = EventLog(run, ["wandb"], CONFIG, warned.append)
    run.log(training(1))
    log.add(training(1))
    (follower,) = sinks._followers.values()
    assert follower._process is not None
    wait_for(lambda: (run.path / "wandb" / "wm.json").exists())
    follower._process.kill()
    run.log(training(2))
    log.add(training(2))
    sinks.close()
    command(run, ["wandb"], [training(3)], warned)
    assert updates(stored) == [1, 2, 3] and not warned
    assert len({each["id"] for each in entries(stored, "init")}) == 1


def test_a_run_that_was_copied_becomes_another_one_with_all_of_its_records(
    run: Run, stored: Path, warned: list[str], tmp_path: Path
) -> None:
    import shutil

    command(run, ["wandb"], [training(1), training(2)], warned)
    shutil.copytree(run.path, tmp_path / "copy")
    command(Run.open(tmp_path / "copy", create=False), ["wandb"], [training(3)], warned)
    assert updates(stored) == [1, 2, 1, 2, 3]
    first, second = entries(stored, "init")
    assert first["id"] != second["id"] and second["name"] == "copy"


@pytest.mark.slow
def test_two_commands_at_once_send_every_record_once(run: Run, stored: Path, warned: list[str]) -> None:
    log = EventLog(run, ["wandb"], CONFIG, warned.append)
    run.log(training(1))
    log.add(training(1))
    wait_for(lambda: updates(stored) == [1])
    first = sinks._followers.copy()
    sinks._followers.clear()  # as another process has it
    other = EventLog(run, ["wandb"], CONFIG, warned.append)
    run.log(training(2))
    other.add(training(2))
    sinks.close()
    sinks._followers.update(first)
    run.log(training(3))
    log.add(training(3))
    sinks.close()
    assert updates(stored) == [1, 2, 3] and len(entries(stored, "init")) == 1 and not warned


# -- what is sent -----------------------------------------------------------------------------------------------------


class Kept:
    """A sink in this process."""

    opened: list[Kept] = []
    fails = False

    def __init__(self, place: Any, config: Any, tell: Any) -> None:
        self.place, self.config, self.points = place, config, []
        self.closed = False
        Kept.opened.append(self)

    def log(self, point: Point) -> None:
        self.points.append(point)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    Kept.opened = []
    monkeypatch.setitem(sinks.SINKS, "wandb", Kept)
    monkeypatch.setattr(sinks, "POLL_SECONDS", 0.01)
    return Kept.opened


def serve(run: Run) -> list[str]:
    told: list[str] = []
    sinks.serve("wandb", run.metrics, io.BytesIO(json.dumps(CONFIG).encode() + b"\n"), told.append)
    return told


def test_lines_that_are_no_records_are_left_out_and_unfinished_ones_wait(run: Run, kept: list[Kept]) -> None:
    run.log(training(1))
    with run.metrics.open("ab") as file:
        file.write(b'{"stage": "x", "upd\n[1]\n{"stage": "eval"}\n\xff\n' + b"[" * 100_000 + b"\n")
    run.log(training(2, float("nan")))
    run.log(training(3))
    with run.metrics.open("ab") as file:
        file.write(b'{"stage": "train-dynamics", "upd')
    assert serve(run) == []
    assert [(point.stage, point.axis, point.step) for point in kept[0].points] == [
        ("train-dynamics", "update", update) for update in (1, 2, 3)
    ]
    assert [point.values.get("loss") for point in kept[0].points] == [0.5, None, 0.5]
    assert kept[0].closed and kept[0].config == CONFIG
    with run.metrics.open("ab") as file:
        file.write(b'ate": 4, "loss": 1}\n')
    serve(run)
    assert [(point.step, point.values) for point in kept[1].points] == [(4, {"loss": 1})]
    serve(run)
    assert len(kept) == 2, "nothing new, nothing opened"
    run.metrics.write_bytes(b"")
    run.log(training(1))
    serve(run)  # a new run in the old place
    assert [point.step for point in kept[2].points] == [1] and kept[2].place.id != kept[1].place.id


def test_a_line_that_is_finished_while_those_before_it_are_sent_is_sent_whole(run: Run) -> None:
    run.log(training(1))
    with run.metrics.open("ab") as file:
        file.write(b'{"stage": "train-dynamics", "upd')
    batches = sinks._batches(run.metrics, 0)
    ((one,), sent) = next(batches)
    with run.metrics.open("ab") as file:
        file.write(b'ate": 2, "loss": 1}\n')
    assert one.step == 1 and not list(batches)
    (((two,), end),) = sinks._batches(run.metrics, sent)
    assert two.step == 2 and end == run.metrics.stat().st_size


@pytest.mark.parametrize("note", ["", "{", "[1]", '{"run": 1}', '{"run": "/elsewhere", "id": "a", "sent": 0}', "null"])
def test_a_damaged_note_makes_another_run_of_it(run: Run, kept: list[Kept], note: str) -> None:
    run.log(training(1))
    serve(run)
    (run.path / "wandb" / "wm.json").write_text(note, encoding="utf-8")
    run.log(training(2))
    assert serve(run) == []
    assert [point.step for point in kept[1].points] == [1, 2] and kept[0].place.id != kept[1].place.id


def test_many_records_are_sent_in_batches_that_count_by_themselves(
    run: Run, kept: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "BATCH_BYTES", 1000)
    for update in range(50):
        run.log(training(update))
    log = Kept.log

    def failing(self: Kept, point: Point) -> None:
        if point.step == 33 and len(kept) == 1:
            raise OSError("no space")
        log(self, point)

    monkeypatch.setattr(Kept, "log", failing)
    told = serve(run)
    assert told == ["wandb gets nothing more (no space); the next command on this run tries again."] and kept[0].closed
    assert serve(run) == []
    steps = [point.step for each in kept for point in each.points]
    assert sorted(set(steps)) == [*range(50)] and 50 <= len(steps) < 60, "only the batch that failed is sent again"


def test_records_are_sent_while_the_run_goes_on(run: Run, kept: list[Kept]) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as requests, os.fdopen(writer, "wb") as ends:
        ends.write(b"{}\n")
        ends.flush()
        run.log(training(1))
        thread = threading.Thread(target=sinks.serve, args=("wandb", run.metrics, requests, print))
        thread.start()
        for update in (2, 3):
            wait_for(lambda last=update: kept and [p.step for p in kept[0].points] == [*range(1, last)])
            run.log(training(update))
        ends.close()
        thread.join(20)
    assert [point.step for point in kept[0].points] == [1, 2, 3] and kept[0].closed


def test_a_library_that_is_missing_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()  # as in a folder where W&B has logged
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "trackio", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'wmcli\[trackio\]'") as caught:
        sinks.check_installed(["trackio"])
    assert "\n" not in str(caught.value)
    sinks.check_installed([])
