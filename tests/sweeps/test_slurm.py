"""Runs as jobs of SLURM. Stand-ins take the place of its commands, but for the test at the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import wmcli.sweeps.slurm as module
from wmcli.config.sections import validate
from wmcli.errors import MachineError, UsageError
from wmcli.progress import Progress
from wmcli.sweeps.attempt import read_record, record_end
from wmcli.sweeps.plan import PlannedRun
from wmcli.sweeps.slurm import Job, SlurmSettings, run_slurm

submitit = pytest.importorskip("submitit")

COMMANDS = {
    "sbatch": 'cp "$1" "{here}/script-$(ls {here} | grep -c script)"\n'
    "[ -e {here}/refuses ] && {{ cat {here}/refuses >&2; exit 1; }}\n"
    "echo Submitted batch job 1$(ls {here} | grep -c script)",
    "squeue": "[ -e {here}/down ] && {{ echo slurm_load_jobs error: Socket timed out >&2; exit 1; }}\ncat {here}/queue",
    "scontrol": 'echo "$*" >> {here}/scontrol.calls\necho JobId=11 JobState=$(cat {here}/state) Reason=None',
    "srun": "exit 1",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for SLURM's commands: the files `queue`, `state`, `refuses`, `down` say what they answer."""
    here = tmp_path / "slurm"
    (here / "bin").mkdir(parents=True)
    for name, text in COMMANDS.items():
        command = here / "bin" / name
        command.write_text(f"#!/bin/sh\n{text.format(here=here)}\n")
        command.chmod(0o755)
    (here / "queue").touch()
    (here / "state").write_text("RUNNING")
    monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "QUEUE_SECONDS", 0.1)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    return here


def sweep_of(tmp_path: Path, count: int, *words: str, **settings: Any) -> Any:
    folder = tmp_path / "grid"
    runs = [PlannedRun(f"Catch-v0/seed-{n}", folder / "Catch-v0" / f"seed-{n}", words) for n in range(count)]
    named = {"folder": folder, "file": tmp_path / "grid.toml", "records": folder / ".sweep", "runs": runs}
    return SimpleNamespace(**named, slurm=SlurmSettings(**settings))


def scripts(slurm: Path) -> list[str]:
    return [path.read_text() for path in sorted(slurm.glob("script-*"))]


def ended(sweep: Any, run: PlannedRun, job: str, code: int) -> None:
    record_end(run, sweep.records, executor="slurm", job=job, code=code, last="")


# -- submitting and waiting -------------------------------------------------------------------------------------------


def submitted(sweep: Any, slurm: Path, then: Any) -> dict[str, int]:
    """Run the sweep, and `then` as soon as its jobs are submitted."""

    def work() -> None:
        while not (sweep.records / "slurm" / "jobs.json").exists():
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=work)
    thread.start()
    codes = run_slurm(sweep, sweep.runs, Progress(quiet=True))
    thread.join()
    return codes


def test_one_array_asks_for_what_the_settings_say(tmp_path: Path, slurm: Path) -> None:
    settings = {"partition": "low", "time": "1-00:00:00", "gpus": 2, "cpus": 3, "memory": 1.5, "parallel": 2}
    sweep = sweep_of(tmp_path, 3, **settings, options={"account": "lab", "exclusive": True, "qos": False})
    (slurm / "queue").write_text("".join(f"11_{n} RUNNING\n" for n in range(3)))

    def then() -> None:
        for n, run in enumerate(sweep.runs):
            ended(sweep, run, f"11_{n}", n)

    assert submitted(sweep, slurm, then) == {"Catch-v0/seed-0": 0, "Catch-v0/seed-1": 1, "Catch-v0/seed-2": 2}
    (script,) = scripts(slurm)
    flags = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))
    expected = {"partition": "low", "time": "1-00:00:00", "gpus-per-node": "2", "cpus-per-task": "3", "mem": "1536M"}
    expected |= {"array": "0-2%2", "account": "lab", "exclusive": "", "requeue": "", "signal": "USR2@60"}
    assert flags.items() >= expected.items() and "qos" not in flags
    assert f"{sys.executable} -u -m submitit.core._submit {sweep.records / 'slurm'}\n" in script
    assert "\nsrun " in script, "only the steps of a job hear of a preemption"


