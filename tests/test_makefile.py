"""docs/Makefile, driven by make, with a `wm` that publishes what is not there yet and leaves alone what is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
STAGES = {
    "collect": "experience",
    "train-tokenizer": "tokenizer",
    "train-dynamics": "dynamics",
    "imagine": "controller",
    "eval": "evaluation",
}
WM = """#!/bin/sh
echo $1 >> log
case $1 in {kinds} esac
test -e $3/$kind/latest && exit
mkdir -p $3/$kind/v0001 && echo {{}} > $3/$kind/v0001/manifest.json && ln -s v0001 $3/$kind/latest
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Run make on tmp_path/run and return the stages that it called."""
    program = tmp_path / "bin" / "wm"
    program.parent.mkdir()
    program.write_text(WM.format(kinds=" ".join(f"{stage}) kind={kind};;" for stage, kind in STAGES.items())))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    log = tmp_path / "log"

    def run() -> list[str]:
        log.write_text("")
        line = ["make", "-f", DOCS / "Makefile", "R=run"]
        subprocess.run(line, cwd=tmp_path, check=True, capture_output=True)
        return log.read_text().split()

    return run


def test_every_stage_is_called_once_and_in_order(make):
    assert make() == list(STAGES)
    assert make() == []


@pytest.mark.parametrize("order", [sorted(STAGES.values()), list(STAGES.values())[::-1]], ids=["by name", "backwards"])
def test_a_copied_run_is_up_to_date_after_one_call(order, make, tmp_path):
    make()
    manifests = [tmp_path / "run" / kind / "latest" / "manifest.json" for kind in order]
    before = [path.read_bytes() for path in manifests]
    for seconds, path in enumerate(manifests):  # as cp -r may leave them
        os.utime(path, (1e9 + seconds, 1e9 + seconds))
    assert make()
    assert make() == []
    assert [path.read_bytes() for path in manifests] == before


def test_a_newer_input_calls_the_stages_behind_it(make, tmp_path):
    make()
    (tmp_path / "run" / "dynamics" / "latest" / "manifest.json").touch()
    assert make() == ["imagine", "eval"]


def test_the_page_shows_this_makefile():
    assert (DOCS / "Makefile").read_text() in (DOCS / "artifacts.md").read_text()
