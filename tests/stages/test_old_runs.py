"""Runs made by earlier versions: read, verified, resumed, extended.

`tests/old_runs/0.1.0-interrupted.tar.gz` is a tiny run of quickstart that wm 0.1.0 began in bfloat16 (bound as "auto")
and that was killed in its third epoch, between two checkpoints of the dynamics model.
`tests/old_runs/0.1.0-sections.json` holds every section's defaults of that version.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import wmcli.settings  # noqa: F401  # every section
from wmcli.artifacts import Run, check
from wmcli.config import Section
from wmcli.stages.context import Context, open_context
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.loop import run_loop
from wmcli.stages.play import play

OLD = Path(__file__).parents[1] / "old_runs" / "0.1.0-interrupted.tar.gz"
SECTIONS = json.loads((OLD.parent / "0.1.0-sections.json").read_text(encoding="utf-8"))


def sections(kind: type[Section] = Section) -> Iterator[type[Section]]:
    for each in kind.__subclasses__():
        yield each
        yield from sections(each)


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_what_a_later_version_added_does_not_make_old_jobs_others(name: str) -> None:
    found = {each.__name__: each for each in sections() if each.__module__.startswith("wmcli.")}
    assert found[name]().identity() == SECTIONS[name], "mark new keys: Field(..., json_schema_extra=ADDED)"


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