def test_what_the_site_decides_is_left_out(tmp_path: Path, slurm: Path) -> None:
    sweep = sweep_of(tmp_path, 1)
    submitted(sweep, slurm, lambda: ended(sweep, sweep.runs[0], "11", 0))
    assert not re.search("partition|gpus|--mem", scripts(slurm)[0])


def test_on_a_request_to_stop_the_jobs_go_on_and_the_next_call_finds_them(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path, 2)
    (slurm / "queue").write_text("11_0 RUNNING\n11_1 PENDING\n")
    codes = submitted(sweep, slurm, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert codes == {"Catch-v0/seed-0": 75, "Catch-v0/seed-1": 75}

    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert run_slurm(sweep, sweep.runs, Progress()) == codes
    captured = capsys.readouterr()
    assert not captured.out
    assert "2 of 2 runs are in SLURM's queue already" in captured.err
    assert "2 runs go on in SLURM" in captured.err and "scancel 11\n" in captured.err
    assert len(scripts(slurm)) == 1


def test_only_runs_without_a_job_are_submitted(tmp_path: Path, slurm: Path) -> None:
    sweep = sweep_of(tmp_path, 2)
    (slurm / "queue").write_text("11_0 RUNNING\n11_1 PENDING\n")
    submitted(sweep, slurm, lambda: os.kill(os.getpid(), signal.SIGINT))
    ended(sweep, sweep.runs[0], "11_0", 75)
    (slurm / "queue").write_text("11_1 COMPLETING\n12 PENDING\n")
    threading.Timer(
        0.5, lambda: [ended(sweep, run, job, 0) for run, job in zip(sweep.runs, jobs(), strict=True)]
    ).start()

    def jobs() -> list[str]:
        return list(json.loads((sweep.records / "slurm" / "jobs.json").read_text()).values())

    assert set(run_slurm(sweep, sweep.runs, Progress(quiet=True)).values()) == {0}
    assert jobs() == ["12", "11_1"]
    assert len(scripts(slurm)) == 2


@pytest.mark.parametrize(
    ("state", "code", "recorded"), [("OUT_OF_MEMORY", 6, "failed"), ("CANCELLED", 75, "stopped"), ("", 6, "failed")]
)
def test_the_end_of_a_job_that_recorded_none(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: int, recorded: str
) -> None:
    monkeypatch.setattr(module, "LAG_SECONDS", 0.3)
    sweep = sweep_of(tmp_path, 1)
    ended(sweep, sweep.runs[0], "9", 0)  # an earlier job's says nothing about this one
    (slurm / "state").write_text(state)
    assert run_slurm(sweep, sweep.runs, Progress(quiet=True)) == {"Catch-v0/seed-0": code}
    record = read_record(sweep.runs[0], sweep.records)
    assert record is not None and (record["state"], record["job"], record["code"]) == (recorded, "11", code)
    assert f"job 11, state {state or 'unknown'}; see {sweep.records / 'slurm' / '11_0_log.out'}" in record["last"]


def test_a_stopped_run_is_waited_for_while_its_job_is_requeued(tmp_path: Path, slurm: Path) -> None:
    sweep = sweep_of(tmp_path, 1)
    (slurm / "queue").write_text("11 PENDING\n")

    def then() -> None:
        ended(sweep, sweep.runs[0], "11", 75)
        time.sleep(0.5)
        ended(sweep, sweep.runs[0], "11", 0)

    assert submitted(sweep, slurm, then) == {"Catch-v0/seed-0": 0}
    sweep = sweep_of(tmp_path / "other", 1)
    (slurm / "queue").write_text("")
    assert submitted(sweep, slurm, lambda: ended(sweep, sweep.runs[0], "12", 75)) == {"Catch-v0/seed-0": 75}


def test_a_restart_of_the_controller_is_waited_for(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path, 1)
    (slurm / "queue").write_text("11 RUNNING\n")

    def then() -> None:
        (slurm / "down").touch()
        time.sleep(0.5)
        (slurm / "down").unlink()
        ended(sweep, sweep.runs[0], "11", 0)

    assert submitted(sweep, slurm, then) == {"Catch-v0/seed-0": 0}
    assert capsys.readouterr().err.count("SLURM does not answer: slurm_load_jobs error: Socket timed out") == 1


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_before_the_work_it_says_what_is_missing(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path, 2)
    (slurm / "refuses").write_text("sbatch: error: invalid partition specified: low\nsbatch: error: Batch job failed\n")
    with pytest.raises(UsageError, match=r"^SLURM refuses the jobs: invalid partition specified: low; .*grid\.toml\.$"):
        run_slurm(sweep, sweep.runs, Progress())
    assert capsys.readouterr() == ("", "")
    (slurm / "down").touch()
    with pytest.raises(MachineError, match="Socket timed out; run the same command again later"):
        run_slurm(sweep, sweep.runs, Progress())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="needs sbatch"):
        run_slurm(sweep, sweep.runs, Progress())
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"pip install 'wmcli\[slurm\]'"):
        run_slurm(sweep, sweep.runs, Progress())


