"""What a report says: the numbers of other commands, of every kind of run, and a line for what it leaves out."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_systems import Make, learn
from sweep_comparison import compare_sweep
from test_aggregate import scored
from test_stage_imported import made
from test_stage_offline import runs
from tiny_run import copied, latest, opened

from wmcli.artifacts import Run
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.overview import describe_run, differences
from wmcli.assemble import parameter_counts, settings_of, spaces_of
from wmcli.cli import main
from wmcli.cli.report import _read_suite
from wmcli.config import flat
from wmcli.errors import ArtifactError, UsageError
from wmcli.exchange import write_recording
from wmcli.metrics import atari
from wmcli.progress import Progress
from wmcli.report.document import Block, Commands, Document, Drawing, Facts, Fold, Picture, Row, Table, Text, Tiles
from wmcli.report.html import render
from wmcli.report.plots import error_curves
from wmcli.settings import flatten, resolve
from wmcli.stages.aggregate import aggregate, compare_settings
from wmcli.stages.dreaming.reality import Moment, Outcome
from wmcli.stages.dreaming.tape import publish_moments
from wmcli.stages.evaluate import evaluate
from wmcli.stages.grid_world import evaluate_grid_world
from wmcli.stages.report import Suite, compose
from wmcli.stages.report import blocks as report_blocks
from wmcli.stages.report import study as studies
from wmcli.stages.report.reproduce import overrides
from wmcli.stages.report.runs import Notes, read_runs, short_names, telling_keys
from wmcli.stages.report.world_model import _line, read_errors
from wmcli.stages.scores import label_groups, read_scores
from wmcli.stages.variants import GAMES, compare_variants
from wmcli.sweeps.attempt import write_record
from wmcli.sweeps.plan import read_sweep

OLD_RUNS = Path(__file__).parents[1] / "old_runs"
QUIET = Progress(quiet=True)


def composed(*paths: Path, by: Sequence[str] = (), suite: Suite | None = None) -> Document:
    return compose(paths, QUIET, by=by, suite=suite)


def blocks(document: Document, section: str | None = None) -> Iterator[Block]:
    """Every block, those inside others included."""
    pending = [block for each in document.sections if section in (None, each.name) for block in each.blocks]
    while pending:
        block = pending.pop(0)
        yield block
        if isinstance(block, Row | Fold):
            pending = [*block.blocks, *pending]


def table(document: Document, name: str) -> Table:
    (found,) = [each for each in blocks(document) if isinstance(each, Table) and each.name == name]
    return found


def exact(document: Document, name: str) -> list[dict[str, Any]]:
    found = table(document, name)
    return [dict(row) for row in (found.rows if found.exact is None else found.exact) if row is not None]


def readable(document: Document, name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in table(document, name).rows if row is not None]


def texts(document: Document, section: str | None = None) -> str:
    return "\n".join(each.body for each in blocks(document, section) if isinstance(each, Text))


def facts(document: Document) -> dict[str, str]:
    """The first fact of each name."""
    pairs = [pair for each in blocks(document) if isinstance(each, Facts) for pair in each.pairs]
    return dict(reversed(pairs))


def captions(document: Document, kind: type[Picture] | type[Drawing]) -> list[str]:
    return [each.caption for each in blocks(document) if isinstance(each, kind)]


def lines(document: Document) -> list[str]:
    return [line for each in blocks(document, "reproduce") if isinstance(each, Commands) for line in each.lines]


def sections(document: Document) -> list[str]:
    return [each.name for each in document.sections]


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not drawn, which takes most time, except in slow tests."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(report_blocks, "svg_text", lambda figure, name: f'<svg width="9" id="{name}"/>')


@pytest.fixture
def suite(tmp_path: Path) -> list[Path]:
    """Runs of two backbones and three seeds in one game without published scores."""
    values = {"retnet": [0.25, 0.5, 1.0], "mamba2": [0.125, 0.25, 2.0]}
    return [
        scored(
            tmp_path / backbone / f"seed-{seed}",
            mean,
            "wm/Catch-v0",
            settings={"seed": seed, "backbone": {"kind": backbone}},
        )
        for backbone, means in values.items()
        for seed, mean in enumerate(means)
    ]


# -- the same numbers as other commands -------------------------------------------------------------------------------


def test_scores_by_settings_are_those_of_compare(suite: list[Path]) -> None:
    document = composed(*suite, by=["backbone.kind"])
    compared = compare_settings(read_scores(suite, "returns", QUIET), ["backbone.kind"], QUIET)
    ours = [row for row in exact(document, "scores") if row["variant"] != "random"]
    assert [row["variant"] for row in ours] == ["backbone.kind=retnet", "backbone.kind=mamba2"]
    for row, line in zip(ours, compared, strict=True):
        assert (row["value"], row["low"], row["high"]) == (line["mean"], line["low"], line["high"])
        assert (row["runs"], row["steps"]) == (line["runs"], line["steps"])


def test_statistics_of_one_variant_are_those_of_compare(suite: list[Path]) -> None:
    document = composed(*suite[:3])
    compared = aggregate(read_scores(suite[:3], "returns", QUIET), [], QUIET)
    rows = exact(document, "aggregates")
    assert [row["statistic"] for row in rows] == ["mean", "median", "iqm"]
    for row in rows:
        assert {key: row[key] for key in ("value", "low", "high")} == compared[row["statistic"]]


def test_a_tile_shows_the_number_of_the_table(suite: list[Path]) -> None:
    document = composed(*suite)
    (tiles,) = [each.tiles for each in blocks(document) if isinstance(each, Tiles)]
    row = exact(document, "scores")[0]
    assert tiles[0].label == "backbone.kind=retnet" and tiles[0].value == f"{row['value']:.3g}" == "0.583"
    assert f"{row['low']:.3g} to {row['high']:.3g}, 3 runs" in tiles[0].detail


def test_a_sweep_has_the_rows_of_its_comparison(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        f'preset = "rem-quick"\nfolder = "{tmp_path}/runs"\n[vary]\nenvironment.id = ["ALE/Pong-v5", "ALE/Boxing-v5"]\n'
        'backbone.kind = ["retnet", "mamba2"]\nseed = [1, 2]\n'
    )
    sweep = read_sweep(file)
    sweep.records.mkdir(parents=True)
    for number, run in enumerate(sweep.runs[:-1]):
        game, backbone, seed = run.name.split("/")
        settings = {"seed": int(seed[-1]), "backbone": {"kind": backbone}, "environment": {"id": f"ALE/{game}"}}
        name = f"ALE/{game}"
        scored(run.folder, float(number), name, atari.human_normalized(name, number), settings=settings)
        record = {"state": "done", "arguments": [*run.arguments], "attempts": 2}
        write_record(run, sweep.records, record | {"seconds": 100.0 * (number + 1), "peak_bytes": 10**9})
    document = composed(suite=_read_suite(file))
    rows = compare_sweep(sweep, QUIET).rows
    assert exact(document, "scores") == [row for row in rows if row["table"] == GAMES]
    statistics = [row for row in rows if row["table"] == "aggregates" and row["unit"] != "probability"]
    assert exact(document, "aggregates") == statistics
    assert len([row for row in statistics if row["variant"] in ("retnet", "mamba2")]) == 10
    assert {row["variant"] for row in readable(document, "aggregates")} >= {"retnet", "mamba2", "REM", "IRIS"}
    assert exact(document, "cost") == [row for row in rows if row["table"] == "cost"]
    (better,) = [row for row in rows if row["statistic"] == "improvement over retnet"]
    (pair,) = exact(document, "improvement")
    assert (pair["variant"], pair["over"]) == ("mamba2", "retnet")
    assert (pair["value"], pair["low"], pair["high"]) == (better["value"], better["low"], better["high"])
    assert {row["attempts"] for row in exact(document, "cost-by-run")} == {2}
    assert "seed-2: has not begun; see: wm sweep status" in texts(document, "headline")
    assert lines(document)[0] == f"wm sweep {file}"
    for run in sweep.runs[:3]:
        Run.open(run.folder, create=False).bind(run.preset, resolve(run.preset, run.overrides).plain())
    file.write_text(file.read_text() + "[settings]\ndynamics.batch = 8\n")
    changed = composed(suite=_read_suite(file))
    assert "seed-1: made with other settings than" in texts(changed, "headline")
    assert len(exact(changed, "cost-by-run")) == len(exact(document, "cost-by-run")) - 3


def test_pairs_of_variants_are_compared_the_right_way_round(suite: list[Path], tmp_path: Path) -> None:
    more = [
        scored(tmp_path / f"gru-{seed}", mean, "wm/Catch-v0", settings={"seed": seed, "backbone": {"kind": "gru"}})
        for seed, mean in enumerate([0.3, 0.75, 3.0])
    ]
    document = composed(*suite, *more, by=["backbone.kind"])
    values = {"retnet": [0.25, 0.5, 1.0], "mamba2": [0.125, 0.25, 2.0], "gru": [0.3, 0.75, 3.0]}
    pairs = {(row["variant"], row["over"]): row["value"] for row in exact(document, "improvement")}
    assert len(pairs) == 3
    for one, other in (("mamba2", "retnet"), ("gru", "retnet"), ("gru", "mamba2")):
        wins = [(x > y) + 0.5 * (x == y) for x in values[one] for y in values[other]]
        assert pairs[f"backbone.kind={one}", f"backbone.kind={other}"] == pytest.approx(np.mean(wins))
    groups = label_groups(read_scores([*suite, *more], "returns", QUIET), ["backbone.kind"])
    for row in compare_variants(groups, {}, QUIET):
        if row["unit"] == "probability":
            (found,) = [
                pair for pair in exact(document, "improvement")
                if (pair["variant"], pair["over"]) == (row["variant"], "backbone.kind=retnet")
            ]  # fmt: skip
            assert (found["low"], found["high"]) == (row["low"], row["high"])


def test_runs_have_the_scores_and_steps_of_wm_runs(run: Path) -> None:
    document = composed(run, run)
    assert "runs" not in sections(document)  # the same run twice is one run
    (tiles,) = [each.tiles for each in blocks(document) if isinstance(each, Tiles)]
    about = describe_run(run)
    assert tiles[0].value == f"{about['score']:.4g}" and f"± {about['stderr']:.2g}" in tiles[0].detail
    assert exact(document, "cost-by-run")[0]["bytes"] == about["bytes"]


def test_settings_that_differ_are_those_of_wm_diff(tmp_path: Path) -> None:
    for name, kind in (("a", "retnet"), ("b", "gru")):
        settings = resolve("quickstart", [f"backbone.kind={kind}", "controller.batch=3"])
        Run.open(tmp_path / name, create=True).bind("quickstart", settings.plain())
        scored(tmp_path / name, float(kind == "gru"), "wm/Catch-v0", settings=settings.plain())
    document = composed(tmp_path / "a", tmp_path / "b")
    rows = {row["setting"]: row for row in exact(document, "settings-between-variants")}
    compared = {row["key"]: row for row in differences(tmp_path / "a", tmp_path / "b")}
    assert rows.keys() == compared.keys() and "backbone.kind" in rows
    for key, row in rows.items():
        assert row["backbone.kind=retnet"] == compared[key]["left"]
        assert row["backbone.kind=gru"] == compared[key]["right"]
    of_preset = {row["setting"]: row for row in exact(document, "settings-1")}
    assert of_preset["controller.batch"]["value"] == 3 and of_preset["backbone.kind"]["value"] == "gru"


# -- which runs are alike ---------------------------------------------------------------------------------------------


def flat_of(preset: str, *sets: str) -> dict[str, Any]:
    return {"preset": preset} | flatten(resolve(preset, sets))


@pytest.mark.parametrize(
    ("tables", "keys"),
    [
        ([flat_of("rem-quick", "seed=1"), flat_of("rem-quick", "seed=2")], []),
        ([flat_of("rem-quick"), flat_of("rem-quick", "backbone.kind=gru")], ["backbone.kind"]),
        ([flat_of("rem-quick"), flat_of("drama-quick"), flat_of("iris-quick")], ["preset"]),
        ([flat_of("rem-quick"), flat_of("rem-quick", "evaluation.episodes=3", "training.threads=3")], []),
        ([flat_of("rem-quick"), flat_of("rem-quick", "environment.id=wm/Quarters-v0", "environment.size=48")], []),
        ([flat_of("rem-quick"), flat_of("rem-quick", "environment.time_limit=9")], ["environment.time_limit"]),
        (
            [
                flat_of("rem-quick", f"backbone.kind={kind}", f"dynamics.batch={batch}")
                for kind in ("gru", "mamba2")
                for batch in (3, 4)
            ],
            ["backbone.kind", "dynamics.batch"],
        ),
        # One key that says it all, not two.
        (
            [
                {"environment.id": "x", "a": one, "b": other, "c": third}
                for one, other, third in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3))
            ],
            ["c"],
        ),
    ],
)
def test_variants_are_told_apart_by_few_settings(tables: list[dict[str, Any]], keys: list[str]) -> None:
    assert telling_keys(tables) == keys


def test_variants_follow_by_where_it_is_given(suite: list[Path]) -> None:
    document = composed(*suite, by=["seed"])
    assert [row["variant"] for row in exact(document, "scores")] == ["seed=0", "seed=1", "seed=2", "random"]
    with pytest.raises(UsageError, match="--by backbone.kin: no such setting; did you mean 'backbone.kind'"):
        composed(*suite, by=["backbone.kin"])


def test_names_are_what_paths_do_not_share(tmp_path: Path) -> None:
    assert short_names([tmp_path / "a" / "x", tmp_path / "b" / "x"]) == ["a/x", "b/x"]
    assert short_names([tmp_path / "a"]) == ["a"]


# -- what is left out, and why ----------------------------------------------------------------------------------------


def test_runs_that_cannot_be_read_are_named_and_left_out(suite: list[Path], tmp_path: Path) -> None:
    damaged, deleted, empty, unknown = suite[0], suite[1], tmp_path / "empty", suite[2]
    (damaged / "evaluation" / "v0001" / "manifest.json").write_text("{}")
    (deleted / "evaluation" / "v0001" / "manifest.json").unlink()
    Run.open(empty, create=True).bind("quickstart", resolve("quickstart").plain())
    scored(unknown, 3.0, "wm/Catch-v0", kind="of-a-later-version")
    with Run.open(tmp_path / "odd", create=True).job("evaluation", {}, {}).work() as work:
        work.publish(settings={}, metrics={"protocol": "returns"}, environment={}, machine={}, extra={})
    running = suite[3]
    with exclusive(running, "this test"):
        document = composed(tmp_path)
    warning = texts(document, "headline").splitlines()
    assert "Left out, 4 runs:" in warning
    for name, reason in (
        ("retnet/seed-0", "manifest.json"),
        ("retnet/seed-1", "manifest.json"),
        ("empty", "has no artifacts yet"),
        ("odd", "has no entry 'mean'"),
    ):
        (line,) = [line for line in warning if line.startswith(f"{name}: ")]
        assert reason in line
    rows = {row["run"]: row["status"] for row in exact(document, "runs")}
    assert list(rows) == ["mamba2/seed-0", "mamba2/seed-1", "mamba2/seed-2", "retnet/seed-2"]
    assert rows["mamba2/seed-0"] == "running"
    assert "mamba2/seed-0 is in progress: its numbers are those so far." in texts(document, "headline")
    render(document)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experience", "tokenizer", "dynamics", "controller", "evaluation"])
@pytest.mark.parametrize("what", ["", "v0001", "v0001/manifest.json"])
def test_a_half_deleted_run_is_reported_or_named(kind: str, what: str, run: Path, suite: list[Path]) -> None:
    place = run / kind / what
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    document = composed(run, *suite)
    assert (len(exact(document, "runs")) == 7) != ("Left out, 1 run" in texts(document, "headline"))
    assert ("manifest.json" in what) == ("Left out" in texts(document, "headline"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00\xff\n\x80",
        b"[" * 100_000,
        b'{"time": null}\n{"time": "x", "began": 3}',
        b'{"time": "2026-01-01T00:00:00", "stage": "imagine", "update": 1}',
        b'{"stage": 5, "update": true, "time": "2026-01-01T00:00:00+00:00", "updates_per_second": "x", "priors": 3}',
        b'{"stage": "imagine", "update": 3, "time": "2026-01-01T00:00:00+00:00", "loss": 1e400, "job": {"a": 1}}',
    ],
)
def test_damaged_lines_of_a_log_are_passed_over(text: bytes, run: Path) -> None:
    whole = exact(composed(run), "cost-by-run")
    with (run / "metrics.jsonl").open("ab") as log:
        log.write(text)
    assert exact(composed(run), "cost-by-run")[0]["hours"] == whole[0]["hours"]
    (run / "metrics.jsonl").write_bytes(text)
    assert exact(composed(run), "cost-by-run")[0]["hours"] == 0


def test_without_a_run_to_report_there_is_no_report(suite: list[Path], tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=f"{tmp_path}/none: no runs in it; list runs with: wm runs"):
        composed(tmp_path / "none")
    with pytest.raises(ArtifactError, match="no folder .*nowhere"):
        composed(tmp_path / "nowhere")
    (suite[0] / "evaluation" / "v0001" / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match="nothing to report: seed-0: .*manifest"):
        composed(suite[0])


def test_a_damaged_evaluation_before_the_newest_costs_no_run(tmp_path: Path) -> None:
    for mean in (0.25, 0.75):
        run = scored(tmp_path / "run", mean, "wm/Catch-v0", settings={"seed": 1})
    (run / "evaluation" / "v0001" / "manifest.json").write_text("{")
    (read,), left_out = read_runs([run], Notes(), QUIET)
    assert not left_out and read.score is not None and read.score.evaluation.version == 2


def test_what_somebody_played_is_no_import(tiny: Path, tmp_path: Path) -> None:
    run = copied(tiny, tmp_path / "run")
    context = opened(run)
    frame = np.zeros(context.spaces.observation.shape, np.uint8)
    publish_moments(context, [Moment(frame, True, True, Outcome(np.array(1), 0.0, True, False, -1, frame))], "one")
    document = composed(run)
    assert [line for line in lines(document) if line.startswith("wm play")] == [f"wm play --browser --run {run}"]
    assert "somebody played" in texts(document, "reproduce") and "imported" not in texts(document, "reproduce")


def test_a_copy_of_a_run_does_not_count_twice(suite: list[Path], tmp_path: Path) -> None:
    copied(suite[0], tmp_path / "copy")
    with pytest.raises(UsageError, match="hold the very same evaluation@1, which would count twice"):
        composed(*suite, tmp_path / "copy")


def test_scores_by_different_rules_stand_apart(suite: list[Path], tmp_path: Path) -> None:
    scored(tmp_path / "other", 1.0, "wm/Catch-v0", settings={"seed": 9}, protocol="drama")
    document = composed(*suite, tmp_path / "other")
    assert "cannot stand in one table: these runs have different protocols of play (drama, rem)" in texts(document)
    assert "No statistics over all runs: these runs have different protocols" in texts(document, "runs")
    assert len(exact(document, "scores")) == 7 and len(exact(document, "runs")) == 7


def test_returns_of_two_games_without_references_are_not_pooled(tmp_path: Path) -> None:
    runs = [scored(tmp_path / game, 1.0, f"wm/{game}-v0") for game in ("Catch", "Quarters")]
    document = composed(*runs)
    assert "No statistics over environments" in texts(document, "runs")
    assert "No performance profiles: returns of different environments cannot be pooled" in texts(document, "runs")
    (row, random) = readable(document, "scores")
    assert (row["Catch"], row["Quarters"], random["name"]) == ("1", "1", "random")


def test_an_interim_score_and_pooled_settings_are_said(suite: list[Path], tmp_path: Path) -> None:
    scored(tmp_path / "early", 1.0, "wm/Catch-v0", settings={"run": {"epochs": 4}}, epoch=2, steps=200)
    said = texts(composed(*suite, tmp_path / "early"), "headline")
    assert "has no final evaluation: taking evaluation@1, of epoch 2 of 4" in said
    assert "environment steps differ: 400" in said


# -- beside published scores ------------------------------------------------------------------------------------------


def test_a_game_stands_beside_its_published_scores_with_their_caveats(tmp_path: Path) -> None:
    block = {"test": {"life_loss_ends_episode": False, "time_limit": 108_000}, "repeat_action_probability": 0.0}
    run = scored(tmp_path / "run", -10.0, normalized=atari.human_normalized("ALE/Pong-v5", -10.0), **block)
    document = composed(run)
    rows = {row["name"]: row for row in readable(document, "scores")}
    for column in ("REM", "STORM", "human", "random"):
        assert float(rows[column]["mean return"]) == pytest.approx(atari.reference("ALE/Pong-v5", column), rel=1e-3)
    assert table(document, "scores").emphasis == {0} and next(iter(rows.values()))["mean return"] == "-10"
    found = facts(document)
    assert found["STORM"].startswith("Run with sticky actions (probability 0.25)")
    assert "whole games, no sticky actions, time limit 108,000 emulator frames" in found["Rules"]
    assert found["Steps"] == "400 decisions of a run; published scores are after 100,000"
    assert "Published" not in found


def test_a_game_without_published_scores_says_so(suite: list[Path]) -> None:
    found = facts(composed(*suite))
    assert found["Published"] == "no scores of Catch are published; random is random play, measured here"
    assert "random" not in found and "STORM" not in found


def test_many_games_have_a_row_each(tmp_path: Path) -> None:
    games = atari.games()[:5]
    runs = [
        scored(tmp_path / game, 100.0, f"ALE/{game}-v5", atari.human_normalized(game, 100.0), settings={"seed": 1})
        for game in games
    ]
    document = composed(*runs)
    assert [row["environment"] for row in readable(document, "scores")] == games
    (tiles,) = [each.tiles for each in blocks(document) if isinstance(each, Tiles)]
    iqm = next(row for row in exact(document, "aggregates") if row["statistic"] == "iqm")
    assert tiles[0].value == f"{iqm['value']:.3g}" and "human-normalized" in tiles[0].detail


# -- every kind of run ------------------------------------------------------------------------------------------------


def test_a_run_of_every_stage_has_every_part_that_it_can_have(tiny: Path) -> None:
    document = composed(tiny)
    assert sections(document) == [*("headline", "curves", "world-model", "settings", "provenance", "reproduce")]
    evaluation = latest(tiny, "evaluation")
    (point,) = exact(document, "returns-over-training")
    assert (point["steps"], point["mean"]) == (90, evaluation.metrics["mean"]) and point["minutes"] > 0
    films = captions(document, Picture)
    assert films[0] == "run, evaluation@1" and "evaluation@1: a test episode" in films
    assert any("reconstructions" in each for each in films)
    assert readable(document, "measures-tokenizer")[0]["perplexity"] == latest(tiny, "tokenizer").metrics["perplexity"]
    assert any("what evaluation@1 was made from" in each for each in captions(document, Drawing))
    assert "all files of the 5 newest artifacts have the sizes" in texts(document, "provenance")
    digests = {row["artifact"]: row["digest"] for row in exact(document, "artifacts")}
    assert digests["dynamics@1"] == latest(tiny, "dynamics").digest and len(digests) == 5
    (tiles,) = [each.tiles for each in blocks(document) if isinstance(each, Tiles)]
    dynamics = latest(tiny, "dynamics")
    counts = parameter_counts(settings_of(dynamics), spaces_of(dynamics))
    total = sum(counts[model] for model in ("tokenizer", "dynamics", "controller"))
    assert {each.label: each.value for each in tiles}["Parameters"] == f"{total:,}"
    cost = exact(document, "cost-by-run")[0]
    assert cost["processes"] == 5 and cost["train-dynamics updates/s"] > 0 and cost["hours"] > 0


def test_returns_are_drawn_over_steps_and_over_time(run: Path) -> None:
    evaluate(opened(run, "evaluation.episodes=3"))
    alts = [each.alt for each in blocks(composed(run), "curves") if isinstance(each, Drawing)]
    assert (
        sum("over environment steps" in each for each in alts)
        == sum("over minutes of work" in each for each in alts)
        == 1
    )


@pytest.mark.slow
def test_a_report_is_the_same_twice_apart_from_its_time(tiny: Path) -> None:
    one, other = (render(replace(composed(tiny), footer="")) for _ in range(2))
    assert one == other and re.search(r"Written by wm \S+ on \d{4}-\d\d-\d\d", composed(tiny).footer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drama", "dreamer", "unizero", "muzero"])
def test_systems_with_controllers(name: str, make: Make) -> None:
    run = make(name, trained=True)
    learn(run, "controller", "controller.updates=2")
    evaluate(opened(run, "evaluation.episodes=2", "evaluation.environments=2", pictures=True))
    document = composed(run)
    render(document)
    planner = name in ("unizero", "muzero")
    assert ("search" in sections(document)) == planner
    if planner:
        (row,) = readable(document, "search")
        assert row["search_entropy"] == pytest.approx(latest(run, "controller").metrics["search_entropy"])
        assert "decode no frames" in texts(document, "world-model") or name == "muzero"
    else:
        assert readable(document, "measures-dynamics")[0]["prior_entropy"] > 0
        assert any("entropies in nats" in each for each in captions(document, Drawing))


@pytest.mark.slow
def test_a_grid_world_has_its_own_table(make: Make) -> None:
    run = make("cells", trained=True)
    assert "Nothing is scored yet" in texts(composed(run), "headline")
    evaluation = evaluate_grid_world(opened(run, "evaluation.episodes=2", pictures=True))
    document = composed(run)
    render(document)
    (row,) = readable(document, "protocol-gridworld")
    assert row["parameters"] == evaluation.metrics["parameters"] and "paper error %" in row
    (tiles,) = [each.tiles for each in blocks(document) if isinstance(each, Tiles)]
    assert (tiles[0].label, tiles[0].value) == ("Grid world: error %", row["error %"])


@pytest.mark.slow
def test_a_memory_task_has_its_own_table_and_curves(make: Make) -> None:
    from wmcli.stages.memory_tasks import evaluate_memory
    from wmcli.stages.protocols import PROTOCOLS

    run = make("s4wm", trained=True)
    context = opened(run, "dynamics.context=20", pictures=True)
    evaluations = [evaluate_memory(context, measure=measure) for measure in ("generation", "reward")]
    document = composed(run)
    render(document)
    for evaluation in evaluations:
        name = evaluation.metrics["protocol"]
        assert readable(document, f"protocol-{name}") == PROTOCOLS[name].table([evaluation])
    assert "Generation" in captions(document, Drawing)


@pytest.mark.parametrize("name", ["drama", "s4wm", "unizero", "cells"])
def test_runs_of_version_0_1_0(name: str, tmp_path: Path) -> None:
    with tarfile.open(OLD_RUNS / f"0.1.0-{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    document = composed(tmp_path)
    render(document)
    assert "Left out" not in texts(document) and "wm 0.1.0" in facts(document)["Software"]
    assert lines(document)[0].startswith("wm ")


def test_an_interrupted_run_of_version_0_1_0(tmp_path: Path) -> None:
    with tarfile.open(OLD_RUNS / "0.1.0-interrupted.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    document = composed(tmp_path)
    render(document)
    assert readable(document, "cost-by-run")[0]["run"]


@pytest.mark.slow
def test_held_out_episodes_have_their_table_and_curves(tmp_path: Path) -> None:
    write_recording(made(12), "npz", tmp_path / "made")
    evaluation = runs(tmp_path / "run", tmp_path / "made")
    document = composed(tmp_path / "run")
    render(document)
    assert readable(document, "protocol-held-out")[0]["generation"].startswith(
        f"{evaluation.metrics['errors']['generation']['value']:.3g}"
    )
    assert "Held-out episodes" in captions(document, Drawing)
    assert "begins with imported data" in texts(document, "reproduce")


@pytest.mark.slow
def test_learned_priors_are_drawn(make: Make) -> None:
    run = make("unizero")
    learn(run, "dynamics", "dynamics.updates=3", "backbone.prior.kind=gaussian", "training.log_every=1")
    assert latest(run, "dynamics").metrics["priors"]
    document = composed(run)
    render(document)
    assert "priors" in sections(document)
    assert captions(document, Drawing)[1].startswith("unizero-quick, 1 run: parameters by layer and head")
    whole = (run / "metrics.jsonl").read_text()
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"stage": "train-dynamics", "time": "2026-01-01T00:00:00+00:00", "priors": {}}\n[]\n{"priors": 3}\n')
    assert "priors" in sections(composed(run))
    (run / "metrics.jsonl").write_text(whole.replace('"job":"', '"job":"other'))
    assert "no picture of the priors" in texts(composed(run), "priors")


# -- pictures and errors ----------------------------------------------------------------------------------------------


def with_errors(run: Path, values: list[float], context: int = 1) -> Path:
    """The run, whose newest evaluation also recorded errors by imagined step."""
    folder = latest(run, "evaluation").path
    (folder / "imagination.json").write_text(
        json.dumps({"context": context, "episodes": 3, "mean_squared_error": values})
    )
    return run


def test_errors_by_imagined_step_are_means_over_runs(suite: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: dict[str, Any] = {}
    module = sys.modules[read_errors.__module__]  # the package has a function of that name
    monkeypatch.setattr(module, "error_curves", lambda found, **how: lines.update(found) or error_curves(found, **how))
    with_errors(suite[0], [9.0, 1.0, 2.0, 4.0])
    with_errors(suite[1], [9.0, 3.0, 2.0], context=1)
    with_errors(suite[3], [9.0, 9.0, 5.0, 7.0], context=2)
    document = composed(*suite)
    rows = [
        (row["variant"], row["run"], row["step"], row["mean squared error"])
        for row in exact(document, "errors-by-step")
    ]
    assert rows == [
        ("backbone.kind=retnet", "retnet/seed-0", 1, 1.0),
        ("backbone.kind=retnet", "retnet/seed-0", 2, 2.0),
        ("backbone.kind=retnet", "retnet/seed-0", 3, 4.0),
        ("backbone.kind=retnet", "retnet/seed-1", 1, 3.0),
        ("backbone.kind=retnet", "retnet/seed-1", 2, 2.0),
        ("backbone.kind=mamba2", "mamba2/seed-0", 1, 5.0),
        ("backbone.kind=mamba2", "mamba2/seed-0", 2, 7.0),
    ]
    assert any("imagined step, with 95 % intervals over runs" in each for each in captions(document, Drawing))
    assert lines["backbone.kind=retnet (2 runs)"][1][0].tolist() == [2.0, 2.0]
    assert lines["backbone.kind=mamba2"][1][0].tolist() == [5.0, 7.0]


def test_a_line_is_the_mean_over_the_steps_that_all_runs_have() -> None:
    steps, (mean, low, high) = _line([np.array([1.0, 2.0, 4.0]), np.array([3.0, 2.0])])
    assert list(steps) == [1, 2] and mean.tolist() == [2.0, 2.0]
    assert low is not None and high is not None and low.tolist() == [1.0, 2.0] and high.tolist() == [3.0, 2.0]
    steps, (mean, low, high) = _line([np.array([1.0, 2.0])])
    assert mean.tolist() == [1.0, 2.0] and low is None and high is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"context": 1}', '{"context": 0, "episodes": 1, "mean_squared_error": [1, 2]}',
     '{"context": 2, "episodes": 1, "mean_squared_error": [1, 2]}',
     '{"context": 1, "episodes": 1, "mean_squared_error": [1, NaN]}',
     '{"context": 1, "episodes": 1, "mean_squared_error": [[1], [2]]}',
     '{"context": 1, "episodes": 1, "mean_squared_error": "no"}'],
)  # fmt: skip
def test_damaged_errors_are_no_errors(text: str, suite: list[Path]) -> None:
    (latest(suite[0], "evaluation").path / "imagination.json").write_text(text)
    assert not [each for each in blocks(composed(suite[0])) if isinstance(each, Table) and "errors" in each.name]


def test_a_damaged_picture_is_named(run: Path) -> None:
    from wmcli.artifacts.manifest import film_of

    film = film_of(latest(run, "evaluation"), "imagination")
    assert film is not None
    film.write_bytes(film.read_bytes()[:60])
    document = composed(run)
    render(document)
    assert f"Pictures that cannot be shown: {film}" in texts(document, "world-model")
    assert f"run: evaluation@1: {film.name} has 60 bytes, not" in texts(document, "provenance")


def test_films_and_bytes_have_limits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = len(captions(composed(run), Picture))
    monkeypatch.setattr(studies, "MOST_FILMS", 1)
    document = composed(run)
    assert len(captions(document, Picture)) == every - 1
    assert "Left out to keep this page small: 1 picture." in texts(document, "world-model")
    monkeypatch.setattr(studies, "MOST_PICTURE_BYTES", 0)
    assert captions(composed(run), Picture) == []


# -- how to make it again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("quickstart", []),
        ("quickstart", ["backbone.kind=mamba2", "backbone.width=48", "tokenizer.channels=8"]),
        ("drama-quick", ["backbone.kind=transformer", "dynamics.batch=3", "seed=7"]),
        ("unizero-quick", ["backbone.prior.kind=gaussian", "controller.rule=gumbel"]),
        ("memory-small", ["environment.id=wm/DistractingMemory-20-v0", "collect.test=1"]),
        ("gridworld", ["environment.kwargs={}"]),
    ],
)
def test_the_command_has_the_settings_of_the_run(preset: str, sets: list[str], tmp_path: Path) -> None:
    settings = resolve(preset, sets)
    run = Run.open(tmp_path / "a run", create=True)
    run.bind(preset, settings.plain())
    scored(run.path, 1.0, settings=settings.plain(), epoch=1)
    (read,), left_out = read_runs([run.path], Notes(), QUIET)
    texts_ = overrides(read)
    assert not left_out and texts_ is not None and len(texts_) <= len(sets) + 1  # the kind of a new backbone's prior
    assert resolve(preset, texts_) == settings
    line = lines(composed(run.path))[0]
    assert line.startswith(f"wm run {preset} --run '{tmp_path}/a run'")


def test_commands_follow_the_stages_and_changes_on_the_way(tiny: Path, tmp_path: Path) -> None:
    found = lines(composed(tiny))
    assert [re.split(" --", line)[0] for line in found] == [
        *("wm collect", "wm train-tokenizer", "wm train-dynamics", "wm imagine", "wm eval")
    ]
    assert "--preset" in found[0] and "--preset" not in found[1]
    run = Run.open(tmp_path / "loop", create=True)
    change = {"epoch": 2, "set": ["dynamics.batch=3"]}
    run.bind("quickstart", resolve("quickstart").plain(), [change])
    scored(run.path, 1.0, settings=resolve("quickstart").plain(), epoch=2)
    document = composed(run.path)
    assert lines(document) == [
        f"wm run quickstart --run {run.path}",
        f"wm run --run {run.path} --from-epoch 2 --set dynamics.batch=3",
    ]
    assert readable(document, "changes")[0]["settings"] == "dynamics.batch=3"


def test_settings_that_no_option_can_state_are_said(tmp_path: Path) -> None:
    preset = tmp_path / "own.toml"
    preset.write_text('base = "quickstart"\n[environment.kwargs]\nspeed = 2\n')
    run = Run.open(tmp_path / "run", create=True)
    run.bind(str(preset), resolve("quickstart").plain())  # without the argument that the preset has
    scored(run.path, 1.0, settings=resolve("quickstart").plain(), epoch=1)
    assert lines(composed(run.path)) == []


def test_a_preset_that_is_gone_is_said(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", create=True)
    run.bind(str(tmp_path / "gone.toml"), resolve("quickstart").plain())
    scored(run.path, 1.0, settings=resolve("quickstart").plain(), epoch=1)
    document = composed(run.path)
    assert lines(document) == [] and "cannot be read here; its settings are in" in texts(document, "reproduce")
    assert "nothing is compared with it" in texts(document, "settings")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_one_file(suite: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page" / "report.html"
    out.parent.mkdir()
    assert main.run(["report", *map(str, suite), "--out", str(out), "--by", "backbone.kind", "-q"]) == 0
    assert capsys.readouterr() == (f"{out}\n", "")
    assert [each.name for each in out.parent.iterdir()] == ["report.html"]
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!") and "backbone.kind=mamba2" in page


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "wm report: no runs: name some, or the file of a sweep with --sweep."),
        (["{run}", "--sweep", "x.toml"], "wm report: --sweep names the runs itself: omit RUN."),
        (["{run}", "--out", "x.txt"], "wm report: cannot write x.txt: its name must end in .html, not '.txt'."),
        (["{run}", "--out", "/nowhere/x.html"], "wm report: cannot write /nowhere/x.html: there is no folder"),
        (["--sweep", "x.toml"], "wm report: x.toml: no such file"),
        (["{run}", "--by", "speed"], "wm report: --by speed: no such setting"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    arguments: list[str], line: str, suite: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main.run(["report", *(each.format(run=suite[0]) for each in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and err.count("\n") == 1
    assert list(Path().iterdir()) == []


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_130_runs_are_few_seconds_and_megabytes(tiny: Path, tmp_path: Path) -> None:
    """26 games and 5 backbones, each with pictures and a log."""
    import time

    settings = resolve("quickstart").plain()
    evaluation = latest(tiny, "evaluation")
    pictures = [each for each in evaluation.path.iterdir() if each.suffix in (".webp", ".png")]
    for game in atari.games():
        for number, backbone in enumerate(("retnet", "mamba2", "gru", "s5", "transformer")):
            folder = tmp_path / backbone / game
            shutil.copytree(tiny, folder, copy_function=os.link, ignore=shutil.ignore_patterns("evaluation"))
            values = flat(settings) and settings | {"backbone": {"kind": backbone}}
            name = f"ALE/{game}-v5"
            mean = 1.0 + number
            scored(folder, mean, name, atari.human_normalized(name, mean), settings=values)
            for picture in pictures:
                shutil.copy(picture, latest(folder, "evaluation").path)
    before = time.process_time()
    out = tmp_path / "report.html"
    assert main.run(["report", str(tmp_path), "--out", str(out), "-q"]) == 0
    assert time.process_time() - before < 60
    assert out.stat().st_size < 30e6
    document = composed(tmp_path)
    assert len(exact(document, "runs")) == 130 and len(exact(document, "scores")) > 5 * 26
    assert len(captions(document, Picture)) < 60
