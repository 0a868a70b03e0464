"""`wm watch`: what its pages hear of runs that grow, end, die, go on, are deleted, damaged, old, or of a sweep."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import socket
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_run import command, copied, latest, opened, settings

from wmcli.artifacts import Run
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.overview import describe_run, seconds_of_work
from wmcli.browser.server import Message, Session, encode
from wmcli.errors import ArtifactError, UsageError
from wmcli.report.live_curves import thin
from wmcli.report.plots import curves_by_stage
from wmcli.stages import watch as module
from wmcli.stages import watched_run
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.watch import Watch, WatchSession
from wmcli.sweeps.attempt import write_record
from wmcli.sweeps.plan import read_sweep
from wmcli.sweeps.status import describe_sweep

OLD_RUNS = Path(__file__).parents[1] / "old_runs"
LONG = ["dynamics.updates=4000", "training.log_every=1", "training.checkpoint_seconds=0.3"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look looks."""
    monkeypatch.setattr(module, "RATE", 1e6)
    monkeypatch.setattr(module, "LOOK_SHARE", 1e6)


class Page:
    """What a page knows after the messages that it got, each of which went over the wire."""

    def __init__(self, watch: Watch) -> None:
        self.session: Session = WatchSession(watch, "runs")
        self.rows: dict[str, dict[str, Any]] = {}
        self.run: dict[str, Any] = {}
        self.curves: dict[str, dict[str, list[list[float]]]] = {}
        self.messages: list[dict[str, Any]] = []
        self.hear(self.session.hello())
        if self.session.rate == module.SOON:
            self.look()

    def hear(self, message: Message | None) -> bool:
        if message is None:
            return False
        head = json.loads(encode(message))
        self.messages.append(head)
        if head["type"] == "hello":
            self.rows = {row["name"]: row for row in head["rows"]}
        elif head["type"] == "runs":
            self.rows |= {row["name"]: row for row in head["rows"]}
            for name in head["gone"]:
                del self.rows[name]
        elif head["type"] == "run":
            self.run |= head
        else:
            assert head["type"] == "points"
            for curve in head["curves"]:
                points = self.curves.setdefault(curve["stage"], {}).setdefault(curve["metric"], [])
                assert curve["from"] <= len(points)
                points[curve["from"] :] = curve["points"]
        return True

    def ask(self, **request: Any) -> None:
        self.run, self.curves = {}, {}
        self.hear(self.session.receive(request))
        self.look()

    def look(self) -> None:
        """Hear all that is new now."""
        while self.hear(self.session.advance()) or self.session.rate == module.SOON:
            pass

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.rows, self.run)
            time.sleep(0.02)
            self.look()


def curves_of(run: Path) -> dict[str, dict[str, list[list[float]]]]:
    stages = curves_by_stage(Run.open(run, create=False).history())
    return {
        stage: {name: [list(point) for point in thin(*curve)] for name, curve in metrics.items()}
        for stage, metrics in stages.items()
    }


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.lstat().st_mtime_ns, file.lstat().st_size) for file in [folder, *folder.rglob("*")]}


# -- runs that stand still --------------------------------------------------------------------------------------------


def test_a_row_says_what_wm_runs_says(run: Path) -> None:
    watch = Watch([run.parent])
    page = Page(watch)
    page.look()  # the size comes later
    row, want = page.rows["run"], describe_run(run)
    assert {key: row[key] for key in want if key != "name"} == {key: want[key] for key in want if key != "name"}
    assert row["status"] == "finished" and row["stage"] == "eval" and row["bytes"] > 0 and not row["killed"]
    assert "hello" in page.messages[0]["type"] and page.messages[0]["title"] == "runs"
    count = len(page.messages)
    page.look()
    assert len(page.messages) == count, "nothing new, so nothing is sent"


def test_an_open_run_shows_what_other_commands_show(run: Path) -> None:
    page = Page(Watch([run.parent]))
    page.ask(do="open", run="run")
    assert page.curves == curves_of(run) and set(page.curves) == {"train-tokenizer", "train-dynamics", "imagine"}
    (point,) = page.run["returns"]
    metrics = latest(run, "evaluation").metrics
    assert {key: point[key] for key in ("mean", "stderr", "episodes")} == {
        key: metrics[key] for key in ("mean", "stderr", "episodes")
    }
    assert point["step"] == metrics["total_steps"] == 90
    history = Run.open(run, create=False).history()
    assert 0 < point["minutes"] * 60 <= seconds_of_work(history, watched_run.moment(history[-1]["time"]))  # type: ignore[arg-type]
    assert [event["text"].split(":")[0] for event in page.run["events"] if event["kind"] == "published"] == [
        "experience@1",
        "tokenizer@1",
        "dynamics@1",
        "controller@1",
        "evaluation@1",
    ]
    assert page.run["status"] == "finished" and page.run["command"] is None
    kind, _, data = page.run["film"]["src"].partition(";base64,")
    assert kind in ("data:image/webp", "data:image/gif") and page.run["film"]["caption"].startswith("evaluation@1: ")
    assert getattr(Image.open(io.BytesIO(base64.b64decode(data))), "n_frames", 1) > 1
    page.ask(do="close")
    assert not page.run


