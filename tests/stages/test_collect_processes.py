"""`environment.processes`: the same jobs with the same results, whatever steps the environments."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_stage_collect import assert_same_experience, started
from tiny_run import Killed, copied, kill_at, latest, opened
from wrong_steps import FAULTY

from wmcli.artifacts import Run
from wmcli.envs import processes as module
from wmcli.errors import EnvironmentFault
from wmcli.stages.collect import collect
from wmcli.stages.evaluate import evaluate

TWO, NONE = "environment.processes=2", "environment.processes=0"

pytestmark = pytest.mark.slow


@pytest.fixture
def started_processes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The processes with environments that have been started."""
    started, start = [], module._Worker.__init__

    def noted(self: object, *given: object) -> None:
        started.append(self)
        start(self, *given)

    monkeypatch.setattr(module._Worker, "__init__", noted)
    return started


def test_a_collect_is_the_same_job_and_its_processes_go_on(tmp_path: Path, started_processes: list[object]) -> None:
    context = started(tmp_path / "two", TWO)
    assert len(started_processes) == 4  # two of them show whether the environment follows its seed
    for steps in (12, 24):
        collect(context, steps=steps)
    assert len(started_processes) == 6  # of the second command, for both of its collects
    others = started(tmp_path / "none")
    for steps in (12, 24):
        collect(others, steps=steps)
    assert len(started_processes) == 6
    ours, theirs = (latest(tmp_path / name, "experience") for name in ("two", "none"))
    assert_same_experience(ours, theirs)
    assert ours.manifest["environment"] == theirs.manifest["environment"]
    first = [Run.open(tmp_path / name, create=False).get("experience", 1) for name in ("two", "none")]
    assert first[0].manifest["job"] == first[1].manifest["job"]
    assert collect(opened(tmp_path / "two", NONE), steps=24, previous="experience@2").version == 3  # it was done


def test_killed_and_resumed_on_either_side_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collect(started(tmp_path / "whole"), steps=45)
    for first, then in ((TWO, NONE), (NONE, TWO)):
        folder = tmp_path / first.replace("=", "-")
        started(folder)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, "checkpoint", 5)
            collect(opened(folder, first, "training.checkpoint_seconds=0"), steps=45)
        assert_same_experience(collect(opened(folder, then), steps=45), whole)


def test_steps_before_a_fault_are_kept(tmp_path: Path) -> None:
    """As in one process, with the same words and the same games behind."""
    made, words = [], []
    for name, processes in (("none", NONE), ("two", TWO)):
        opened(tmp_path / name, f"environment.id={FAULTY}", new=True)
        with pytest.raises(EnvironmentFault, match="The 33 of 60 steps before it are saved") as caught:
            collect(opened(tmp_path / name, processes), steps=60)
        words.append(str(caught.value))
        made.append(collect(opened(tmp_path / name, processes), steps=60))
    assert words[0] == words[1]
    assert_same_experience(*made)


def test_an_evaluation_is_the_same(tiny: Path, tmp_path: Path, started_processes: list[object]) -> None:
    """Of which there are two environments: a third process has none."""
    runs = [copied(tiny, tmp_path / name) for name in ("none", "three")]
    theirs = evaluate(opened(runs[0], NONE, force=True))
    assert not started_processes
    ours = evaluate(opened(runs[1], "environment.processes=3", force=True))
    assert len(started_processes) == 4  # the controller's two, and those of random play
    assert ours.metrics == theirs.metrics