def test_settings_come_from_toml() -> None:
    assert validate(SlurmSettings, {"time": 90, "memory": 16}, "[slurm]").time == 90
    with pytest.raises(UsageError, match="did you mean 'partition'"):
        validate(SlurmSettings, {"partitions": "low"}, "[slurm]")


# -- a job ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (75, "RUNNING", True),
        (75, "TIMEOUT", True),
        (75, "CANCELLED", False),
        (75, "PENDING", False),
        (5, "RUNNING", False),
    ],
)
def test_a_job_requeues_itself_after_a_checkpoint(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, code: int, state: str, requeued: bool
) -> None:
    """SLURM requeues a preempted job by itself; its state is then PENDING. Nobody requeues what was cancelled."""
    (run,) = sweep_of(tmp_path, 1, "collect").runs
    seen = {}
    monkeypatch.setattr(module, "attempt", lambda *given, **named: seen.update(named) or code)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    (slurm / "state").write_text(state)
    with pytest.raises(SystemExit) as end:
        Job(run, tmp_path, 3)()
    assert end.value.code == code
    assert seen == {"executor": "slurm", "job": "11_3", "environment": {"OMP_NUM_THREADS": "3"}}
    calls = (slurm / "scontrol.calls").read_text() if code == 75 else ""
    assert ("requeue 11_3" in calls) == requeued


@pytest.mark.slow
def test_submitit_runs_a_job_in_another_process(tmp_path: Path) -> None:
    (run,) = sweep_of(tmp_path, 1, "--version").runs
    job = submitit.LocalExecutor(tmp_path / "jobs").submit(Job(run, tmp_path, 1))
    assert job.result() is None
    record = read_record(run, tmp_path)
    assert record is not None and record["state"] == "done" and record["last"].startswith("wm ")


# -- the real one -----------------------------------------------------------------------------------------------------


def answers() -> bool:
    return bool(shutil.which("sbatch")) and not subprocess.run(["squeue"], capture_output=True, timeout=60).returncode


@pytest.mark.slow
def test_slurm_requeues_a_run_that_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The batch process gets the signal before the time limit. SLURM keeps a requeued job back for two minutes."""
    if not answers():
        pytest.skip("no SLURM")
    sweep = sweep_of(tmp_path, 1, cpus=1, time=10)
    folder = sweep.runs[0].folder
    settings = ["environment.count=1", "collect.steps=1500", "training.checkpoint_seconds=0", "training.device=cpu"]
    words = ("collect", "--preset", "rem-quick", "--run", str(folder), *(w for s in settings for w in ("--set", s)))
    sweep.runs = [sweep.runs[0]._replace(arguments=words)]

    def then() -> None:
        while not list(folder.glob("experience/.work-*/*")):
            time.sleep(0.1)
        job = json.loads((sweep.records / "slurm" / "jobs.json").read_text())["Catch-v0/seed-0"]
        subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)

    assert submitted(sweep, tmp_path, then) == {"Catch-v0/seed-0": 0}
    record = read_record(sweep.runs[0], sweep.records)
    assert record is not None and record["attempts"] == 2
