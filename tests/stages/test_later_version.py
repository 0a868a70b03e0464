"""A later version of wm adds a key, renames one and changes a default: finished runs stay finished."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TINY

import wmcli
from wmcli.artifacts import KINDS, Run
from wmcli.config import SCHEMA
from wmcli.settings import freeze, resolve

PACKAGE = Path(wmcli.__file__).parent
LOOP = [
    "run.epochs=1",
    "run.tokenizer_after=0",
    "run.dynamics_after=0",
    "run.controller_after=0",
    "run.evaluate_every=0",
]
SETTINGS = [*TINY, *LOOP, "tokenizer.perceptual=none", "dynamics.reward_burn_in=2"]


def wm(code: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the package in the folder `code`."""
    environment = os.environ | {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "from wmcli.cli.main import main; main()", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def edit(file: Path, *pairs: tuple[str, str]) -> None:
    text = file.read_text(encoding="utf-8")
    for pattern, replacement in pairs:
        text, count = re.subn(pattern, replacement, text)
        assert count, pattern
    file.write_text(text, encoding="utf-8")


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The package as its next engineer would leave it."""
    folder = tmp_path / "later"
    shutil.copytree(PACKAGE, folder / "wmcli", ignore=shutil.ignore_patterns("__pycache__"))
    freeze.write(folder / "wmcli" / "config")
    edit(
        folder / "wmcli" / "world_models" / "token.py",
        (r"\breward_burn_in\b", "reward_warmup"),  # a key that the run has changed
        (r"(    prediction: Literal)", r'    dreams: int = 3\n    """Added."""\n\1'),
        (r"weight_decay: float = Field\(0\.05", "weight_decay: float = Field(0.07"),  # a default that the run has
    )
    edit(
        folder / "wmcli" / "training" / "settings.py",
        (r"(    log_every: )", r'    volume: float = 1.0\n    """Added."""\n\1'),
    )
    edit(
        folder / "wmcli" / "config" / "migrations.py",
        (rf"^SCHEMA = {SCHEMA}$".replace("^", r"(?m)^"), f"SCHEMA = {SCHEMA + 1}"),
        (
            r"(EARLIER = \(.*?),\)\n",
            rf'\1, renamed({SCHEMA}, {{"dynamics.reward_burn_in": "dynamics.reward_warmup"}}))\n',
        ),
    )
    for preset in (folder / "wmcli" / "presets").glob("*.toml"):
        preset.write_text(
            preset.read_text(encoding="utf-8").replace("reward_burn_in", "reward_warmup"), encoding="utf-8"
        )
    frozen = subprocess.run(
        [sys.executable, "-m", "wmcli.settings.freeze"],
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        check=False,
    )
    assert frozen.returncode == 0, frozen.stderr
    return folder


@pytest.mark.slow
def test_a_finished_run_stays_finished(later: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = wm(PACKAGE.parent, "run", "quickstart", "--run", str(folder), *[f"--set={each}" for each in SETTINGS])
    assert first.returncode == 0, first.stderr
    run = Run.open(folder, create=False)
    before = {kind: run.versions(kind) for kind in KINDS}
    assert before["evaluation"] == before["dynamics"] == [1]

    again = wm(later, "run", "--run", str(folder))
    assert again.returncode == 0, again.stderr
    assert {kind: run.versions(kind) for kind in KINDS} == before, "nothing was made again"
    frozen = wm(later, "diff", str(folder), str(folder))
    assert (frozen.returncode, frozen.stdout) == (0, "")

    further = wm(later, "train-dynamics", "--run", str(folder), "--more", "--quiet")
    assert further.returncode == 0, further.stderr
    manifest = json.loads((folder / "dynamics" / "v0002" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["inputs"]["parent"]["version"] == 1 and manifest["settings_schema"] == SCHEMA + 1
    # What this version cannot read by its schema it refuses in one line.
    ours = wm(PACKAGE.parent, "train-dynamics", "--run", str(folder), "--more")
    assert ours.returncode == 2 and "schema" in ours.stderr and "Traceback" not in ours.stderr

    played = wm(later, "eval", "--run", str(folder), "--episodes", "2", "--quiet")
    assert played.returncode == 0, played.stderr
    asked = wm(later, "train-dynamics", "--run", str(folder), "--set", "dynamics.reward_burn_in=1")
    assert asked.returncode == 2 and "dynamics.reward_warmup" in asked.stderr


@pytest.mark.slow
def test_without_the_migration_the_run_cannot_be_read(later: Path, tmp_path: Path) -> None:
    """The rename alone breaks the run: the test above would fail without its migration."""
    folder = tmp_path / "run"
    settings = resolve("quickstart", ["dynamics.reward_burn_in=2"])
    Run.open(folder, create=True).bind("quickstart", settings.plain())
    shutil.copy(PACKAGE / "config" / "migrations.py", later / "wmcli" / "config" / "migrations.py")
    freeze.write(later / "wmcli" / "config")
    answer = wm(later, "run", "--run", str(folder))
    assert answer.returncode == 2 and "reward_burn_in" in answer.stderr


def test_defaults_are_those_of_the_schema() -> None:
    """Where a key was added: python -m wmcli.settings.freeze; renamed, or its default changed: config/migrations.py."""
    from wmcli.config.migrations import frozen_defaults

    assert freeze.defaults() == frozen_defaults(SCHEMA)