def test_a_film_that_is_too_large_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_run, "MOST_FILM_BYTES", 10)
    page = Page(Watch([run]))
    page.ask(do="open", run="run")
    assert page.run["film"]["src"] is None and "evaluation/v0001/" in page.run["film"]["caption"]


def test_a_browser_that_comes_back_hears_all_again(run: Path) -> None:
    page = Page(Watch([run.parent]))
    page.ask(do="open", run="run")
    before, page.run, page.curves, page.rows = (page.run, page.curves), {}, {}, {}
    page.hear(page.session.hello())
    page.look()
    assert (page.run, page.curves) == before and page.rows.keys() == {"run"}
    detail = page.session._open
    page.run, page.curves = {}, {}
    page.ask(do="open", run="run")  # as a page does that has connected again
    assert (page.run, page.curves) == before and page.session._open is detail, "nothing is read again"


def test_nothing_is_written_and_no_lock_is_held(run: Path) -> None:
    (run / "experience" / "latest").unlink()
    before = everything(run)
    page = Page(Watch([run.parent]))
    page.ask(do="open", run="run")
    assert everything(run) == before
    with exclusive(run / "dynamics", "dynamics"):
        page.look()
        assert page.rows["run"]["status"] == page.run["status"] == "running"


def test_names_are_text_and_requests_are_checked(run: Path, tmp_path: Path) -> None:
    odd = ["<b>&\"'", "a\nb", "\udcff", "日本", "x" * 200]
    for name in odd:
        copied(run, tmp_path / "more" / name)
    page = Page(Watch([tmp_path / "more"]))
    assert page.rows.keys() == {"<b>&\"'", "a\nb", "\\xff", "日本", "x" * 200}
    for name in page.rows:
        page.ask(do="open", run=name)
        assert page.run["run"] == name and page.curves
    for request in ({}, {"do": "open"}, {"do": "open", "run": ["x"]}, {"do": 3}, {"do": "open", "run": "../run"}):
        with pytest.raises(UsageError):
            page.session.receive(request)


def test_several_folders_are_named_as_the_user_wrote_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    copied(run, run.parent / "deep" / "er")
    assert Page(Watch([Path("run"), Path("deep"), Path("run")])).rows.keys() == {"run", "deep/er"}
    assert Page(Watch([Path("deep")])).rows.keys() == {"er"}


# -- runs that change -------------------------------------------------------------------------------------------------


def test_folders_and_runs_come_and_go(run: Path, tmp_path: Path) -> None:
    page = Page(Watch([tmp_path / "later"]))
    assert page.rows == {}
    copied(run, tmp_path / "later" / "a")
    copied(run, tmp_path / "later" / "b")
    page.look()
    assert page.rows.keys() == {"a", "b"}
    page.ask(do="open", run="a")
    shutil.rmtree(tmp_path / "later" / "a")
    page.look()
    assert page.rows.keys() == {"b"} and page.run["status"] == "deleted" and page.run["command"] is None
    assert page.curves == curves_of(run), "what was known stays"
    copied(run, tmp_path / "later" / "a")
    (tmp_path / "later" / "a" / "metrics.jsonl").write_text('{"stage": "imagine", "update": 3, "loss": 4}\n')
    page.look()
    assert page.run["status"] == "finished"
    assert {stage: metrics["loss"] for stage, metrics in page.curves.items()} == {
        "train-tokenizer": [],
        "train-dynamics": [],
        "imagine": [[3, 4]],
    }
    shutil.rmtree(tmp_path / "later")
    page.look()
    assert page.rows == {}


def test_a_change_under_the_same_time_is_seen(run: Path) -> None:
    """A clock of files ticks some hundred times a second, and more may happen between two ticks."""
    manifest = latest(run, "evaluation").path
    os.utime(run / "evaluation")
    before = (run / "evaluation").stat()
    page = Page(Watch([run]))
    assert page.rows["run"]["score"] is not None
    shutil.rmtree(manifest)
    os.utime(run / "evaluation", ns=(before.st_atime_ns, before.st_mtime_ns))
    page.look()
    assert page.rows["run"]["score"] is None


