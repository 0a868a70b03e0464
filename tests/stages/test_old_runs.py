"""Runs made by earlier versions: read, verified, resumed, extended.

`tests/old_runs/0.1.0-interrupted.tar.gz` is a tiny run of quickstart that wm 0.1.0 began in bfloat16 (bound as "auto")
and that was killed in its third epoch, between two checkpoints of the dynamics model.
`tests/old_runs/0.1.0-{drama,s4wm,unizero,cells}.tar.xz` are tiny finished runs of other presets, made by 0.1.0 without
pictures. `tests/old_runs/0.1.0-sections.json` holds every section's defaults of that version.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from wmcli.artifacts import KINDS, Run, check
from wmcli.backbones import BACKBONES
from wmcli.config import upgrade, validate
from wmcli.settings import Settings, resolve
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.stages.play import play

OLD = Path(__file__).parents[1] / "old_runs" / "0.1.0-interrupted.tar.gz"
SECTIONS = json.loads((OLD.parent / "0.1.0-sections.json").read_text(encoding="utf-8"))


# The section of the settings that each class was, and its kind where there were several.
PLACES = {
    "EnvironmentSettings": ("environment", None),
    "CollectSettings": ("collect", None),
    "TokenizerSettings": ("tokenizer", "vq"),
    "CategoricalTokenizerSettings": ("tokenizer", "categorical"),
    "TokenWorldModelSettings": ("dynamics", "token"),
    "LatentWorldModelSettings": ("dynamics", "latent"),
    "CellsSettings": ("dynamics", "cells"),
    "UniZeroSettings": ("dynamics", "unizero"),
    "MuZeroSettings": ("dynamics", "muzero"),
    "ReinforceSettings": ("controller", "reinforce"),
    "ActorCriticSettings": ("controller", "actor-critic"),
    "MCTSSettings": ("controller", "mcts"),
    "EvaluationSettings": ("evaluation", None),
}


@pytest.mark.parametrize("name", PLACES)
def test_jobs_of_version_0_1_0_are_known_by_the_values_that_it_knew_them_by(name: str) -> None:
    section, kind = PLACES[name]
    values: dict[str, Any] = {section: {"kind": kind}} if kind else {}
    if kind == "latent":
        values["tokenizer"] = {"kind": "categorical"}
    if kind == "categorical":
        values["dynamics"] = {"kind": "latent"}
    if kind == "cells":
        values["controller"] = {"imagination_horizon": 4}
    if kind == "actor-critic":
        values["dynamics"] = {"sequence_length": 20}
    if kind == "mcts":
        values["dynamics"] = {"kind": "unizero"}
    (earlier,) = validate(Settings, values, "here").identity("seed", section).earlier
    assert earlier == {"seed": 1, section: SECTIONS[name]}


@pytest.mark.parametrize("kind", BACKBONES)
def test_jobs_of_version_0_1_0_are_known_by_the_settings_of_all_backbones(kind: str) -> None:
    (earlier,) = resolve("rem", [f"backbone.kind={kind}"]).identity("backbone").earlier
    assert earlier == {"backbone": SECTIONS["BackboneSettings"] | {"name": kind}}
    (other,) = resolve("gridworld", [f"backbone.kind={kind}"]).identity("backbone").earlier
    assert other["backbone"]["mamba2"]["head_width"] == 8, "alternatives of the preset counted as well"


def test_keys_that_only_other_kinds_have_are_set_aside_and_still_name_the_jobs() -> None:
    values = resolve("unizero-quick").plain()
    values["collect"] |= {"recordings": "", "episodes": 7, "validation": 100, "test": 200}
    values["backbone"]["prior"] |= {"form": "additive", "mean": 2.0, "span": 6.0}
    upgraded = upgrade(values, 2)
    unused = {"collect": {"episodes": 7}, "backbone": {"prior": {"mean": 2.0}}}
    assert upgraded["alternatives"]["unused"] == unused, "those at their defaults are dropped"
    assert upgrade(upgraded, 2) == upgraded
    settings = validate(Settings, upgraded, "here")
    (earlier,) = settings.identity("collect", "backbone").earlier
    assert earlier["collect"] == SECTIONS["CollectSettings"] | {"episodes": 7, "steps": 6000, "epsilon": 0.0}
    assert earlier["backbone"]["transformer"]["prior"]["mean"] == 2.0
    assert earlier["backbone"]["transformer"]["prior"]["span"] == 6.0
    assert (
        settings.identity("collect", "backbone").values
        == resolve("unizero-quick").identity("collect", "backbone").values
    )


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def opened(folder: Path, *overrides: str, **given: object) -> Context:
    context = open_context(folder, None, overrides, create=False, quiet=True, **given)
    context.pictures = False
    return context


def test_an_old_run_is_intact(old: Path) -> None:
    states = {name: state for name, state, _ in check(Run.open(old, create=False))}
    assert states == {
        "experience@1": "ok",
        "experience@2": "ok",
        "experience@3": "ok",
        "tokenizer@1": "pruned",
        "tokenizer@2": "ok",
        "tokenizer@3": "ok",
        "dynamics@1": "pruned",
        "dynamics@2": "ok",
        "controller@1": "pruned",
        "controller@2": "ok",
        "evaluation@1": "ok",
    }


def test_an_old_run_is_resumed_and_extended(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = open_context(old, None, create=False, bind=True)
    last = run_loop(context)
    said = capsys.readouterr().err
    run = Run.open(old, create=False)
    versions = {kind: run.versions(kind) for kind in ("experience", "tokenizer", "dynamics", "controller")}
    assert versions == dict.fromkeys(versions, [1, 2, 3]), "nothing was done again"
    assert "bfloat16" in said and last.name == "evaluation@2"
    assert run.get("dynamics", 3).manifest["machine"]["precision"] == "bfloat16"
    assert run.unfinished() == []
    again = run_loop(opened(old, "run.epochs=4", "run.collect_epochs=4", bind=True))
    assert again.input("controller").version == 4


def test_models_of_an_old_run_are_used(old: Path, tmp_path: Path) -> None:
    assert evaluate(opened(old), episodes=2).inputs["controller"].version == 2
    assert imagine(opened(old, more=True)).inputs["parent"].version == 2
    play(opened(old), source="imagination", out=tmp_path / "film.gif", controller="controller@2", seed=1)
    assert (tmp_path / "film.gif").exists()


FINISHED = ["drama", "s4wm", "unizero", "cells"]
PLAYED = ["drama", "unizero"]  # the others have no controller


@pytest.fixture
def finished(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(OLD.parent / f"0.1.0-{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param


@pytest.mark.parametrize("finished", FINISHED, indirect=True)
def test_a_finished_run_is_found_finished_and_trained_further(finished: Path) -> None:
    run = Run.open(finished, create=False)
    before = {kind: run.versions(kind) for kind in KINDS}
    assert {state for _, state, _ in check(run)} == {"ok"}
    for schema in (1, 2):  # the first command that binds rewrites run.toml
        assert ("schema = 2\n" in (finished / "run.toml").read_text()) == (schema == 2)
        run_loop(opened(finished, bind=True))
        assert {kind: run.versions(kind) for kind in KINDS} == before, "nothing was made again"
    further = train_dynamics(opened(finished, more=True))
    newest = max(before["dynamics"])
    assert further.version == newest + 1 and further.inputs["parent"].version == newest
    assert further.metrics["updates"] == 2 + run.get("dynamics", newest).metrics["updates"]


@pytest.mark.parametrize("finished", PLAYED, indirect=True)
def test_controllers_of_a_finished_run_play_and_learn_further(finished: Path) -> None:
    run = Run.open(finished, create=False)
    version = max(run.versions("evaluation"))
    old = run.get("evaluation", version)
    context = opened(finished)
    again = evaluate(context, episodes=old.metrics["episodes"])
    assert (again.version, context.worked) == (version, 0), "its own evaluation is found"
    forced = evaluate(opened(finished, force=True), episodes=old.metrics["episodes"])
    assert forced.metrics["returns"] == old.metrics["returns"], "and gives the same when it is played again"
    assert imagine(opened(finished, more=True)).inputs["parent"].version == max(run.versions("controller")) - 1
