"""Tables of a sweep: what they average over, and what stands beside."""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep_comparison import compare_sweep
from test_aggregate import damage, scored

from wmcli.artifacts import Run
from wmcli.cli import main
from wmcli.errors import ArtifactError, UsageError
from wmcli.metrics import atari, statistics
from wmcli.progress import Progress
from wmcli.settings import resolve
from wmcli.stages.scores import read_scores
from wmcli.stages.variants import (
    AGGREGATES,
    COST,
    GAMES,
    PAIRS,
    compare_variants,
    games_table,
    notes,
    pairs_table,
    variants_table,
)
from wmcli.sweeps.attempt import write_record
from wmcli.sweeps.plan import PlannedRun, Sweep, read_sweep
from wmcli.sweeps.tables import changed_runs, sweep_records

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
            settings = resolve(run.preset, run.overrides).plain()
            scored(run.folder, mean, name, atari.human_normalized(name, mean), settings=settings)
            recorded(found, run, seconds=100.0 * (number + 1), peak_bytes=10**9 * (number + 1))
    return found


def recorded(sweep: Sweep, run: PlannedRun, state: str = "done", **record: Any) -> None:
    sweep.records.mkdir(parents=True, exist_ok=True)
    write_record(run, sweep.records, {"state": state, "arguments": [*run.arguments], **record})


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
    (better,) = rows_of(found.rows, table=PAIRS, variant="mamba2", statistic="improvement over retnet")
    assert better["value"] == 1.0 and better["unit"] == "probability"
    assert not rows_of(found.rows, variant="retnet", statistic="improvement over retnet")
    table = variants_table(found.rows, AGGREGATES)
    assert [row["variant"] for row in table][:2] == ["retnet", "mamba2"]
    assert list(table[0])[-1] == "unit" and table[0]["unit"] == "human-normalized score"
    (pair,) = pairs_table(found.rows)
    assert pair == {
        "variant": "mamba2",
        "over": "retnet",
        "probability of improvement": "1.000 (1.000 to 1.000)",
        "games better, equal, worse": "2, 0, 0",
    }


def test_all_systems_stand_beside_with_values_alone(sweep: Sweep) -> None:
    table = {row["variant"]: row for row in variants_table(compare_sweep(sweep, QUIET).rows, AGGREGATES)}
    assert {column.name for column in atari.columns("system")} == table.keys() - MEANS.keys()
    games = [atari.normalized_runs("REM")[game] for game in ("Pong", "Boxing")]
    assert table["REM"]["mean"] == f"{np.mean(games):.3f}" and table["REM"]["superhuman"] == "2"
    assert table["Drama"]["iqm"] == table["Drama"]["optimality_gap"] == "means only" != table["Drama"]["mean"]


def test_named_columns_are_variants_with_intervals(sweep: Sweep) -> None:
    found = compare_sweep(sweep, QUIET, [atari.column_of("REM"), atari.column_of("Drama")])
    assert list(games_table(found.rows)[0]) == ["environment", "retnet", "mamba2", "REM", "Drama"]
    (boxing,) = rows_of(found.rows, table="games", environment="ALE/Boxing-v5", variant="REM")
    runs = atari.reference_runs("Boxing", "REM")
    assert (boxing["lowest"], boxing["highest"], boxing["runs"]) == (min(runs), max(runs), 5)
    assert boxing["lowest"] < boxing["low"] < boxing["value"] < boxing["high"] < boxing["highest"]
    (drama,) = rows_of(found.rows, table="games", environment="ALE/Boxing-v5", variant="Drama")
    assert (drama["value"], drama["low"], drama["runs"]) == (78.0, None, None) and "Training" in drama["caveat"]
    pairs = {(row["variant"], row["over"]): row for row in pairs_table(found.rows)}
    with_runs = {("mamba2", "retnet"), ("retnet", "REM"), ("mamba2", "REM")}
    assert pairs.keys() == with_runs | {("retnet", "Drama"), ("mamba2", "Drama")}
    assert all((pairs[pair]["probability of improvement"] == "means only") == (pair not in with_runs) for pair in pairs)
    assert pairs["mamba2", "Drama"]["games better, equal, worse"] == "0, 0, 2"
    lines = notes(found.rows, [atari.column_of("REM"), atari.column_of("Drama")])
    assert [line.partition(":")[0] for line in lines] == ["REM", "Drama"] and "5 runs per game" in lines[0]


