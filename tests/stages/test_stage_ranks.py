"""`wm run` on two processes of `torchrun`: stopped or killed, it ends in the same bits as undisturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import TINY

from wmcli.artifacts import Run

EVEN = ["tokenizer.batch=8", "controller.batch=6", "dynamics.updates=150", "training.checkpoint_seconds=0.1"]
LOOP = [
    *("run.epochs=1", "run.collect_epochs=1", "run.tokenizer_after=0", "run.dynamics_after=0"),
    *("run.controller_after=0", "run.evaluate_every=1", "run.evaluate_episodes=1"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", "wmcli"]
SECONDS = 120


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start a command on two processes, which print nothing but results and lines of one process."""
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [*TORCHRUN, *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path) -> list[str]:
    sets = [word for each in (*TINY, *EVEN, *LOOP) for word in ("--set", each)]
    return ["run", "quickstart", "--run", str(folder), *sets]


def weights(folder: Path) -> list[str]:
    """sha256 of all weights and states of training."""
    opened = Run.open(folder, create=False)
    artifacts = [each for kind in ("tokenizer", "dynamics", "controller") for each in opened.artifacts(kind)]
    assert all(each.manifest["machine"]["ranks"] == 2 for each in artifacts)
    return [file["sha256"] for each in artifacts for file in each.manifest["files"] if "safetensors" in file["path"]]


def workers(launcher: subprocess.Popen[str]) -> list[int]:
    """Process numbers of the ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(number) for number in children.read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_stops_all_and_the_same_command_ends_in_the_same_bits(tmp_path: Path) -> None:
    undisturbed = start(*run(tmp_path / "whole"))
    printed, said = undisturbed.communicate(timeout=SECONDS)
    assert undisturbed.returncode == 0, said
    assert printed == f"{tmp_path}/whole/evaluation/v0001\n", "one process prints"
    assert said.count("new run") == 1 and "on each of 2 ranks" in said

    for name, victim, number in (("killed", 0, signal.SIGKILL), ("stopped", 1, signal.SIGTERM)):
        folder = tmp_path / name
        disturbed = start(*run(folder))
        until = time.monotonic() + SECONDS
        while not list(folder.glob("dynamics/.work-*/checkpoint.safetensors")):
            assert time.monotonic() < until and disturbed.poll() is None
            time.sleep(0.02)
        os.kill(workers(disturbed)[victim], number)
        _, said = disturbed.communicate(timeout=SECONDS)
        assert disturbed.returncode, "torchrun reports the loss"
        assert ("lost the others" if number == signal.SIGKILL else "the same command resumes it") in said
        assert list(folder.glob("dynamics/.work-*/checkpoint.safetensors"))
        resumed = start(*run(folder))
        _, said = resumed.communicate(timeout=SECONDS)
        assert resumed.returncode == 0, said
        assert weights(folder) == weights(tmp_path / "whole")


@pytest.mark.slow
def test_what_is_not_training_is_refused(tmp_path: Path) -> None:
    launched = start("collect", "--run", str(tmp_path / "run"))
    _, said = launched.communicate(timeout=SECONDS)
    assert launched.returncode
    assert said.count("wm collect: torchrun shares training out") == 1
    assert not (tmp_path / "run").exists()
