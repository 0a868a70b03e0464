"""`wm export controller`: the folder is a run of its own, which every reader takes, wherever it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_systems import Make
from tiny_run import copied, opened

import wmcli
from wmcli.artifacts import Artifact, Run, check, open_artifact
from wmcli.artifacts.manifest import MODEL
from wmcli.cli.main import run as command
from wmcli.errors import ArtifactError, UsageError
from wmcli.progress import Progress
from wmcli.stages.evaluate import evaluate
from wmcli.stages.exported import export_controller
from wmcli.stages.imagine import imagine


def exported(run: Path, out: Path) -> Path:
    return export_controller(newest(run), out, Progress(quiet=True))


def newest(run: Path, kind: str = "controller") -> Artifact:
    return Run.open(run, create=False).resolve(kind, kind)


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    """An exported controller, far from the run, which is gone."""
    exported(run, tmp_path / "out")
    (tmp_path / "far").mkdir()
    shutil.move(tmp_path / "out", tmp_path / "far" / "model")
    shutil.rmtree(run)
    return tmp_path / "far" / "model"


def test_it_loads_in_one_line_with_the_same_weights(tiny: Path, folder: Path) -> None:
    theirs, ours = wmcli.load(folder), wmcli.load(newest(tiny))
    assert type(theirs) is type(ours) and theirs.artifact.digest == ours.artifact.digest
    for name in ("controller", "world_model"):
        pairs = zip(_state(theirs, name).items(), _state(ours, name).items(), strict=True)
        assert all(key == other and torch.equal(one, two) for (key, one), (other, two) in pairs)


def _state(model: object, name: str) -> dict[str, torch.Tensor]:
    module = getattr(model, name, None) or getattr(model.dynamics, name)
    return module.state_dict()


def test_it_is_evaluated_as_in_its_run(tiny: Path, folder: Path) -> None:
    before = newest(tiny, "evaluation").metrics
    assert len(newest(folder, "evaluation").metrics["returns"]) == len(before["returns"]), "went along"
    context = opened(folder)
    context.force = True
    again = evaluate(context)
    assert again.metrics["returns"] == before["returns"] and again.metrics["total_steps"] == before["total_steps"]


def test_another_run_takes_it_by_the_path_of_the_folder(tiny: Path, folder: Path, tmp_path: Path) -> None:
    evaluation = evaluate(opened(tmp_path / "other", new=True), controller=str(folder))
    assert evaluation.metrics["returns"] == newest(tiny, "evaluation").metrics["returns"]
    assert evaluation.inputs["controller"].digest == newest(folder).digest


def test_it_holds_what_it_needs_and_of_experience_the_manifest(folder: Path) -> None:
    states = {name.partition("@")[0]: state for name, state, _ in check(Run.open(folder, create=False))}
    assert states == {
        "experience": "pruned",
        "tokenizer": "ok",
        "dynamics": "ok",
        "controller": "ok",
        "evaluation": "ok",
    }
    assert [path.name for path in (folder / "experience").glob("*/*.zarr")] == []


def test_the_card_says_what_it_is(tiny: Path, folder: Path) -> None:
    card = (folder / "README.md").read_text()
    metrics = newest(tiny, "evaluation").metrics
    for text in ("wm/Catch-v0", "quickstart", f"| {metrics['mean']:.4g} |", "played by wm", 'wmcli.load("out")'):
        assert text in card, text
    steps = newest(tiny, "experience").metrics["total_steps"]
    assert f"| environment steps | {steps} |" in card


def test_inputs_of_another_run_go_along(run: Path, tmp_path: Path) -> None:
    """A controller that learned in the dynamics of a run that is gone."""
    other = opened(tmp_path / "other", new=True)
    inputs = {kind: str(newest(run, kind).path) for kind in ("dynamics", "experience")}
    controller = imagine(other, **inputs)
    assert controller.inputs["dynamics"].path.startswith("/")
    exported(tmp_path / "other", tmp_path / "out")
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "other")
    assert wmcli.load(tmp_path / "out").artifact.digest == controller.digest
    assert all(state in ("ok", "pruned") for _, state, _ in check(Run.open(tmp_path / "out", create=False)))


@pytest.mark.parametrize("system", ["drama", "unizero"])
def test_other_systems(system: str, small: Make, tmp_path: Path) -> None:
    """Dynamics that contain their tokenizer, and a controller that searches."""
    run = copied(small(system, trained=True), tmp_path / "run")
    imagine(opened(run))
    folder = exported(run, tmp_path / "out")
    assert not (folder / "tokenizer").exists()
    shutil.rmtree(run)
    assert wmcli.load(folder).artifact.kind == "controller"


def test_a_damaged_or_pruned_model_is_not_exported(run: Path, tmp_path: Path) -> None:
    Run.open(run, create=False).prune("dynamics", [1])
    with pytest.raises(ArtifactError, match="pruned"):
        exported(run, tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []


def test_it_does_not_overwrite(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists and is not empty"):
        exported(run, run)
    with pytest.raises(UsageError, match="create it first"):
        exported(run, tmp_path / "a" / "b")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, '{"controller": "controller/v0001"}', '{"format": "wm-model", "schema": 2}']
    + [json.dumps({"format": "wm-model", "schema": 1, "controller": place}) for place in ("../x", "/etc", 3, None)],
)
def test_a_marker_that_lies_leads_nowhere(text: str, tmp_path: Path) -> None:
    (tmp_path / MODEL).write_text(text)
    with pytest.raises(ArtifactError, match="manifest.json"):
        open_artifact(tmp_path)


def test_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["export", "controller", "--run", str(run), "--out", "model", "-q"]) == 0
    assert capsys.readouterr().out == "model\n"
    assert command(["eval", "--run", "model", "--episodes", "2", "--json", "-q"]) == 0
    assert len(json.loads(capsys.readouterr().out)["metrics"]["returns"]) == 2
    assert command(["eval", "--controller", "model", "--episodes", "3", "--json", "-q"]) == 0
    assert len(json.loads(capsys.readouterr().out)["metrics"]["returns"]) == 3
    assert not Path("runs").exists(), "the folder is the run"
    assert command(["eval", "--run", str(run), "--controller", "model", "--episodes", "4", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["path"].startswith(str(run)), "a named run is kept to"
    assert command(["verify", "--run", "model"]) == 0
    assert np.isfinite(len(capsys.readouterr().out))
