"""Sweeps on this machine: slots, what is skipped, retried and reported, and where they stand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wmcli.artifacts import Run
from wmcli.cli import main
from wmcli.errors import MachineError, Stopped, UsageError
from wmcli.progress import Progress
from wmcli.sweeps import local, run
from wmcli.sweeps.attempt import write_record
from wmcli.sweeps.estimate import estimate_sweep
from wmcli.sweeps.local import LocalSettings, share_out
from wmcli.sweeps.plan import PlannedRun, Sweep, read_sweep
from wmcli.sweeps.run import FailedRuns, run_sweep, runs_left, shell_lines
from wmcli.sweeps.status import describe, describe_sweep

QUIET = Progress(quiet=True)
FILE = """
preset = "quickstart"
folder = "{folder}"
[vary]
seed = [1, 2, 3, 4]
[local]
slots = 2
"""

Attempt = Callable[..., int]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "sweep.toml").write_text(FILE.format(folder=tmp_path / "runs"))
    return read_sweep(tmp_path / "sweep.toml")


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """Attempts that end at once, with the exit codes in `codes` or 0: the runs and environments of each."""
    made: list[tuple[str, dict[str, str]]] = []

    def attempt(planned: PlannedRun, records: Path, *, executor: str, environment: dict[str, str]) -> int:
        codes = getattr(attempt, "codes", {}).get(planned.name, [])
        code = codes.pop(0) if codes else 0
        made.append((planned.name, environment))
        state = {0: "done", 75: "stopped"}.get(code, "failed")
        about = {"state": state, "code": code, "last": f"ends with {code}", "arguments": list(planned.arguments)}
        write_record(planned, records, about | {"executor": executor, "seconds": 2.0, "attempts": 1, "host": "here"})
        return code

    monkeypatch.setattr(local, "attempt", attempt)
    made_by: Any = attempt
    monkeypatch.setattr(local, "codes", made_by, raising=False)
    return made


def set_codes(**codes: list[int]) -> None:
    local.codes.codes = {name.replace("_", "-"): each for name, each in codes.items()}  # type: ignore[attr-defined]


def test_all_runs_are_run_once_and_then_found_again(sweep: Sweep, attempts: list[Any]) -> None:
    rows = run_sweep(sweep, "local", QUIET)
    assert sorted(name for name, _ in attempts) == ["seed-1", "seed-2", "seed-3", "seed-4"]
    assert [row["state"] for row in rows] == ["done"] * 4
    run_sweep(sweep, "local", QUIET)
    assert len(attempts) == 4 and runs_left(sweep, retry=False) == []


def test_a_run_with_other_arguments_is_run_again(sweep: Sweep, attempts: list[Any], tmp_path: Path) -> None:
    run_sweep(sweep, "local", QUIET)
    sweep.file.write_text(FILE.format(folder=tmp_path / "runs") + "[settings]\nrun.epochs = 2\n")
    changed = read_sweep(sweep.file)
    assert [row["state"] for row in describe_sweep(changed)] == ["waiting"] * 4
    run_sweep(changed, "local", QUIET)
    assert len(attempts) == 8


@pytest.mark.parametrize(
    "record",
    [
        {"state": "done", "code": 0},
        {"state": "failed", "code": 5, "last": "diverged"},
        {"state": "stopped", "code": 75},
        {"state": "running", "host": "elsewhere", "pid": 1},
    ],
    ids=lambda record: record["state"],
)
def test_records_of_another_sweep_in_the_folder_say_nothing_about_this_one(
    sweep: Sweep, attempts: list[Any], tmp_path: Path, record: dict[str, Any]
) -> None:
    """Two files name one folder, or the file has changed: the names of the runs agree."""
    sweep.records.mkdir(parents=True)
    for planned in sweep.runs:
        about = {"arguments": list(planned.arguments), "seconds": 5.0, "attempts": 3}
        write_record(planned, sweep.records, about | record)
    (tmp_path / "other.toml").write_text(FILE.format(folder=sweep.folder) + "[settings]\nrun.epochs = 2\n")
    other = read_sweep(tmp_path / "other.toml")
    assert other.records == sweep.records
    for row in describe_sweep(other):
        assert row["state"] == "waiting"
        assert not any(row[key] for key in ("seconds", "attempts", "code", "last", "host"))
    assert runs_left(other, retry=False) == list(other.runs)
    assert [row["state"] for row in run_sweep(other, "local", QUIET)] == ["done"] * 4
    assert [row["state"] for row in describe_sweep(sweep)] == ["waiting"] * 4


def test_a_job_of_other_arguments_that_ended_is_no_end_of_the_sweep(
    sweep: Sweep, attempts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM's queue had a job of these names from before the file changed."""
    others = [planned._replace(arguments=(*planned.arguments, "--set", "seed=9")) for planned in sweep.runs]
    monkeypatch.setitem(run.EXECUTORS, "slurm", lambda sweep, runs, progress: local.run_local(sweep, others, progress))
    with pytest.raises(Stopped, match="not all runs have ended; the same command goes on"):
        run_sweep(sweep, "slurm", QUIET)


