"""The studies of docs/: every command line that make would run is one that wm understands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from wmcli.assemble import parameter_counts
from wmcli.envs import make
from wmcli.settings import resolve
from wmcli.spaces import Spaces
from wmcli.stages.checks import check_rows
from wmcli.stages.measures import check_measures

DOCS = Path(__file__).parent.parent / "docs"
STUDIES = sorted(DOCS.glob("*.mk"))
ACTIONS = 18

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands(study: Path, *given: str) -> list[tuple[str, list[str]]]:
    """Preset and overrides of each `wm run` of a study, with variables as `given`."""
    line = ["make", "-n", "-f", study, *given]
    told = subprocess.run(line, capture_output=True, text=True, check=True, cwd=DOCS).stdout
    runs = [line for line in told.replace("\\\n", " ").splitlines() if line.lstrip().startswith("wm run ")]
    found = []
    for run in runs:
        overrides = re.findall(r"--set (\S+)", run)
        found.append((run.split()[2], overrides))
    return found


def shown(study: Path) -> list[str]:
    """What the command lines that a study's head shows give to make, and nothing first."""
    lines = re.findall(r"^#   make.* -f docs/\S+(.*?)(?:   |$)", study.read_text(), re.MULTILINE)
    return list(dict.fromkeys(["", *lines]))


@pytest.mark.parametrize(
    ("study", "given"), [pytest.param(each, line, id=each.name + line) for each in STUDIES for line in shown(each)]
)
def test_every_run_of_a_study_is_one_that_can_be_built(study: Path, given: str) -> None:
    found = commands(study, *shlex.split(given))
    assert found
    for preset, overrides in found:
        settings = resolve(preset, overrides)
        make(settings.environment, train=False).close()
        assert parameter_counts(settings, Spaces.of_images(settings.environment.size, ACTIONS))
        check_rows(settings)
        check_measures(settings)


def test_documents_name_no_study_that_is_not_there() -> None:
    named = {name for page in DOCS.rglob("*.md") for name in re.findall(r"[\w/-]+\.mk\b", page.read_text())}
    assert named and {Path(name).name for name in named} <= {study.name for study in STUDIES}
