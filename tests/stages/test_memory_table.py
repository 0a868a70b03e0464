"""Tables and curves of several memory models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wmcli.errors import UsageError
from wmcli.report.plots import write_figure
from wmcli.settings import resolve
from wmcli.stages import memory_table
from wmcli.stages.memory_table import plot_curves, table
from wmcli.stages.scores import Score, differences_of_models


class Found:
    """An evaluation and, at once, the dynamics that it is of."""

    name = "found@1"

    def __init__(self, *changes: str, protocol: str = "generation", **metrics: Any) -> None:
        settings = resolve("doors-small", list(changes))
        self.settings = settings.model_dump(mode="json")
        self.metrics = {
            "environment": "wm/MultiDoorsKeys-3-v0",
            "backbone": settings.backbone.kind,
            "posterior": settings.dynamics.posterior,
            "rows": settings.dynamics.rows,
            "parameters": 10,
            "updates": 5,
            "protocol": protocol,
        } | metrics

    def input(self, name: str) -> Found:
        assert name == "dynamics"
        return self


def estimate(value: float, low: float = 0.0, high: float = 9.0) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def generated(*changes: str, error: float, **metrics: Any) -> Found:
    return Found(*changes, reconstruction=estimate(0.5), generation=estimate(error, 1, 3), **metrics)


def test_seeds_stand_in_one_row_beside_the_paper() -> None:
    runs = [generated("seed=1", error=1.0), generated("seed=2", "training.threads=1", error=3.0)]
    (row,) = table(runs)
    assert row["model"] == "S4WM" and row["runs"] == 2 and "with" not in row
    assert row["generation"] == "2 ± 1.41" and row["paper generation"] == "0.04"
    rows = table([*runs, generated("backbone.kind=mamba2", error=2.0)])
    assert [each["model"] for each in rows] == ["S4WM", "mamba2"]
    assert rows[1]["generation"] == "2 (1-3)" and rows[1]["paper generation"] == "-"


def test_what_is_pooled_is_compared_as_returns_are() -> None:
    """Test episodes over all rows; seeds and settings within one, of which the model's own are those of the row."""
    runs = [
        generated("seed=1", error=1.0, episodes=20),
        generated("seed=1", "training.threads=1", error=1.5, episodes=20),
        generated("seed=2", error=3.0, episodes=5),
        generated("seed=1", "backbone.kind=mamba2", error=3.0, episodes=5),
        generated("seed=3", "training.sampling=uniform", "dynamics.rows=windows", error=3.0, episodes=5),
        generated("seed=4", "dynamics.rows=windows", error=3.0, episodes=5),
    ]
    scores = [Score(Path(f"run{place}"), run) for place, run in enumerate(runs)]
    assert memory_table.pools(runs) == [[0, 1, 2], [3], [4, 5]]
    assert differences_of_models(scores, memory_table.pools(runs)) == [
        "episodes differ: 20 (run0, run1), 5 (run2, run3, run4 and 1 more)",
        "run0, run1 have the same settings and the same seed, so they are no independent samples.",
        "runs of different settings are pooled into one number: training.sampling (run4, run5)",
    ]
    assert not differences_of_models(scores[2:4], memory_table.pools(runs[2:4]))


def test_diverged_episodes_stand_in_the_cell() -> None:
    off = {"value": None, "low": None, "high": None, "diverged": 3}
    first, second = generated("seed=1", error=1.0, episodes=5), generated("seed=2", error=3.0, episodes=5)
    first.metrics["generation"] = off
    (row,) = table([first])
    assert row["generation"] == "diverged in 3" and row["reconstruction"].startswith("0.5")
    (row,) = table([first, second])
    assert row["generation"] == "diverged in 3"
    assert memory_table.summarize(first).endswith("generation diverged in 3")


def test_doors_have_an_interval_and_those_of_earlier_versions_none() -> None:
    former = Found("seed=1", protocol="doors", state=0.5, whole=0.25, number=90)
    run = Found("seed=2", protocol="doors", state=estimate(0.75, 0.5, 1), whole=estimate(0.5, 0.25, 0.75), number=90)
    assert table([former])[0]["state %"] == "50.0" and table([run])[0]["state %"] == "75.0 (50.0-100.0)"
    assert table([former, run])[0]["state and color %"] == "37.5 ± 17.7"


