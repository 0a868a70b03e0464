"""An installed package has every file that the code reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_data_file_is_installed() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    installed = {
        path for package, patterns in table.items() for each in patterns for path in _folder(package).glob(each)
    }
    data = {
        path
        for path in (ROOT / "wmcli").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    data |= set((ROOT / "presets").rglob("*.toml"))
    assert {path.name for path in data} == {path.name for path in installed}


def _folder(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))
