from __future__ import annotations

import os
from pathlib import Path

import pytest

from wmcli.artifacts import Run


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests kill processes, not the power, so nothing need reach the disk; `test_publish_order` sees that it would."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(tmp_path / "run", create=True)