def test_models_of_one_name_are_told_apart_by_their_settings() -> None:
    cache = "backbone.kind=transformer-xl", "backbone.width=68", "backbone.heads=4"
    runs = [
        generated(*cache, "backbone.memory_length=8", error=7.0),
        generated(error=1.0),
        generated(*cache, "backbone.memory_length=70", error=2.0),
        generated(*cache, "backbone.memory_length=8", "seed=2", error=8.0),
    ]
    rows = table(runs)
    assert [(row["model"], row["with"], row["runs"], row["generation"]) for row in rows] == [
        ("S4WM", "-", 1, "1 (1-3)"),
        ("TSSM-XL", "backbone.memory_length=8", 2, "7.5 ± 0.707"),
        ("TSSM-XL", "backbone.memory_length=70", 1, "2 (1-3)"),
    ]
    assert list(rows[0])[:6] == ["task", "model", "with", "parameters", "updates", "runs"]


def test_many_differences_are_reported_in_part() -> None:
    changes = [
        "dynamics.batch=3",
        "dynamics.updates=7",
        "backbone.width=32",
        "backbone.state_size=8",
        "collect.episodes=9",
    ]
    rows = table([generated(error=1.0), generated(*changes, error=2.0)])
    assert rows[1]["with"].endswith(" and 1 more") and rows[1]["with"].count("=") == 4


def test_the_paper_stands_beside_its_own_columns() -> None:
    scores = {"walls": 0.9, "objects": 4.0, "constant_walls": 0.7, "constant_objects": 20.0}
    (row,) = table(
        [
            Found(
                "backbone.kind=s5",
                protocol="probe",
                environment="wm/Maze-9-v0",
                **{name: estimate(value, value, value) for name, value in scores.items()},
            )
        ]
    )
    assert row["model"] == "S5WM" and row["paper walls %"] == "98.3" and row["paper objects"] == "1.8"
    assert row["constant walls %"] == "70.0 (70.0-70.0)" and "paper constant walls %" not in row


# -- curves -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The lines of the curves drawn last."""
    lines: dict[str, Any] = {}

    def keep(found: dict[str, Any], **labels: Any) -> None:
        lines.update(found)

    monkeypatch.setattr(memory_table, "error_curves", keep)
    return lines


def recalled(*changes: str, errors: list[float]) -> Found:
    by_k = {str(k): estimate(error, error - 1, error + 1) for k, error in zip((20, 0, 2), errors, strict=True)}
    return Found(*changes, protocol="recall", environment="wm/TwoRoomsTeleport-v0", recall=by_k)


def test_a_line_is_of_a_model(drawn: dict[str, Any]) -> None:
    plot_curves(
        [
            recalled(errors=[2.0, 9.0, 5.0]),
            recalled("backbone.kind=mamba2", errors=[1.0, 3.0, 2.0]),
            recalled("seed=2", errors=[4.0, 7.0, 5.0]),
        ]
    )
    assert list(drawn) == ["S4WM (2 runs, lowest to highest)", "mamba2 (95 % interval)"]
    x, (value, low, high) = drawn["mamba2 (95 % interval)"]  # one run: its own interval
    assert x == [0, 2, 20]
    np.testing.assert_array_equal([low, value, high], [[2, 1, 0], [3, 2, 1], [4, 3, 2]])
    x, (value, low, high) = drawn["S4WM (2 runs, lowest to highest)"]
    np.testing.assert_allclose([low, value, high], [[7, 5, 2], [8, 5, 3], [9, 5, 4]])


def test_curves_over_the_query_leave_gaps_and_stay_above_nothing(drawn: dict[str, Any]) -> None:
    curve = {"generation": {"mean": [0.5, None, 2.0], "low": [-1.0, None, 1.0], "high": [1.0, None, 3.0]}}
    plot_curves([generated(error=1.0, curve=curve)])
    x, (value, low, high) = drawn["S4WM (95 % interval)"]
    assert x == [1, 2, 3]
    np.testing.assert_array_equal(value, [0.5, np.nan, 2])
    np.testing.assert_array_equal(low, [memory_table.LOWEST, np.nan, 1])


def test_a_picture_is_written(tmp_path: Path) -> None:
    write_figure(tmp_path / "recall.png", plot_curves([recalled(errors=[2.0, 9.0, 5.0])]))
    assert (tmp_path / "recall.png").stat().st_size > 1000


def test_curves_of_two_tasks_are_refused() -> None:
    other = recalled(errors=[1.0, 1.0, 1.0])
    other.metrics["environment"] = "wm/TenRoomsTeleport-v0"
    with pytest.raises(UsageError, match="these runs are of TenRoomsTeleport, TwoRoomsTeleport"):
        plot_curves([recalled(errors=[1.0, 1.0, 1.0]), other])
