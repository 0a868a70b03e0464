"""What a command leaves behind that fails before anything came of it, and what a run is bound to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import TINY, copied, latest, opened

from wmcli.artifacts import Run
from wmcli.errors import ArtifactError, DivergedError, UsageError
from wmcli.stages import opening as module
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer


def new(folder: Path, *overrides: str, **given: object) -> Context:
    return open_context(folder, None, [*TINY, *overrides], create=True, quiet=True, **given)


def test_a_first_command_that_fails_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="script"):
        collect(new(tmp_path / "run", "collect.policy=scripted"))
    assert not (tmp_path / "run").exists()
    collect(new(tmp_path / "run"))  # with settings that are right
    assert latest(tmp_path / "run", "experience").version == 1


def test_one_that_fails_at_work_leaves_no_run_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise UsageError("it does not open")

    monkeypatch.setattr("wmcli.stages.player.open_streams", broken)
    with pytest.raises(UsageError, match="does not open"):
        collect(new(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_evaluation_of_another_game_makes_no_run(tiny: Path, tmp_path: Path) -> None:
    controller = str(latest(tiny, "controller").path)
    with pytest.raises(ArtifactError, match="environment size"):
        evaluate(new(tmp_path / "run", "environment.size=32"), controller=controller)
    assert not (tmp_path / "run").exists()


def test_a_stopped_first_command_keeps_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    context = new(tmp_path / "run", "training.checkpoint_seconds=0", "seed=9")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("wmcli.stages.player.failpoint", stop)  # behind the first checkpoint
        collect(context)
    assert Run.open(tmp_path / "run", create=False).bound()["settings"]["seed"] == 9


def test_a_run_records_the_value_of_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = [text for text in TINY if "precision" not in text]
    monkeypatch.setattr("wmcli.training.device.has_bfloat16", lambda device: False)
    collect(open_context(tmp_path / "run", None, auto, create=True, quiet=True))
    assert Run.open(tmp_path / "run", create=False).bound()["settings"]["training"]["precision"] == "float32"
    monkeypatch.setattr("wmcli.training.device.has_bfloat16", lambda device: True)
    assert open_context(tmp_path / "run", None, create=False).machine.precision == "float32"


def test_a_run_of_before_that_remembers_auto_goes_on_as_its_models(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    run = copied(tiny, tmp_path / "run")
    binding = run / "run.toml"
    binding.write_text(binding.read_text().replace('precision = "float32"', 'precision = "auto"'))
    monkeypatch.setattr("wmcli.training.device.has_bfloat16", lambda device: True)
    assert train_tokenizer(opened(run)).version == 1  # nothing to do


def test_bfloat16_that_must_be_emulated_is_told(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "has_bfloat16", lambda device: False)
    new(tmp_path / "run", "training.precision=bfloat16")
    assert "emulates slowly" in capsys.readouterr().err


# -- divergence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e37, float("nan")])
def test_the_last_update_is_looked_at(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    from wmcli.trainers import tokenizer as stage

    original, updates = stage.update, 0

    def spoils(optimizer: torch.optim.Optimizer, *given: object) -> torch.Tensor:
        nonlocal updates
        updates += 1
        norm = original(optimizer, *given)
        if updates == 3:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].fill_(value)
        return norm

    monkeypatch.setattr(stage, "update", spoils)
    run = copied(tiny, tmp_path / "run")
    with pytest.raises(DivergedError, match="not finite, or too large, after update 3"):
        train_tokenizer(opened(run, "tokenizer.updates=3"))
    assert Run.open(run, create=False).versions("tokenizer") == [1]


# -- what a job needs -------------------------------------------------------------------------------------------------


def test_pruned_inputs_are_reported_before_the_work(run: Path) -> None:
    Run.open(run, create=False).prune("tokenizer", {1})
    with pytest.raises(ArtifactError, match="tokenizer@1 .*removed to save space"):
        train_dynamics(opened(run, "dynamics.updates=1"))
    assert Run.open(run, create=False).unfinished() == []


def test_another_run_is_told_that_it_is_used(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(tiny, tmp_path / "source")
    controller = latest(source, "controller")
    evaluate(new(tmp_path / "run"), controller=str(controller.path), episodes=2)
    (use,) = Run.open(source, create=False).uses()
    assert use[0] == controller.digest and use[1].path == (tmp_path / "run").resolve()
    Run.open(source, create=False)
    evaluate(opened(tmp_path / "run", force=True), controller=str(controller.path), episodes=2)
    assert len(Run.open(source, create=False).uses()) == 1
