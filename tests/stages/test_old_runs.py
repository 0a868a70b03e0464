"""Runs made by earlier versions: read, verified, resumed, extended, evaluated and upgraded.

`tests/old_runs/VERSION-NAME.tar.*` is a tiny run that wm VERSION made. `tests/old_runs/make.py` makes them at a
release, and every archive goes through the same tests. Those named `interrupted` were killed during training; 0.1.0's
began in bfloat16 (bound as "auto"), and was killed in its third epoch, between two checkpoints of the dynamics model.
`tests/old_runs/0.1.0-sections.json` holds every section's defaults of that version.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Killed, kill_at, sha256

from wmcli import __version__
from wmcli.artifacts import KINDS, Run, check, film_of, remote
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.manifest import MANIFEST_SCHEMA, MODEL_FORMAT, render
from wmcli.artifacts.overview import describe_run
from wmcli.artifacts.upgrade import is_outdated, plan_upgrade, upgrade_run
from wmcli.backbones import BACKBONES
from wmcli.cli import main
from wmcli.config import SCHEMA, digest, upgrade, validate
from wmcli.exchange import npz
from wmcli.experience import segment
from wmcli.settings import Settings, resolve
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate, summary
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


def test_films_of_an_old_run_are_found(old: Path) -> None:
    evaluation = Run.open(old, create=False).get("evaluation", 1)
    for name in ("episode", "imagination"):
        assert film_of(evaluation, name) == evaluation.path / f"{name}.gif"
    assert summary(evaluation).endswith("evaluation/v0001/imagination.gif")
    assert film_of(Run.open(old, create=False).get("tokenizer", 3), "imagination") is None
    (evaluation.path / "imagination.gif").unlink()
    assert "a film: " in summary(evaluation) and summary(evaluation).endswith("evaluation/v0001/episode.gif")
    (evaluation.path / "episode.gif").unlink()
    assert "film" not in summary(evaluation) and "imagination" not in summary(evaluation)
    (evaluation.path / "episode.webp").touch()
    assert summary(evaluation).endswith("evaluation/v0001/episode.webp")


# -- every archive ----------------------------------------------------------------------------------------------------

ARCHIVES = sorted(each.name for each in OLD.parent.glob("*.tar.*"))
FINISHED = [name for name in ARCHIVES if "interrupted" not in name]
INTERRUPTED = [name for name in ARCHIVES if "interrupted" in name]


def unpacked(name: str | Path, folder: Path) -> Path:
    """Return the run in an archive, of the folder of archives if a name is given."""
    with tarfile.open(OLD.parent / name) as archive:
        archive.extractall(folder, filter="data")
    (run,) = folder.iterdir()
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def archived(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


@pytest.mark.parametrize("archived", ARCHIVES, indirect=True)
def test_a_run_is_read_and_verified(archived: Path) -> None:
    row = describe_run(archived)
    assert row["problem"] is None and row["status"] in ("interrupted", "finished", "idle")
    assert {state for _, state, _ in check(Run.open(archived, create=False))} <= {"ok", "pruned"}


@pytest.mark.parametrize("archived", ARCHIVES, indirect=True)
def test_an_upgrade_writes_run_toml_alone_and_changes_no_setting(archived: Path) -> None:
    run = Run.open(archived, create=False)
    bound, before = run.bound(), contents(archived)
    planned = plan_upgrade(run)
    assert contents(archived) == before
    assert is_outdated(planned) == (f"schema = {SCHEMA}\n" not in before["run.toml"].decode())
    assert upgrade_run(run) == planned and run.bound() == bound
    after = contents(archived)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name for name in changed if not name.endswith(".lock")} <= {"run.toml"}
    assert f"schema = {SCHEMA}\n" in after["run.toml"].decode()
    assert {part.action for part in upgrade_run(run)} == {"keep"} and contents(archived) == after


@pytest.mark.parametrize("archived", FINISHED, indirect=True)
def test_a_finished_run_is_found_finished_and_trained_further(archived: Path) -> None:
    run = Run.open(archived, create=False)
    before = {kind: run.versions(kind) for kind in KINDS}
    for _ in range(2):  # the first command that binds rewrites run.toml
        run_loop(opened(archived, bind=True))
        assert {kind: run.versions(kind) for kind in KINDS} == before, "nothing was made again"
        assert f"schema = {SCHEMA}\n" in (archived / "run.toml").read_text()
    further = train_dynamics(opened(archived, more=True))
    newest = max(before["dynamics"])
    assert further.version == newest + 1 and further.inputs["parent"].version == newest
    assert further.metrics["updates"] == 2 + run.get("dynamics", newest).metrics["updates"]


@pytest.mark.parametrize("name", FINISHED)
def test_an_upgraded_run_is_trained_further_to_the_same_weights(name: str, tmp_path: Path) -> None:
    weights = []
    for folder in ("as it is", "upgraded"):
        path = unpacked(name, tmp_path / folder)
        if folder == "upgraded":
            upgrade_run(Run.open(path, create=False))
        run_loop(opened(path, bind=True))
        weights.append(sha256(train_dynamics(opened(path, more=True))))
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_upgraded_run_is_resumed_from_its_checkpoint_to_the_same_weights(name: str, tmp_path: Path) -> None:
    weights = []
    for folder in ("as it is", "upgraded"):
        path = unpacked(name, tmp_path / folder)
        run = Run.open(path, create=False)
        (work,) = run.unfinished()
        if folder == "upgraded":
            assert any(part.part == "checkpoints" for part in upgrade_run(run))
        context = open_context(path, None, create=False, quiet=True, bind=True)
        context.pictures = False
        run_loop(context)
        assert not work.exists() and not run.unfinished()
        weights.append({kind: sha256(run.artifacts(kind)[-1]) for kind in ("tokenizer", "dynamics", "controller")})
    assert weights[0] == weights[1]


@pytest.mark.parametrize("archived", FINISHED, indirect=True)
def test_controllers_of_a_finished_run_play_and_learn_further(archived: Path) -> None:
    run = Run.open(archived, create=False)
    if not run.versions("controller"):
        return  # a system without one
    version = max(run.versions("evaluation"))
    old = run.get("evaluation", version)
    context = opened(archived)
    again = evaluate(context, episodes=old.metrics["episodes"])
    assert (again.version, context.worked) == (version, 0), "its own evaluation is found"
    forced = evaluate(opened(archived, force=True), episodes=old.metrics["episodes"])
    assert forced.metrics["returns"] == old.metrics["returns"], "and gives the same when it is played again"
    newest = max(run.versions("controller"))
    assert imagine(opened(archived, more=True)).inputs["parent"].version == newest


@pytest.mark.slow
def test_archives_of_this_version_can_be_made(tmp_path: Path) -> None:
    subprocess.run([sys.executable, OLD.parent / "make.py", "--to", tmp_path, "cells", "interrupted"], check=True)
    archives = sorted(tmp_path.glob("*.tar.xz"))
    assert [each.name for each in archives] == [f"{__version__}-{name}.tar.xz" for name in ("cells", "interrupted")]
    for archive in archives:
        run = Run.open(unpacked(archive, tmp_path / archive.stem), create=False)
        assert {state for _, state, _ in check(run)} == {"ok"} and not is_outdated(plan_upgrade(run))
        assert describe_run(run.path)["status"] == ("interrupted" if "interrupted" in archive.name else "finished")


def test_the_page_names_the_schemas_that_this_version_writes() -> None:
    page = (OLD.parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    schemas = {"run.toml": SCHEMA, "manifest.json": MANIFEST_SCHEMA, "segment.zarr": segment.SCHEMA}
    schemas |= {"model.json": MODEL_FORMAT["schema"], "wm-run.json": remote.FORMAT["schema"]}
    schemas["recording.json"] = npz.FORMAT["schema"]
    table = {
        row[1].rpartition(": ")[2]: row[2:-1]
        for row in (line.split("|") for line in page.splitlines())
        if len(row) == 6
    }
    for file, schema in schemas.items():
        (cells,) = [cells for name, cells in table.items() if name.strip().startswith(f"`{file}`")]
        assert cells[1].strip() == str(schema) and cells[2].strip().rpartition(", ")[2] == str(schema), file


# -- wm upgrade -------------------------------------------------------------------------------------------------------


def test_an_upgrade_killed_before_its_rename_is_done_by_the_next(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, run = (old / "run.toml").read_bytes(), Run.open(old, create=False)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "write-synced", 1)
        upgrade_run(run)
    assert (old / "run.toml").read_bytes() == before and (old / ".run.toml.partial").exists()
    assert is_outdated(upgrade_run(run)) and not is_outdated(plan_upgrade(run))
    assert {each.name for each in old.iterdir() if each.name.startswith(".")} == {".lock"}


def test_the_command_says_what_it_does(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["upgrade", str(old), "--dry-run", "--json"]) == 0
    answer = capsys.readouterr()
    rows = json.loads(answer.out)
    assert {"part": "run.toml", "number": 1, "schema": 1, "newest": SCHEMA, "action": "rewrite"}.items() <= rows[
        0
    ].items()
    assert [row["number"] for row in rows if row["part"] == "experience"] == [3] and "would upgrade" in answer.err
    assert main.run(["upgrade", str(old)]) == 0 and main.run(["upgrade", str(old)]) == 0
    assert f"{old} is up to date" in capsys.readouterr().err
    assert main.run(["upgrade", str(old / "tokenizer")]) == 3


def test_a_run_at_work_is_not_upgraded(old: Path) -> None:
    before = (old / "run.toml").read_bytes()
    with exclusive(old / "dynamics", "dynamics"):
        assert main.run(["upgrade", str(old)]) == 4
    assert (old / "run.toml").read_bytes() == before


@pytest.mark.parametrize("part", ["run.toml", "manifest", "settings"])
def test_a_run_of_a_later_version_is_refused(part: str, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if part == "run.toml":
        text = (old / "run.toml").read_text()
        (old / "run.toml").write_text(f"schema = {SCHEMA + 1}\n" + text)
    else:
        folder = Run.open(old, create=False).get("evaluation", 1).path
        body = json.loads((folder / "manifest.json").read_bytes())
        body = {key: value for key, value in body.items() if key != "digest"}
        body |= {"schema": 3} if part == "manifest" else {"schema": 2, "settings_schema": SCHEMA + 1}
        body["digest"] = digest(body)
        (folder / "manifest.json").write_bytes(render(body))
    before = contents(old)
    assert main.run(["upgrade", str(old)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "use the wm that wrote" in message and "schema" in message
    assert contents(old) == before
