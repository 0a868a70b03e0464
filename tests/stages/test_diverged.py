"""Training that diverges publishes nothing, and the command in its message goes on with a lower learning rate."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_stage_loop import LOOP, bound
from tiny_run import TRAINING, copied, latest, opened

from wmcli.artifacts import Run
from wmcli.cli.main import run as wm
from wmcli.errors import DivergedError
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.loop import run_loop

MODULES = {"tokenizer": "tokenizer", "dynamics": "dynamics", "controller": "imagination"}
COMMANDS = {"tokenizer": "train-tokenizer", "dynamics": "train-dynamics", "controller": "imagine"}
EAGER = "training.checkpoint_seconds=0"


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], str]:
    """`diverging(kind, train)`: the command in the message where the third update leaves NaN in the weights."""

    def message(kind: str, train: Callable[[], object]) -> str:
        module, updates = importlib.import_module(f"wmcli.trainers.{MODULES[kind]}"), 0
        plain = module.update

        def spoil(optimizer: torch.optim.Optimizer, *given: object) -> torch.Tensor:
            nonlocal updates
            norm = plain(optimizer, *given)
            updates += 1
            if updates == 3:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].fill_(float("nan"))
            return norm

        with monkeypatch.context() as patch, pytest.raises(DivergedError) as caught:
            patch.setattr(module, "update", spoil)
            train()
        command = re.search(r"diverged: .* not finite.* Go on with: (wm .*)$", str(caught.value))
        assert command is not None, caught.value
        return command[1]

    return message


def rate(folder: Path, kind: str) -> float:
    return latest(folder, kind).settings[kind]["learning_rate"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("kind", TRAINING)
def test_the_command_in_the_message_goes_on_with_a_lower_rate(
    tiny: Path, tmp_path: Path, diverging: Callable[[str, Callable[[], object]], str], kind: str, more: bool
) -> None:
    run, before = copied(tiny, tmp_path / "a run"), rate(tiny, kind)
    overrides = (EAGER, f"{kind}.batch=3", f"{kind}.updates=4")
    line = diverging(kind, lambda: TRAINING[kind](opened(run, *overrides, more=more)))
    assert Run.open(run, create=False).versions(kind) == [1]
    assert line.startswith(f"wm {COMMANDS[kind]} --run '{run}'")
    assert wm(shlex.split(line)[1:]) == 0
    artifact = latest(run, kind)
    assert artifact.version == 2 and artifact.settings[kind]["batch"] == 3
    assert rate(run, kind) == pytest.approx(before / 3, rel=0.02)
    assert ("parent" in artifact.inputs) == more
    assert artifact.metrics["loss_spikes"] == 0


def test_it_names_the_inputs_and_the_rate_of_the_command(
    tiny: Path, tmp_path: Path, diverging: Callable[[str, Callable[[], object]], str]
) -> None:
    run = copied(tiny, tmp_path / "run")
    TRAINING["tokenizer"](opened(run, force=True))
    line = diverging(
        "dynamics",
        lambda: train_dynamics(opened(run, "dynamics.learning_rate=0.3"), tokenizer="tokenizer@1"),
    )
    assert line == f"wm train-dynamics --run {run} --tokenizer tokenizer@1 --set dynamics.learning_rate=0.1"


@pytest.mark.slow
def test_a_loop_goes_on_from_the_epoch(tmp_path: Path, diverging: Callable[[str, Callable[[], object]], str]) -> None:
    run = tmp_path / "run"
    opened(run, *[text for text in LOOP if "run.epochs" not in text], "run.epochs=2", new=True)
    run_loop(bound(run))
    before = rate(run, "dynamics")
    line = diverging("dynamics", lambda: run_loop(bound(run, "run.epochs=3", EAGER)))
    assert re.fullmatch(rf"wm run --run {run} --from-epoch 3 --set dynamics.learning_rate=[\d.e-]+", line)
    assert wm(shlex.split(line)[1:]) == 0
    assert rate(run, "dynamics") == pytest.approx(before / 3, rel=0.02)
    assert Run.open(run, create=False).versions("dynamics") == [1, 2]
