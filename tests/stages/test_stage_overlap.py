"""`wm run` with `run.overlap`: what comes out is that of the same jobs one after the other, whatever interrupts it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from slow_steps import BREAKS_AFTER, SEED_CHECK, SLOW_AFTER, SLOW_STEPS
from test_stage_loop import LOOP, inputs, names, results
from tiny_run import Killed, command, kill_at, latest, opened, settings

from wmcli.artifacts import Artifact, Run
from wmcli.envs.processes import portable
from wmcli.errors import ArtifactError, EnvironmentFault, MachineError, Stopped, UsageError
from wmcli.stages import collector as module
from wmcli.stages.collect import collect
from wmcli.stages.collector import Collector
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.loop import run_loop
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.trainers import tokenizer as tokenizer_trainer

OVERLAP = [*LOOP, "run.collect_epochs=5", "run.controller_after=1", "run.overlap=true"]
SLOW = [*OVERLAP, f"environment.id={SLOW_STEPS}", "collect.steps=60", "tokenizer.updates=6"]


@pytest.fixture(autouse=True, scope="module")
def no_plots() -> Iterator[None]:
    """They take half of the time here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wmcli.stages.evaluate._write_plots", lambda *_: None)
        patch.setattr("wmcli.stages.train.write_figure", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through its epochs without a stop. Only to be read, or to be run again."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run_loop(opened(folder, *OVERLAP, new=True)).name == "evaluation@2"
    return folder


def gone(process: int, seconds: float = 20) -> bool:
    """Whether there is no such process, now or soon."""
    since = time.monotonic()
    while True:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() - since > seconds:
            return False
        time.sleep(0.01)


def collecting(folder: Path, version: int) -> int:
    """Wait until this version is being collected; the process that does it."""
    since = time.monotonic()
    while time.monotonic() - since < 60:
        if Run.open(folder, create=False).versions("experience") == list(range(1, version)):
            holder = folder / "experience" / ".holder"
            if list((folder / "experience").glob(".work-*")) and holder.exists() and (text := holder.read_text()):
                return int(text.split()[0])
        time.sleep(0.005)
    raise AssertionError("nobody collects it")


def command_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> subprocess.Popen[str]:
    """`wm run` of two epochs in the slow environment."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    opened(folder, *SLOW, "run.epochs=2", *overrides, new=True)
    return command(folder, "run")


# -- undisturbed ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_collects_is_one_epoch_older_and_each_epoch_trains_on_its_own(whole: Path) -> None:
    run = Run.open(whole, create=False)
    assert [inputs(run.get("experience", version)) for version in run.versions("experience")] == [
        {},
        {"previous": "experience@1"},
        {"previous": "experience@2"},
        {"previous": "experience@3", "controller": "controller@1"},  # of epoch 2, while epoch 3 makes controller@2
        {"previous": "experience@4", "controller": "controller@2"},
    ]
    for epoch in range(1, 6):
        assert inputs(run.get("tokenizer", epoch))["experience"] == f"experience@{epoch}"
        for kind in ("dynamics", "controller") if epoch > 1 else ():
            assert inputs(run.get(kind, epoch - 1))["experience"] == f"experience@{epoch}"


@pytest.mark.slow
def test_it_equals_the_same_jobs_in_sequence(whole: Path, tmp_path: Path) -> None:
    context = opened(tmp_path / "run", *OVERLAP, new=True)
    experience = collect(context, controller="random")
    models: dict[str, str] = {}
    for epoch in range(1, 6):
        at, actor = str(experience.path), models.get("controller")
        models["tokenizer"] = str(train_tokenizer(context, experience=at, parent=models.get("tokenizer")).path)
        if epoch > 1:
            here = {"experience": at, "tokenizer": models["tokenizer"], "parent": models.get("dynamics")}
            models["dynamics"] = str(train_dynamics(context, **here).path)
            here = {"experience": at, "dynamics": models["dynamics"], "parent": models.get("controller")}
            models["controller"] = str(imagine(context, **here).path)
        if epoch in (3, 5):
            evaluate(context, controller=models["controller"], episodes=2 if epoch == 3 else None)
        if epoch < 5:
            experience = collect(context, controller=actor or "random", previous=at)
    assert results(tmp_path / "run") == results(whole)


def test_run_again_it_needs_no_other_process(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(whole)
    monkeypatch.setattr(module.subprocess, "Popen", None)
    assert run_loop(opened(whole)).name == "evaluation@2"
    assert names(whole) == before


@pytest.mark.slow
def test_the_other_process_acts_on_one_thread_and_ends_with_the_last_collect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended, start = [], [], Collector._start
    monkeypatch.setattr(Collector, "_start", lambda self: started.append(start(self)) or started[-1])

    def train(*given: object, **named: object) -> Artifact:
        ended.append(started[0].process.poll() is not None)
        return train_tokenizer(*given, **named)

    monkeypatch.setattr("wmcli.stages.loop.train_tokenizer", train)
    changed = ["run.epochs=2", "run.collect_epochs=1", "run.dynamics_after=9", "run.controller_after=9"]
    run_loop(opened(tmp_path / "run", *OVERLAP, *changed, "training.threads=2", new=True))
    assert len(started) == 1 and ended == [True, True]
    made = [latest(tmp_path / "run", kind) for kind in ("experience", "tokenizer")]
    assert [artifact.manifest["machine"]["threads"] for artifact in made] == [1, 2]


def test_the_controller_that_collects_must_be_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="overlap collects with the last controller but one.*set keep = 2"):
        opened(tmp_path / "run", *OVERLAP, "run.keep=1", new=True)


class InTurn(Collector):
    """Collects at once and here."""

    def begin(self, context: Context, controller: Artifact | None, previous: Artifact | None) -> None:
        references = [None if artifact is None else str(artifact.path) for artifact in (controller, previous)]
        actor, before = references
        self._existing = collect(context, controller=actor or "random", previous=before, extend=False)


@pytest.mark.slow
def test_more_epochs_go_on_from_where_it_ended(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the controller that would have collected, which is no longer the newest."""
    monkeypatch.setattr("wmcli.stages.loop.Collector", InTurn)
    run_loop(opened(tmp_path / "run", *OVERLAP, "run.epochs=3", new=True))
    assert names(tmp_path / "run")["experience"] == [1, 2, 3]  # nothing that no epoch trains on
    run_loop(opened(tmp_path / "run", "run.epochs=5"))
    assert results(tmp_path / "run")["content"] == results(whole)["content"]


# -- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_every_few_checkpoints_it_ends_in_the_same_weights(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "run", *OVERLAP, new=True)
    last, kills = None, 0
    while last is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, "checkpoint", 11)
                last = run_loop(opened(tmp_path / "run", "training.checkpoint_seconds=0"))
        except Killed:
            kills += 1
            assert kills < 99, "does not move on"
    assert kills > 1
    assert results(tmp_path / "run") == results(whole)