def test_a_failed_run_stops_no_other_and_waits_for_retry(sweep: Sweep, attempts: list[Any]) -> None:
    set_codes(seed_2=[5], seed_3=[0])
    with pytest.raises(
        FailedRuns, match=r"1 of 4 runs failed, seed-2 first, with exit code 5: ends with 5.*--retry"
    ) as error:
        run_sweep(sweep, "local", QUIET)
    assert error.value.exit_code == 5 and len(attempts) == 4
    with pytest.raises(FailedRuns):
        run_sweep(sweep, "local", QUIET)
    assert len(attempts) == 4
    assert [line.split()[4] for line in shell_lines(runs_left(sweep, retry=True))] == [str(sweep.folder / "seed-2")]
    run_sweep(sweep, "local", QUIET, retry=True)
    assert attempts[-1][0] == "seed-2" and len(attempts) == 5


def test_a_run_that_somebody_stopped_is_begun_again(sweep: Sweep, attempts: list[Any]) -> None:
    set_codes(seed_1=[75, 75, 0])
    run_sweep(sweep, "local", QUIET)
    assert [name for name, _ in attempts].count("seed-1") == 3


def test_a_request_to_stop_begins_no_run(sweep: Sweep, attempts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stubbed = local.attempt

    def attempt(planned: PlannedRun, records: Path, **how: Any) -> int:
        if planned.name == "seed-1":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            return 75
        return stubbed(planned, records, **how)

    monkeypatch.setattr(local, "attempt", attempt)
    with pytest.raises(Stopped, match="the same command goes on"):
        run_sweep(sweep, "local", QUIET)
    assert len(attempts) <= 1


def test_slots_by_cores_gpus_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(local, "visible_gpus", list)
    monkeypatch.setattr(local, "free_memory", lambda: 30 * 2**30)

    def slots(runs: int = 100, **settings: Any) -> list[dict[str, str]]:
        return share_out(LocalSettings(**settings), runs)

    assert slots() == [{"OMP_NUM_THREADS": "1"}] * 8
    assert slots(3) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert slots(threads=4) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert slots(memory=8.0) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert len(slots(memory=8.0, slots=5)) == 3 and len(slots(memory=8.0, slots=2)) == 2
    assert len(slots(memory=8.0, slots=5, threads=8)) == 3, "slots stand in place of the cores, not of the memory"
    for count in (0, 2):
        with pytest.raises(MachineError, match=r"local.memory = 40 GiB: only 30.0 are free; lower it"):
            slots(memory=40.0, slots=count)
    with pytest.raises(UsageError, match=r"local.gpus = 1: this machine has 0"):
        slots(gpus=1)
    monkeypatch.setattr(local, "visible_gpus", lambda: ["3", "5", "6"])
    assert slots() == [{"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": gpu} for gpu in "356"]
    assert slots(gpus=2, threads=3) == [{"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "3,5"}]
    assert len(slots(gpus=0.5, memory=8.0)) == 3 and len(slots(gpus=0.5, memory=8.0, slots=6)) == 3
    assert slots(gpus=0, slots=1) == [{"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": ""}]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots(gpus=0.4)] == [*"356356"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots(gpus=0.5, slots=4)] == [*"3563"]
    with pytest.raises(UsageError, match=r"local.slots = 2 with 2 GPUs each"):
        slots(gpus=2, slots=2)
    with pytest.raises(UsageError, match=r"local.slots = 7 with 0.5 GPUs each: this machine has 3"):
        slots(gpus=0.5, slots=7)
    for wrong in (1.5, 1e-300, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"gpus = .*: whole GPUs|greater than or equal to 0|finite"):
            slots(gpus=wrong)
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,4")
    assert local.visible_gpus() == ["2", "4"]


def test_a_run_that_does_not_fit_into_memory_is_refused_before_the_work(
    sweep: Sweep, attempts: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "free_memory", lambda: 30 * 2**30)
    sweep.file.write_text(sweep.file.read_text() + "memory = 40\n")
    for options in ([], ["--no-estimate"]):
        assert main.run(["sweep", str(sweep.file), *options]) == 6
        shown = capsys.readouterr()
        assert not shown.out and not attempts
        (line,) = shown.err.splitlines()
        assert line.startswith("wm sweep: local.memory = 40 GiB: only 30.0 are free")


def test_the_state_of_a_run(sweep: Sweep, tmp_path: Path) -> None:
    planned = sweep.runs[0]

    def state(**record: Any) -> dict[str, Any]:
        write_record(planned, sweep.records, {"arguments": list(planned.arguments), "seconds": 5.0, **record})
        return describe(planned, sweep.records)

    assert describe(planned, sweep.records)["state"] == "waiting"
    sweep.records.mkdir(parents=True)
    host = os.uname().nodename
    assert state(state="failed", code=5, last="diverged")["last"] == "diverged"
    assert state(state="stopped")["state"] == "requeued"
    assert state(state="running", host="elsewhere", pid=1)["state"] == "running"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert state(state="running", host=host, pid=ended.pid)["state"] == "requeued", "its process is gone"

    planned.folder.mkdir(parents=True)
    (planned.folder / "run.toml").write_text('preset = "quickstart"\n[settings]\nrun = {epochs = 4}\n')
    lines = [{"stage": "imagine", "epoch": 3, "updates_per_second": 7.5}, {"stage": "imagine"}]
    text = "\n".join(map(json.dumps, lines[:1])) + '\n{"cut'
    (planned.folder / "metrics.jsonl").write_text(text)
    row = state(state="running", host=host, pid=os.getpid(), began="2026-01-01T00:00:00+00:00")
    assert row["state"] == "running" and row["stage"] == "imagine" and row["updates_per_second"] == 7.5
    assert row["epochs"] == 4 and row["seconds_left"] == pytest.approx(row["seconds"])
    assert "epoch" in row and threading.active_count() >= 1


def test_a_dry_run_prints_shell_lines(sweep: Sweep) -> None:
    lines = shell_lines(sweep.runs)
    assert lines[0] == f"wm run quickstart --run {sweep.folder}/seed-1 --set seed=1" and len(lines) == 4


def test_a_dry_run_is_one_document_too(sweep: Sweep, attempts: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    set_codes(seed_2=[5])
    with pytest.raises(FailedRuns):
        run_sweep(sweep, "local", QUIET)
    assert main.run(["sweep", str(sweep.file), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main.run(["sweep", str(sweep.file), "--dry-run", "--json", "--retry"]) == 0
    folder = str(sweep.folder / "seed-2")
    command = ["wm", "run", "quickstart", "--run", folder, "--set", "seed=2"]
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [{"run": "seed-2", "folder": folder, "command": command}] and not shown.err


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of the measurements. A run takes 60 seconds, one of Chain 600."""
    measured: list[list[str]] = []

    def stand_in(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        measured.append(command[3:])
        seconds = 600 if any("Chain" in word for word in command) else 60
        return subprocess.CompletedProcess(command, 0, json.dumps({"seconds": seconds, "memory": 2e9}), "")

    monkeypatch.setattr(subprocess, "run", stand_in)
    return measured


def test_the_estimate_is_of_the_first_run_of_each_variant(
    sweep: Sweep, estimates: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    estimate_sweep(sweep, sweep.runs, "local", Progress())
    options = ["--preset", "quickstart", "--run", str(sweep.folder / "seed-1"), "--set", "seed=1"]
    assert estimates == [["profile", "--estimate", "--json", "--quiet", *options]]
    assert "4 min in all, 2 min with 2 at a time" in capsys.readouterr().err


def test_each_environment_is_measured(
    sweep: Sweep, estimates: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    games = '[vary]\nenvironment.id = ["wm/Catch-v0", "wm/Chain-v0"]\nbackbone.kind = ["gru", "s5"]\n'
    sweep.file.write_text(sweep.file.read_text().replace("[vary]\n", games))
    plan = read_sweep(sweep.file)
    estimate_sweep(plan, plan.runs, "local", Progress())
    assert len(estimates) == 4
    said = capsys.readouterr().err
    assert "estimate: s5 on Chain-v0: 10 min and 2.0 GB for each of 4 runs on this machine" in said
    assert "estimate: 88 min in all" in said and "not measured" not in said


def test_environments_beyond_the_most_that_are_measured_are_named(
    sweep: Sweep, estimates: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wmcli.sweeps.estimate.MOST", 3)
    games = '[vary]\nenvironment.id = ["wm/Catch-v0", "wm/Chain-v0", "wm/Bandit-v0"]\nbackbone.kind = ["gru", "s5"]\n'
    sweep.file.write_text(sweep.file.read_text().replace("[vary]\n", games))
    plan = read_sweep(sweep.file)
    estimate_sweep(plan, plan.runs, "local", Progress())
    assert [command[command.index("--run") + 1].split("/")[-3:-1] for command in estimates] == [
        ["Catch-v0", "gru"],
        ["Catch-v0", "s5"],
        ["Chain-v0", "gru"],
    ]
    said = capsys.readouterr().err
    assert "estimate: gru: not measured on Bandit-v0, counted with the mean of the others (6 min)" in said
    assert "estimate: s5: not measured on Chain-v0, Bandit-v0, counted with the mean of the others (60 s)" in said
    assert "estimate: 78 min in all" in said  # 4 runs of 60, 600 and 330 seconds, and 12 of 60


def test_an_environment_that_cannot_be_measured_counts_as_the_others(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stand_in(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        is_chain = any("Chain" in word for word in command)
        return subprocess.CompletedProcess(command, int(is_chain), '{"seconds": 60, "memory": 2e9}', "no such game")

    monkeypatch.setattr(subprocess, "run", stand_in)
    sweep.file.write_text(
        sweep.file.read_text().replace("[vary]\n", '[vary]\nenvironment.id = ["wm/Catch-v0", "wm/Chain-v0"]\n')
    )
    plan = read_sweep(sweep.file)
    estimate_sweep(plan, plan.runs, "local", Progress())
    said = capsys.readouterr().err
    assert "warning: all on Chain-v0: no estimate: no such game" in said
    assert "estimate: all: not measured on Chain-v0, counted" in said and "estimate: 8 min in all" in said


def test_of_a_run_that_has_begun_the_rest_counts(
    sweep: Sweep, estimates: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"preset": "quickstart", "settings": {"run": {"epochs": 4}}}
    for planned, epoch in zip(sweep.runs, (4, 1), strict=False):
        opened = Run.open(planned.folder, create=True)
        opened.bind(**about)
        with opened.job("experience", {}, {}).work() as work:
            work.publish(settings={}, metrics={}, environment=None, machine={}, extra={"epoch": epoch})
    estimate_sweep(sweep, sweep.runs, "local", Progress())
    said = capsys.readouterr().err
    assert "60 s and 2.0 GB for each of 4 runs on this machine" in said
    assert "estimate: 3 min in all, 98 s with 2 at a time, without evaluation; of 1 run that has begun the rest" in said


def test_executors_are_those_of_the_command() -> None:
    from typing import get_args

    assert set(run.EXECUTORS) == set(get_args(run.Executor))
