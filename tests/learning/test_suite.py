"""The report on the small games: it trains, prints a table, and prints the same again from finished runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import suite

pytestmark = pytest.mark.slow

TINY = {
    "collect.steps": 300,
    "run.epochs": 1,
    "run.collect_epochs": 1,
    "dynamics.updates": 2,
    "controller.updates": 1,
    "evaluation.episodes": 4,
}


def test_it_prints_the_same_table_again_from_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--runs", str(tmp_path), "--preset", "muzero-quick", "--games", "Jump"]
    command += [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    assert suite.main(command) == 0
    table = capsys.readouterr().out
    assert "| Jump | unseen | -0.55 | 5.72 | " in table and "min) |" in table
    assert suite.main([*command, "--slots", "2"]) == 0
    assert capsys.readouterr().out == table
    assert len([*tmp_path.glob("muzero-quick-Jump/evaluation/v*")]) == 1


def test_a_run_that_fails_leaves_an_empty_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--runs", str(tmp_path), "--preset", "no-preset", "--games", "Reach"]) == 1
    assert "| Reach | development | 0.33 | 1.00 | - |" in capsys.readouterr().out
    assert "no-preset" in (tmp_path / "no-preset-Reach.log").read_text(encoding="utf-8")