@pytest.mark.slow
def test_asked_to_stop_both_stop_at_a_checkpoint_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second segment takes seconds; the first update on the first one is when the signal comes."""
    folder = tmp_path / "run"
    monkeypatch.setenv(SLOW_AFTER, str(SEED_CHECK + 66))
    opened(folder, *SLOW, "run.epochs=2", new=True)
    update, others = tokenizer_trainer.update, []

    def signals(*given: object) -> object:
        if not others:
            others.append(collecting(folder, 2))
            time.sleep(1)  # until the slow steps
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*given)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="train-tokenizer stopped after update 1 of 6"):
        patch.setattr(tokenizer_trainer, "update", signals)
        run_loop(opened(folder))
    assert names(folder)["experience"] == [1] and names(folder)["tokenizer"] == []
    assert gone(others[0], seconds=0)
    assert list((folder / "experience").glob(".work-*/checkpoint.safetensors"))
    monkeypatch.delenv(SLOW_AFTER)
    run_loop(opened(folder))
    run_loop(opened(tmp_path / "whole", *SLOW, "run.epochs=2", new=True))
    assert results(folder) == results(tmp_path / "whole")


@pytest.mark.slow
def test_asked_to_stop_while_it_waits_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOW_AFTER, str(SEED_CHECK + 6))
    child = command_of(tmp_path / "run", monkeypatch)
    other = collecting(tmp_path / "run", 1)
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    out, talk = child.communicate(timeout=60)
    assert (child.returncode, out) == (75, ""), talk
    assert "wm run: collect stopped after step" in talk and "Traceback" not in talk
    assert gone(other, seconds=0)
    assert list((tmp_path / "run" / "experience").glob(".work-*/checkpoint.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_scheduler_may_signal_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What comes over from the first process is not the second signal, which would end the other one at once."""
    monkeypatch.setenv(SLOW_AFTER, str(SEED_CHECK + 6))
    child = command_of(tmp_path / "run", monkeypatch)
    other = collecting(tmp_path / "run", 1)
    time.sleep(1)
    os.kill(other, number)
    child.send_signal(number)
    out, talk = child.communicate(timeout=60)
    assert (child.returncode, out) == (75, ""), talk
    assert "wm run: collect stopped after step" in talk and "Traceback" not in talk
    assert gone(other, seconds=0)