def test_a_variant_with_the_name_of_a_column_is_another_one(tmp_path: Path) -> None:
    run = scored(tmp_path / "a", 1.0, normalized=0.5, settings={"seed": 1})
    scores = {"REM": read_scores([run], "returns", QUIET)}
    for published in (None, [atari.column_of("REM")]):
        (line,) = games_table(compare_variants(scores, {}, QUIET, published))
        assert line["REM"] == "1" and line["REM (published)"].startswith("17.96")


def test_statistics_are_over_the_games_that_all_have_and_a_line_names_the_others(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep.file.read_text().replace("ALE/Boxing-v5", "ALE/Krull-v5")
    sweep.file.write_text(file)
    krull = read_sweep(sweep.file)
    for run in krull.runs:
        if "Krull" in run.name:
            settings = {"seed": int(run.name[-1]), "backbone": {"kind": run.name.split("/")[1]}}
            settings["environment"] = {"id": "ALE/Krull-v5"}
            normalized = atari.human_normalized("Krull", 3000.0)
            scored(run.folder, 3000.0, "ALE/Krull-v5", normalized, settings=settings)
    ablation = atari.column_of("REM-4x4-tokenizer")
    rows = compare_sweep(krull, QUIET, [ablation]).rows
    line = "statistics are over the 1 environments that all variants have: REM-4x4-tokenizer lacks ALE/Pong-v5"
    assert f"warning: {line}" in capsys.readouterr().err
    (mean,) = rows_of(rows, table=AGGREGATES, variant="retnet", statistic="mean")
    assert mean["value"] == pytest.approx(atari.human_normalized("Krull", 3000.0))
    assert [row["environment"] for row in games_table(rows)] == ["ALE/Pong-v5", "ALE/Krull-v5"]


def test_cost_is_that_of_the_records(sweep: Sweep) -> None:
    found = compare_sweep(sweep, QUIET)
    costs = {row["statistic"]: row["value"] for row in rows_of(found.rows, table=COST, variant="retnet")}
    assert costs == {"hours": 150 / 3600, "memory": 2.0, "steps per second": pytest.approx(4 * 400 / 600)}


def test_the_cost_of_an_attempt_with_other_settings_is_not_that_of_the_run(sweep: Sweep) -> None:
    run = sweep.runs[0]
    recorded(sweep, run._replace(arguments=(*run.arguments, "--set", "seed=9")), "failed", seconds=7.0)
    assert sweep_records(sweep)[run.folder] == {"seconds": None}
    recorded(sweep, run._replace(arguments=("run", run.preset, "--run", "elsewhere", *run.arguments[4:])), seconds=7.0)
    assert sweep_records(sweep)[run.folder]["seconds"] == 7.0
    reordered = [*run.arguments[:4], *run.arguments[6:], "--set", "training.threads=2", *run.arguments[4:6]]
    recorded(sweep, run._replace(arguments=tuple(reordered)), seconds=8.0)
    assert sweep_records(sweep)[run.folder]["seconds"] == 8.0


def test_without_human_scores_there_are_no_aggregates_over_games(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sweep_of(tmp_path, ["wm/Catch-v0", "wm/Quarters-v0"])
    for run in found.runs:
        game, backbone, seed = run.name.split("/")
        settings = {"seed": int(seed[-1]), "backbone": {"kind": backbone}, "environment": {"id": f"wm/{game}"}}
        scored(run.folder, float(backbone == "mamba2"), f"wm/{game}", settings=settings)
    rows = compare_sweep(found, QUIET).rows
    assert not rows_of(rows, table=AGGREGATES)
    assert [(row["statistic"].removesuffix(" retnet"), row["value"]) for row in rows_of(rows, table=PAIRS)] == [
        ("improvement over", 1.0),
        ("games better than", 2),
        ("games equal to", 0),
        ("games worse than", 0),
    ]
    assert "no aggregates over games" in capsys.readouterr().err


def test_nothing_to_compare_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no run of .* is evaluated yet; see: wm sweep status"):
        compare_sweep(sweep_of(tmp_path, ["wm/Catch-v0"]), QUIET)


# -- runs that are left out -------------------------------------------------------------------------------------------


def test_a_damaged_evaluation_leaves_no_run_out(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep.runs[0]
    damage(run.folder, 1)
    assert main.run(["compare", "--sweep", str(sweep.file)]) == 3
    shown = capsys.readouterr()
    assert not shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith(f"wm compare: the newest evaluation of {run.folder} cannot be read")
    assert line.endswith(f"make another with: wm eval --run {run.folder} --force")


def test_runs_without_an_evaluation_are_named(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    scored(sweep.runs[3].folder, 1.0, "ALE/Boxing-v5", kind="recall")
    found = compare_sweep(sweep, Progress(quiet=True))
    assert found.missing == ["Pong-v5/mamba2/seed-2", "Boxing-v5/mamba2/seed-2"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "warning: 2 runs have no evaluation of --protocol returns yet: Pong-v5/mamba2/seed-2, Boxing-v5/mamba2/seed-2"
    )


@pytest.mark.parametrize("begun_again", [False, True], ids=["changed", "and begun again"])
def test_runs_of_other_settings_are_left_out_by_name(
    sweep: Sweep, begun_again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that begin again have their old evaluation until they make a new one, and keep it where they fail."""
    text = sweep.file.read_text()
    rule = '[[where]]\nmatch = {backbone.kind = "mamba2"}\nsettings = {dynamics.batch = 64}\n'
    sweep.file.write_text(text + rule)
    changed = read_sweep(sweep.file)
    if begun_again:
        recorded(changed, changed.runs[2], state="failed", seconds=1.0)
    found = compare_sweep(changed, QUIET)
    assert [*found.scores] == ["retnet"]
    assert set(found.missing) == {run.name for run in changed.runs if run.variant == "mamba2"}
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"warning: left out, made with other settings than {sweep.file} has now: Pong-v5/mamba2/seed-1,"
        " Boxing-v5/mamba2/seed-1 (dynamics.batch); to keep both set another folder in the file; to make them again"
        f" remove their folders, then: wm sweep {sweep.file}"
    )


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("[vary]", "[settings]\ncontroller.width = 64\n[vary]", "controller.width"),
        ("[vary]", '[settings]\ntraining.sampling = "dfs"\n[vary]', "training.sampling"),
        ('"rem-quick"', '"iris-quick"', r"collect.steps, tokenizer.* and \d+ more"),
    ],
)
def test_without_a_run_of_these_settings_there_is_nothing_to_compare(
    sweep: Sweep, old: str, new: str, key: str
) -> None:
    sweep.file.write_text(sweep.file.read_text().replace(old, new))
    with pytest.raises(ArtifactError, match=rf"^left out, made with other settings .* \({key}\); .*: wm sweep"):
        compare_sweep(read_sweep(sweep.file), QUIET)


def test_a_setting_that_is_gone_from_the_file_counts(sweep: Sweep) -> None:
    run = sweep.runs[0]
    recorded(sweep, run._replace(arguments=(*run.arguments, "--set", "dynamics.batch=64")))
    assert run.name not in compare_sweep(sweep, QUIET).missing, "its result is of the file's settings yet"
    for state, arguments in [("done", (*run.arguments, "--set", "dynamics.batch=64")), ("failed", run.arguments)]:
        recorded(sweep, run._replace(arguments=arguments), state)
        settings = resolve(run.preset, [*run.overrides, "dynamics.batch=64"]).plain()
        scored(run.folder, 1.0, "ALE/Pong-v5", 0.1, settings=settings)
        assert run.name in compare_sweep(sweep, QUIET).missing


@pytest.mark.parametrize("state", ["running", "stopped", "done"])
def test_a_preset_that_changed_with_the_version_leaves_no_run_out(sweep: Sweep, state: str) -> None:
    run = sweep.runs[0]
    recorded(sweep, run, state)
    settings = resolve(run.preset, [*run.overrides, "dynamics.batch=64"]).plain()  # of the preset of then
    scored(run.folder, 1.0, "ALE/Pong-v5", 0.1, settings=settings)
    assert run.name not in compare_sweep(sweep, QUIET).missing


def test_settings_that_do_not_resolve_name_their_run(sweep: Sweep) -> None:
    sweep.file.write_text(sweep.file.read_text().replace("[vary]", "[settings]\ndynamics.batsh = 2\n[vary]"))
    with pytest.raises(UsageError, match="Pong-v5/retnet/seed-1: .*did you mean"):
        compare_sweep(read_sweep(sweep.file), QUIET)


def test_a_run_whose_settings_cannot_be_read_is_left_to_those_who_read_it(sweep: Sweep) -> None:
    for run in sweep.runs[:2]:
        Run.open(run.folder, create=False).bind(run.preset, resolve(run.preset, run.overrides).plain())
    (sweep.runs[0].folder / "run.toml").write_text("not TOML")
    assert changed_runs(sweep) == {}
    sweep.file.write_text(sweep.file.read_text().replace("[vary]", "[settings]\ndynamics.batch = 64\n[vary]"))
    assert changed_runs(read_sweep(sweep.file)) == {sweep.runs[1].folder: ["dynamics.batch"]}


def test_runs_stay_where_folders_or_the_way_to_compute_changed(sweep: Sweep) -> None:
    """A sweep that was moved, that other programs ran, or whose file says otherwise how to compute and to score."""
    for number, run in enumerate(sweep.runs):
        if number % 2:
            recorded(sweep, run._replace(arguments=("run", run.preset, "--run", "elsewhere", *run.arguments[4:])))
        else:
            (sweep.records / f"{run.stem}.json").unlink(missing_ok=True)
    assert sum(map(len, compare_sweep(sweep, QUIET).scores.values())) == 6
    added = "[settings]\ntraining.threads = 2\nevaluation.episodes = 7\n[vary]"
    sweep.file.write_text(sweep.file.read_text().replace("[vary]", added))
    assert sum(map(len, compare_sweep(read_sweep(sweep.file), QUIET).scores.values())) == 6


def test_runs_stand_beside_published_scores_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "_resample", partial(few, statistics._resample))
    runs = [
        scored(tmp_path / f"{kind}{seed}", mean, "ALE/Pong-v5", atari.human_normalized("Pong", mean), settings=settings)
        for kind, means in {"gru": [-21.0, 18.0], "s4": [20.6, 30.0]}.items()
        for seed, mean in enumerate(means)
        for settings in [{"seed": seed, "backbone": {"kind": kind}}]
    ]
    command = ["compare", *map(str, runs), "--published", "REM", "--published", "Drama", "--format", "csv"]
    for options, variants in [
        (["--by", "backbone.kind"], ["backbone.kind=gru", "backbone.kind=s4"]),
        ([], ["all runs"]),
    ]:
        assert main.run([*command, *options]) == 0
        shown = capsys.readouterr()
        rows = list(csv.DictReader(io.StringIO(shown.out)))
        games = [row for row in rows if row["table"] == GAMES]
        assert [row["variant"] for row in games] == [*variants, "REM", "Drama"]
        assert {row["unit"] for row in games} == {"return"} and games[-1]["value"] == "15.0"
        chances = [(row["variant"], row["statistic"]) for row in rows if row["unit"] == "probability"]
        assert [pair for pair in chances if pair[1].endswith("REM")] == [
            (name, "improvement over REM") for name in variants
        ]
        assert ("different settings are pooled" in shown.err) == (not options)
    against = [*command[:3], "--against", *map(str, runs[2:3]), *command[5:]]
    assert main.run(against) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["variant"] for row in rows if row["table"] == GAMES] == ["RUN", "--against", "REM", "Drama"]


def few(real: Any, sides: Any, compute: Any, rng: Any, repetitions: int) -> Any:
    """Values need few resamples."""
    return real(sides, compute, rng, 50)
