"""Tests of the tests: each mistake of `mutations.py` is made in a copy of the package, and the tests must fail.

`pytest -q -m mutations -n 2` makes all of them, in half an hour or so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
COPIED = ("wmcli", "kernels", "presets", "tests", "pyproject.toml", "README.md", "CHANGELOG.md", "docs")
TESTS_FAILED = 1
"""Exit code of pytest."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_place_is_there(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.before) == 1
    assert mutation.after != mutation.before


@pytest.mark.mutations
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_tests_notice(mutation: Mutation, tmp_path: Path) -> None:
    for name in COPIED:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, tmp_path / name)
    file = tmp_path / mutation.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutation.before, mutation.after), encoding="utf-8")
    tests, _, chosen = mutation.tests.partition(" -k ")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + ["-m", "not learning and not mutations and not gpu", *tests.split(), *(["-k", chosen] if chosen else [])],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == TESTS_FAILED, f"{mutation.name} survived: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