@pytest.mark.slow
def test_killed_it_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOW_AFTER, str(SEED_CHECK + 6))
    child = command_of(tmp_path / "run", monkeypatch, "collect.steps=900")  # a minute and a half
    other = collecting(tmp_path / "run", 1)
    child.kill()
    child.wait()
    assert gone(other)
    child.communicate()


# -- what goes wrong there --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failure_there_is_the_runs_own_one_line_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BREAKS_AFTER, str(SEED_CHECK + 70))
    child = command_of(tmp_path / "run", monkeypatch)
    out, talk = child.communicate(timeout=120)
    assert (child.returncode, out) == (EnvironmentFault.exit_code, ""), talk
    line = next(line for line in talk.splitlines() if line.startswith("wm run: "))
    assert "the game is damaged: 'cartridge'" in line and "run the same command again" in line
    assert "The 9 of 60 steps before it are saved" in line
    assert "Traceback" not in talk
    assert names(tmp_path / "run")["experience"] == [1] and names(tmp_path / "run")["tokenizer"] == [1]


@pytest.mark.slow
def test_errors_come_over_as_they_are_and_say_where(tmp_path: Path) -> None:
    context = opened(tmp_path / "run", *OVERLAP, new=True)
    first = collect(context)
    (first.path / "streams.safetensors").write_bytes(b"")
    collector = Collector(context)
    try:
        collector.begin(context, None, first)
        with pytest.raises(ArtifactError, match="streams.safetensors") as caught:
            collector.result()
        assert "played.verify()" in caught.value.__notes__[0]
    finally:
        collector.close()


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    class Local(Exception):
        pass

    error = portable(Local("lost"), "that collects")
    assert type(error) is RuntimeError and str(error) == "Local: lost"
    assert type(portable(MachineError("full"), "that collects")) is MachineError


@pytest.mark.slow
def test_its_death_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOW_AFTER, str(SEED_CHECK + 6))
    context = opened(tmp_path / "run", *SLOW, new=True)
    collector = Collector(context)
    try:
        collector.begin(context, None, None)
        other = collecting(tmp_path / "run", 1)
        assert os.getsid(other) == other  # out of reach of the terminal's Ctrl-C
        os.kill(other, signal.SIGKILL)
        with pytest.raises(MachineError, match="ended by SIGKILL; run the same command again"):
            collector.result()
    finally:
        collector.close()


@pytest.mark.slow
def test_a_scheduler_that_ends_it_before_it_listens_stops_the_run(tmp_path: Path) -> None:
    context = opened(tmp_path / "run", *SLOW, new=True)
    collector = Collector(context)
    try:
        collector.begin(context, None, None)
        assert collector._other is not None
        collector._other.process.terminate()
        with pytest.raises(Stopped, match="the same command resumes it"):
            collector.result()
    finally:
        collector.close()


@pytest.mark.slow
def test_killed_at_random_times_it_is_the_same(whole: Path, tmp_path: Path) -> None:
    """Either process, or both."""
    opened(tmp_path / "run", *OVERLAP, new=True)
    rng = random.Random(7)
    for kill in range(8):
        child = command(tmp_path / "run", "run", *settings("training.checkpoint_seconds=0.02"))
        time.sleep(rng.uniform(3, 8))
        holder = tmp_path / "run" / "experience" / ".holder"
        if kill % 2 and holder.exists() and (text := holder.read_text()):
            with suppress(ProcessLookupError):  # it may have ended since
                os.kill(int(text.split()[0]), signal.SIGKILL)
        else:
            child.kill()
        child.communicate(timeout=120)
    child = command(tmp_path / "run", "run")
    _, talk = child.communicate(timeout=240)
    assert child.returncode == 0, talk
    assert results(tmp_path / "run") == results(whole)
