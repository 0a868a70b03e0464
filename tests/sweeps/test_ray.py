"""Runs as tasks of Ray, on small clusters of real processes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wmcli.errors import UsageError
from wmcli.progress import Progress
from wmcli.sweeps.attempt import log_of, read_record
from wmcli.sweeps.plan import PlannedRun
from wmcli.sweeps.ray_tasks import LOG, RaySettings, run_ray

cluster_utils = pytest.importorskip("ray.cluster_utils")

SMALL = [
    "environment.size=16",
    "environment.count=3",
    "collect.steps=60",
    "tokenizer.downsamples=2",
    "tokenizer.channels=8",
    "tokenizer.width=32",
    "tokenizer.fsq_levels=[4, 5]",
    "tokenizer.codes=20",
    "tokenizer.batch=7",
    "tokenizer.updates=150",
    "training.device=cpu",
    "training.threads=1",
    "training.checkpoint_seconds=0",
    "run.epochs=1",
    "run.tokenizer_after=0",
    "run.dynamics_after=9",
    "run.controller_after=9",
]


def sweep_of(tmp_path: Path, *lines: tuple[str, ...], **settings: Any) -> Any:
    folder = tmp_path / "grid"
    runs = [PlannedRun(f"Catch-v0/seed-{n}", folder / f"{n}", words) for n, words in enumerate(lines)]
    named = {"folder": folder, "file": tmp_path / "grid.toml", "records": folder / ".sweep", "runs": runs}
    return SimpleNamespace(**named, ray=RaySettings(**settings))


def training(folder: Path) -> tuple[str, ...]:
    return ("run", "rem-quick", "--run", str(folder), *(word for each in SMALL for word in ("--set", each)))


def in_training(folder: Path) -> bool:
    return bool(list(folder.glob("tokenizer/.work-*/checkpoint.safetensors")))


def meanwhile(condition: Callable[[], object], action: Callable[[], object]) -> threading.Thread:
    """Do something when a condition holds."""

    def work() -> None:
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        action()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def recorded(sweep: Any, n: int = 0) -> dict[str, Any]:
    record = read_record(sweep.runs[n], sweep.records)
    assert record is not None
    return record


def test_without_ray_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'wmcli\[ray\]'"):
        run_ray(sweep_of(tmp_path, ("--version",)), [], Progress())


@pytest.mark.slow
def test_on_a_cluster_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_of(tmp_path, ("--version",), ("collect", "--no-such-option"), cpus=0.5)
    assert run_ray(sweep, sweep.runs, Progress(quiet=True)) == {"Catch-v0/seed-0": 0, "Catch-v0/seed-1": 2}
    assert capfd.readouterr().out == ""
    assert recorded(sweep)["executor"] == "ray" and recorded(sweep)["last"].startswith("wm ")
    sweep = sweep_of(tmp_path, ("--version",), cpus=999)
    with pytest.raises(UsageError, match=r"no node .* cpus = 999, .*correct \[ray\] in .*grid\.toml"):
        run_ray(sweep, sweep.runs, Progress(quiet=True))


@pytest.mark.slow
def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, ("--version",), address="127.0.0.1:1")
    with pytest.raises(
        UsageError, match=r"^no Ray cluster at 127\.0\.0\.1:1: .*correct address under \[ray\] in .*grid\.toml"
    ):
        run_ray(sweep, sweep.runs, Progress(quiet=True))


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_an_interrupted_sweep_stops_its_runs(tmp_path: Path) -> None:
    """First the worker gets a signal, as when its node shuts down; later the sweep does."""
    sweep = sweep_of(tmp_path, training(tmp_path / "grid" / "0"), ("--version",), cpus=os.cpu_count())
    signaled = meanwhile(
        lambda: in_training(sweep.runs[0].folder), lambda: os.kill(recorded(sweep)["pid"], signal.SIGTERM)
    )
    interrupted = meanwhile(
        lambda: not signaled.is_alive() and recorded(sweep)["attempts"] == 2 and time.sleep(2) is None,
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    codes = run_ray(sweep, sweep.runs[:1], Progress(quiet=True))
    interrupted.join()
    assert codes == {"Catch-v0/seed-0": 75}
    record = recorded(sweep)
    assert (record["state"], record["attempts"]) == ("stopped", 2)
    assert "the same command resumes it" in record["last"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pids(node: Any) -> list[int]:
    return [each.process.pid for processes in node.all_processes.values() for each in processes]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the node of a worker in /proc")
def test_a_run_whose_node_dies_goes_on_elsewhere_to_the_same_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = subprocess.run(
        [sys.executable, "-m", "wmcli", *training(tmp_path / "alone")], capture_output=True, timeout=120
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        folder = tmp_path / "grid" / "0"
        sweep = sweep_of(tmp_path, training(folder), address=cluster.address)

        def lose_the_node() -> None:
            parent = parent_of(recorded(sweep)["pid"])  # of the worker: the raylet of its node
            (node,) = (each for each in nodes if parent in pids(each))
            cluster.remove_node(node, allow_graceful=False)

        lost = meanwhile(lambda: in_training(folder), lose_the_node)
        assert run_ray(sweep, sweep.runs, Progress(quiet=True)) == {"Catch-v0/seed-0": 0}
        lost.join()
    finally:
        cluster.shutdown()
    assert recorded(sweep)["attempts"] == 2
    assert "run: preset rem-quick" in log_of(sweep.runs[0], sweep.records).read_text()
    weights = [
        hashlib.sha256((each / "tokenizer" / "v0001" / "model.safetensors").read_bytes()).hexdigest()
        for each in (tmp_path / "alone", folder)
    ]
    assert weights[0] == weights[1]
    assert capfd.readouterr().out == ""
    assert "retried" in (sweep.records / LOG).read_text()