def test_a_run_that_vanishes_under_a_look_is_no_defect(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(path: Path, **known: Any) -> dict[str, Any]:
        shutil.rmtree(path, ignore_errors=True)
        return describe_run(path, **known)

    monkeypatch.setattr(module, "describe_run", vanish)
    page = Page(Watch([run.parent]))
    assert page.rows["run"]["status"] == "damaged" and "no run at" in page.rows["run"]["problem"]
    page.look()
    assert page.rows == {}


def test_damage_is_shown_and_goes_away(run: Path) -> None:
    manifest = run / "evaluation" / "v0001" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:100])
    page = Page(Watch([run.parent]))
    page.ask(do="open", run="run")
    assert page.rows["run"]["status"] == page.run["status"] == "damaged"
    assert "evaluation/v0001/manifest.json" in page.run["problem"]
    assert page.run["returns"] == [] and page.run["film"] is not None


def test_records_are_taken_as_they_come(run: Path) -> None:
    page, log = Page(Watch([run])), Run.open(run, create=False).log
    page.ask(do="open", run="run")
    page.messages.clear()
    base = {"stage": "imagine", "job": "j", "time": "2030-01-01T00:00:00+00:00", "began": "2030-01-01T00:00:00+00:00"}
    log(base | {"update": 10, "loss": 1.0, "odd": float("nan"), "many": float("inf")})
    log(base | {"update": 11, "loss": 2.0})
    page.look()
    (points,) = [message["curves"] for message in page.messages if message["type"] == "points"]
    assert {"stage": "imagine", "metric": "loss", "from": 2, "points": [[10, 1], [11, 2]]} in points
    assert not {"odd", "many"} & page.curves["imagine"].keys()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "imagine", "update": 12, "lo')
    page.look()
    assert page.curves["imagine"]["loss"][-1] == [11, 2]
    resumed = base | {"began": "2030-01-01T00:10:00+00:00", "time": "2030-01-01T00:10:05+00:00"}
    log(resumed | {"update": 11, "loss": 3.0})
    page.look()
    assert page.curves["imagine"]["loss"][-2:] == [[10, 1], [11, 3]] and page.curves == curves_of(run)
    texts = [event["text"] for event in page.run["events"]]
    assert texts[-2:] == [
        "imagine was interrupted at update 11 or later",
        "imagine resumed after 10 min, repeating some updates",
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": [1], "time": 7, "update": {}}\n{"stage": "imagine", "epoch": "x", "time": "2030"}\n')
    page.look()
    assert page.curves == curves_of(run)


@pytest.mark.slow
def test_a_run_trains_dies_and_goes_on(run: Path) -> None:
    """Another process trains, is killed, and resumes; meanwhile the page knows all it needs."""
    train = partial(command, run, "train-dynamics", "--more", *settings(*LONG))
    page = Page(Watch([run.parent]))
    page.ask(do="open", run="run")
    child = train()
    page.until(lambda: page.rows["run"]["status"] == "running" and page.rows["run"]["updates_per_second"])
    row = page.rows["run"]
    assert (row["stage"], page.run["status"], page.run["command"]) == ("train-dynamics", "running", None)
    assert row["seconds"] > 0 and row["peak_bytes"] > 10e6
    reached = len(page.curves["train-dynamics"]["loss"])
    page.until(lambda: len(page.curves["train-dynamics"]["loss"]) > reached + 20)
    page.until(lambda: list((run / "dynamics").glob(".work-*/checkpoint.safetensors")))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    page.until(lambda: page.run["status"] == "interrupted" and page.rows["run"]["killed"])
    assert page.run["killed"] and page.run["command"] == f"wm train-dynamics --run {run}"
    assert page.rows["run"]["updates_per_second"] is None
    assert page.curves == curves_of(run)
    child = train()
    page.until(lambda: page.run["events"][-1]["kind"] == "resumed")
    assert page.run["events"][-2]["kind"] == "interrupted" and page.run["status"] == "running"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 75
    page.until(lambda: page.run["status"] == "interrupted" and not page.rows["run"]["killed"])
    page.until(lambda: page.curves == curves_of(run), 5)


def test_a_dead_process_is_found_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out takes the lock for a moment, in which another process might want it."""
    asked: list[Path] = []
    held = module.is_locked
    monkeypatch.setattr(module, "is_locked", lambda folder: (asked.append(folder), held(folder))[1])
    (run / "dynamics" / ".holder").write_text("1")
    (run / "dynamics" / ".lock").touch()
    page = Page(Watch([run]))
    for _ in range(5):
        page.look()
    assert asked == [run / "dynamics"] and page.rows["run"]["killed"]
    with exclusive(run / "dynamics", "dynamics"):
        page.look()
        assert page.rows["run"]["status"] == "running" and not page.rows["run"]["killed"]
    page.look()
    assert page.rows["run"]["status"] == "finished" and not page.rows["run"]["killed"]


def test_a_note_of_another_machine_tells_no_memory(run: Path) -> None:
    with exclusive(run / "dynamics", "dynamics"):
        page = Page(Watch([run]))
        assert page.rows["run"]["peak_bytes"] > 10e6
        (run / "dynamics" / ".holder").write_text(str(os.getppid()))  # a process here that has nothing to do with it
        assert Page(Watch([run])).rows["run"]["peak_bytes"] is None


@pytest.mark.parametrize("name", ["0.1.0-interrupted.tar.gz", "0.1.0-unizero.tar.xz"])
def test_runs_of_an_old_version(tmp_path: Path, name: str) -> None:
    with tarfile.open(OLD_RUNS / name) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    page = Page(Watch([tmp_path / "old"]))
    (key,) = page.rows
    page.ask(do="open", run=key)
    assert page.curves == curves_of(page.session._watch.paths[key])  # type: ignore[attr-defined]
    assert page.curves and page.run["events"] and page.rows[key]["status"] in ("interrupted", "finished")
    if page.rows[key]["status"] == "interrupted":  # its records do not say whether `wm run` made them
        assert page.run["command"].startswith("wm train-dynamics --run ")


# -- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_sweep_shows_its_states(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'preset = "quickstart"\nfolder = "{tmp_path / "runs"}"\n[vary]\nseed = [1, 2, 3]\n')
    sweep = read_sweep(file)
    watch = Watch([], lambda describe: describe_sweep(sweep, describe), f"wm sweep {file}")
    page = Page(watch)
    assert {row["status"] for row in page.rows.values()} == {"waiting"} and page.messages[0]["sweep"]
    copied(run, sweep.runs[0].folder)
    about = {"executor": "local", "host": "here", "seconds": 2.0, "attempts": 2, "peak_bytes": 7}
    for planned, state, last in zip(sweep.runs, ("done", "failed"), ("all is well", "it broke <here>"), strict=False):
        sweep.records.mkdir(exist_ok=True)
        write_record(planned, sweep.records, about | {"state": state, "last": last, "arguments": [*planned.arguments]})
    page.look()
    assert {name: row["status"] for name, row in page.rows.items()} == {
        "seed-1": "done",
        "seed-2": "failed",
        "seed-3": "waiting",
    }
    want = {row["run"]: row for row in describe_sweep(sweep)}
    for name, row in page.rows.items():
        assert {key: row[key] for key in ("attempts", "seconds", "score", "epoch") if key in row} == {
            key: want[name][key] for key in ("attempts", "seconds", "score", "epoch") if key in row
        }
    page.ask(do="open", run="seed-1")
    assert page.curves == curves_of(run) and page.run["command"] is page.run["problem"] is None
    about |= {"state": "running", "host": socket.gethostname(), "pid": os.getpid(), "peak_bytes": 0}
    write_record(sweep.runs[0], sweep.records, about | {"arguments": [*sweep.runs[0].arguments]})
    with exclusive(sweep.runs[0].folder / "dynamics", "dynamics"):
        page.look()
        assert page.rows["seed-1"]["status"] == "running" and page.rows["seed-1"]["peak_bytes"] > 10e6
    page.ask(do="open", run="seed-2")
    assert (
        page.run["problem"] == "it broke <here>"
        and page.run["command"] == f"wm sweep {file} --retry"
        and not page.curves
    )
    next(sweep.records.glob("*.json")).write_text("{")
    with pytest.raises(ArtifactError, match="seed-.*json: damaged"):
        page.look()
    assert [row["name"] for row in page.session.hello().head["rows"]] == [*page.rows], "another page still opens"


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(run: Path, tmp_path: Path) -> Path:
    """A folder of 130 runs."""
    for number in range(130):
        folder = tmp_path / "many" / f"seed-{number}"
        shutil.copytree(run, folder, symlinks=True, copy_function=os.link)
        (folder / "metrics.jsonl").unlink()
        shutil.copy(run / "metrics.jsonl", folder)
    return tmp_path / "many"


@pytest.mark.slow
def test_what_does_not_change_costs_little(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch([many])
    page = Page(watch)
    page.until(lambda: all(row["bytes"] for row in page.rows.values()))
    time.sleep(2.1)  # younger times of files may hide a change
    page.look()
    for name in ("describe_run", "last_record", "disk_usage", "is_locked"):
        monkeypatch.setattr(module, name, None)  # a call would fail
    began = time.process_time()
    for _ in range(10):
        assert page.session.advance() is None
    took = (time.process_time() - began) / 10
    assert took < 0.1, f"{took} s of a second"
    print(f"a look at 130 runs takes {took * 1000:.1f} ms")
    monkeypatch.undo()
    train_dynamics(opened(many / "seed-77", "dynamics.updates=2", more=True))
    page.messages.clear()
    page.look()
    assert [row["name"] for message in page.messages for row in message["rows"]] == ["seed-77"] * len(page.messages)
