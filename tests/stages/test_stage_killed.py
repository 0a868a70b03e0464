"""A training stage or a collect that dies is finished by the same command, with the same weights as without the death.

Deaths in this process are exceptions that nothing catches; those of other processes are real. `tests/faults` kills at
every system call.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny_run import TRAINING, Killed, command, copied, kill_at, latest, opened, settings, sha256

from wmcli.artifacts import Artifact, Run
from wmcli.training.checkpoint import TrainState

COMMANDS = {
    "experience": "collect",
    "tokenizer": "train-tokenizer",
    "dynamics": "train-dynamics",
    "controller": "imagine",
}
ORDER = [*COMMANDS, "evaluation"]
EAGER = "training.checkpoint_seconds=0"


def before(tiny: Path, folder: Path, kind: str) -> Path:
    """A copy of `tiny` as it was before the stage that makes `kind`."""
    run = copied(tiny, folder)
    for later in ORDER[ORDER.index(kind) :]:
        shutil.rmtree(run / later)
    return run


def content(artifact: Artifact) -> list[str]:
    """What must not depend on kills."""
    if artifact.kind == "experience":
        return [entry["sha256"] for entry in artifact.manifest["files"]]
    return [sha256(artifact)]


def finished(folder: Path, kind: str, *overrides: str) -> tuple[Artifact, str]:
    """Let the command run to its end: what it published, and what it said to people."""
    child = command(folder, COMMANDS[kind], *settings(*overrides))
    out, talk = child.communicate(timeout=120)
    assert child.returncode == 0, talk
    artifact = latest(folder, kind)
    assert out == f"{artifact.path}\n"
    return artifact, talk


def checkpoint_appears(folder: Path, kind: str, child: subprocess.Popen[str]) -> bool:
    """Wait for a checkpoint of this process; False if it ended before."""
    found = time.monotonic()
    while time.monotonic() - found < 120:
        if list((folder / kind).glob(".work-*/checkpoint.safetensors")):
            return True
        if child.poll() is not None:
            return False
        time.sleep(0.005)
    raise AssertionError("neither a checkpoint nor an end")


# -- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("kind", TRAINING)
def test_killed_at_every_checkpoint_it_has_the_same_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, more: bool
) -> None:
    """Every process does one update and dies, so all that a checkpoint forgets adds up."""
    run = copied(tiny, tmp_path / "run")
    how = {"more": more, "force": not more, "pictures": kind == "controller"}
    undisturbed = TRAINING[kind](opened(copied(tiny, tmp_path / "whole"), **how))
    artifact, kills = None, 0
    while artifact is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, "checkpoint", 1)
                artifact = TRAINING[kind](opened(run, EAGER, **how))
        except Killed:
            kills += 1
            assert kills < 99, "does not move on"
    assert kills == {"tokenizer": 6, "dynamics": 5, "controller": 4}[kind]
    assert artifact.version == undisturbed.version == 2
    assert sha256(artifact) == sha256(undisturbed)
    assert artifact.metrics["updates"] == undisturbed.metrics["updates"]
    if kind == "controller":  # the pictures are drawn after the last checkpoint, with the generator it restores
        for name in ("imagination.webp", "imagination.json"):
            assert sha256(artifact, name) == sha256(undisturbed, name)


@pytest.mark.parametrize("file", [1, 2])
@pytest.mark.parametrize("kind", TRAINING)
def test_killed_between_the_files_of_a_publication_it_is_published_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, file: int
) -> None:
    """The state of training, the weights."""
    run = before(tiny, tmp_path / "run", kind)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "write-synced", file)
        TRAINING[kind](opened(run))
    assert Run.open(run, create=False).versions(kind) == []
    assert content(TRAINING[kind](opened(run))) == content(latest(tiny, kind))
    left = {entry.name for entry in (run / kind).iterdir()} - {".lock", ".holder"}
    assert left == {"v0001", "latest"}


@pytest.mark.parametrize("kind", TRAINING)
def test_fresh_starts_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    run = before(tiny, tmp_path / "run", kind)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 2)
        TRAINING[kind](opened(run, EAGER))
    monkeypatch.setattr("wmcli.training.checkpoint.TrainState.load", None)
    artifact = TRAINING[kind](opened(run, fresh=True))
    assert content(artifact) == content(latest(tiny, kind))


def test_other_settings_do_not_take_up_the_work(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = before(tiny, tmp_path / "run", "dynamics")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 2)
        TRAINING["dynamics"](opened(run, EAGER))
    TRAINING["dynamics"](opened(run, "dynamics.learning_rate=0.004"))
    with monkeypatch.context() as patch:
        loads = []
        load = TrainState.load
        patch.setattr(TrainState, "load", lambda self, *given: loads.append(given) or load(self, *given))
        artifact = TRAINING["dynamics"](opened(run))
    assert len(loads) == 1  # the work of the first is still there
    assert artifact.version == 2 and content(artifact) == content(latest(tiny, "dynamics"))


# -- in processes of their own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["experience", "dynamics", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tokenizer", "controller"))],
)
@pytest.mark.slow
def test_a_command_that_was_killed_is_finished_by_itself(tiny: Path, tmp_path: Path, kind: str) -> None:
    run = before(tiny, tmp_path / "run", kind)
    child = command(run, COMMANDS[kind], *settings(EAGER), failpoint="checkpoint:2")
    out, talk = child.communicate(timeout=120)
    assert (child.returncode, out) == (-signal.SIGKILL, ""), talk
    assert Run.open(run, create=False).versions(kind) == []
    artifact, talk = finished(run, kind)
    where = "step 6" if kind == "experience" else "update 2 of"
    assert f"{COMMANDS[kind]}: resuming at {where}" in talk
    assert content(artifact) == content(latest(tiny, kind))  # made in another process, in another directory


@pytest.mark.slow
def test_a_command_that_was_asked_to_stop_exits_with_75_and_goes_on(tiny: Path, tmp_path: Path) -> None:
    run = before(tiny, tmp_path / "run", "dynamics")
    whole = before(tiny, tmp_path / "whole", "dynamics")
    updates = "dynamics.updates=80"
    child = command(run, "train-dynamics", *settings(updates, EAGER))
    assert checkpoint_appears(run, "dynamics", child)
    child.send_signal(signal.SIGTERM)
    out, talk = child.communicate(timeout=120)
    assert (child.returncode, out) == (75, "")
    assert "train-dynamics stopped after update" in talk and "the same command resumes it" in talk
    artifact, talk = finished(run, "dynamics", updates)
    assert "resuming at update" in talk
    assert content(artifact) == content(TRAINING["dynamics"](opened(whole, updates)))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="signals that are caught are read from /proc")
@pytest.mark.slow
def test_a_command_that_is_asked_to_stop_while_it_starts_exits_with_75(tiny: Path, tmp_path: Path) -> None:
    """It catches signals before it has imported torch."""
    run = before(tiny, tmp_path / "run", "dynamics")
    child = command(run, "train-dynamics", *settings("dynamics.updates=5000"))
    while not _catches(child.pid, signal.SIGTERM):
        time.sleep(0.01)
    assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()
    child.send_signal(signal.SIGTERM)
    out, talk = child.communicate(timeout=120)
    assert (child.returncode, out) == (75, ""), talk
    artifact, _ = finished(run, "dynamics")
    assert content(artifact) == content(latest(tiny, "dynamics"))


def _catches(process: int, number: signal.Signals) -> bool:
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{process}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
