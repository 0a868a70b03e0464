"""Tables of a sweep: what they average over, and what stands beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_aggregate import scored

from wmcli.errors import ArtifactError
from wmcli.metrics import atari
from wmcli.progress import Progress
from wmcli.stages.variants import AGGREGATES, COST, games_table, variants_table
from wmcli.sweeps.attempt import write_record
from wmcli.sweeps.plan import Sweep, read_sweep
from wmcli.sweeps.tables import compare_sweep

QUIET = Progress(quiet=True)
MEANS = {
    "retnet": {"Pong-v5": [-10.0, -20.0], "Boxing-v5": [10.0, 20.0]},
    "mamba2": {"Pong-v5": [0.0], "Boxing-v5": [30.0]},
}


def sweep_of(folder: Path, games: list[str]) -> Sweep:
    file = folder / "sweep.toml"
    file.write_text(
        f'preset = "rem-quick"\nfolder = "{folder}/runs"\n[vary]\nenvironment.id = {games}\n'
        'backbone.kind = ["retnet", "mamba2"]\nseed = [1, 2]\n'
    )
    return read_sweep(file)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Two games and backbones. Seed 2 of mamba2 is not evaluated."""
    found = sweep_of(tmp_path, ["ALE/Pong-v5", "ALE/Boxing-v5"])
    for run in found.runs:
        game, backbone, seed = run.name.split("/")
        means = MEANS[backbone][game]
        if (number := int(seed[-1]) - 1) < len(means):
            name, mean = f"ALE/{game}", means[number]
            settings = {"seed": number, "backbone": {"kind": backbone}}
            scored(run.folder, mean, name, atari.human_normalized(name, mean), settings=settings)
            found.records.mkdir(parents=True, exist_ok=True)
            write_record(run, found.records, {"seconds": 100.0 * (number + 1), "peak_bytes": 10**9 * (number + 1)})
    return found


def rows_of(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_games_have_a_column_for_each_variant_and_published_system(sweep: Sweep) -> None:
    found = compare_sweep(sweep, QUIET)
    assert found.missing == ["Pong-v5/mamba2/seed-2", "Boxing-v5/mamba2/seed-2"]
    (pong,) = rows_of(found.rows, table="games", environment="ALE/Pong-v5", variant="retnet")
    assert pong["value"] == -15.0 and -20 <= pong["low"] < pong["high"] <= -10 and pong["runs"] == 2
    assert pong["human_normalized"] == pytest.approx(atari.human_normalized("ALE/Pong-v5", -15.0))
    table = games_table(found.rows)
    assert [row["environment"] for row in table] == ["ALE/Pong-v5", "ALE/Boxing-v5"]
    assert list(table[0])[:3] == ["environment", "retnet", "mamba2"] and table[0]["mamba2"] == "0"
    assert float(table[1]["REM"]) == pytest.approx(atari.reference("ALE/Boxing-v5", "REM"), rel=1e-3)


def test_aggregates_are_over_games_and_seeds(sweep: Sweep) -> None:
    found = compare_sweep(sweep, QUIET)

    def value(variant: str, statistic: str) -> dict[str, Any]:
        (row,) = rows_of(found.rows, table=AGGREGATES, variant=variant, statistic=statistic)
        return row

    normalized = [atari.human_normalized(f"ALE/{game}", sum(means) / 2) for game, means in MEANS["retnet"].items()]
    assert value("retnet", "mean")["value"] == pytest.approx(sum(normalized) / 2)
    assert value("retnet", "mean")["low"] < value("retnet", "mean")["high"]
    for statistic in ("median", "iqm", "optimality_gap"):
        assert value("retnet", statistic)["unit"] == "human-normalized score"
    better = value("mamba2", "improvement over retnet")
    assert better["value"] == 1.0 and better["unit"] == "probability"
    assert not rows_of(found.rows, variant="retnet", statistic="improvement over retnet")
    table = variants_table(found.rows, AGGREGATES)
    assert [row["variant"] for row in table] == ["retnet", "mamba2"] and table[0]["unit"] == "human-normalized score"


def test_cost_is_that_of_the_records(sweep: Sweep) -> None:
    found = compare_sweep(sweep, QUIET)
    costs = {row["statistic"]: row["value"] for row in rows_of(found.rows, table=COST, variant="retnet")}
    assert costs == {"hours": 150 / 3600, "memory": 2.0, "steps per second": pytest.approx(4 * 400 / 600)}


def test_without_human_scores_there_are_no_aggregates_over_games(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sweep_of(tmp_path, ["wm/Catch-v0", "wm/Quarters-v0"])
    for run in found.runs:
        game, backbone, seed = run.name.split("/")
        settings = {"seed": int(seed[-1]), "backbone": {"kind": backbone}}
        scored(run.folder, float(backbone == "mamba2"), f"wm/{game}", settings=settings)
    rows = compare_sweep(found, QUIET).rows
    assert [row["statistic"] for row in rows_of(rows, table=AGGREGATES)] == ["improvement over retnet"]
    assert rows_of(rows, table=AGGREGATES)[0]["value"] == 1.0
    assert "no aggregates over games" in capsys.readouterr().err


def test_nothing_to_compare_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no run of .* is evaluated yet; see: wm sweep status"):
        compare_sweep(sweep_of(tmp_path, ["wm/Catch-v0"]), QUIET)
