"""Seconds of an epoch from what runs have logged: which epochs count, and for what."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from test_aggregate import scored
from tiny_run import TINY

from wmcli.artifacts import Run
from wmcli.cli import main
from wmcli.errors import ArtifactError, UsageError
from wmcli.progress import Progress
from wmcli.stages.cost import STAGES, epoch_costs, group_runs, stage_seconds
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.sweeps.plan import read_sweep
from wmcli.sweeps.tables import begun_runs

QUIET = Progress(quiet=True)
START = datetime(2024, 5, 1, tzinfo=UTC)
COLLECT, TOKENIZER, DYNAMICS, IMAGINE = STAGES


def at(second: float) -> str:
    return (START + timedelta(seconds=second)).isoformat(timespec="milliseconds")


def record(began: float, second: float, epoch: int | None, stage: str) -> dict[str, Any]:
    return {"began": at(began), "time": at(second), "stage": stage, "job": f"{stage} {epoch}"} | (
        {} if epoch is None else {"epoch": epoch}
    )


def epoch_of(began: float, start: float, epoch: int, **seconds: float) -> list[dict[str, Any]]:
    """The records of an epoch: a stage of several seconds has one in its middle as well."""
    records = []
    for stage, taken in seconds.items():
        name = stage.replace("_", "-")
        records += [record(began, start + share * taken, epoch, name) for share in (0.5, 1.0)]
        start += taken
    return records


def run_of(folder: Path, records: list[dict[str, Any]], preset: str = "rem", **settings: Any) -> Path:
    """A run with a binding and these records."""
    run = Run.open(folder, create=True)
    run.bind(preset, {"seed": 1, **settings}, (), preset_digest=None, expected=None)
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


# -- of one run -------------------------------------------------------------------------------------------------------


def test_a_stage_takes_what_lies_between_the_record_before_and_its_last() -> None:
    records = epoch_of(0, 0, 1, collect=3, train_tokenizer=5, train_dynamics=10)
    records += [*epoch_of(0, 18, 2, collect=4, train_dynamics=12, imagine=7), record(0, 60, 2, "eval")]
    records += epoch_of(0, 60, 3, collect=2)  # the evaluation took 19 seconds of nobody
    assert stage_seconds(records) == {
        (1, COLLECT): 3,
        (1, TOKENIZER): 5,
        (1, DYNAMICS): 10,
        (2, COLLECT): 4,
        (2, DYNAMICS): 12,
        (2, IMAGINE): 7,
        (3, COLLECT): 2,
    }


def test_pauses_and_what_was_interrupted_do_not_count() -> None:
    records = epoch_of(0, 0, 1, collect=3, train_dynamics=10)[:-1]  # ended in the middle of the dynamics
    records += epoch_of(1000, 1000, 1, train_dynamics=6)  # the rest
    records += epoch_of(1000, 1006, 2, collect=4, train_dynamics=9)
    # It ended before imagination logged anything: what is left of it looks like a whole stage.
    records += epoch_of(5000, 5000, 2, imagine=1) + epoch_of(5000, 5001, 3, collect=5)
    assert stage_seconds(records) == {(1, COLLECT): 3, (2, COLLECT): 4, (2, DYNAMICS): 9, (3, COLLECT): 5}


def test_of_repeated_work_the_last_counts() -> None:
    records = [epoch_of(began, began, 1, collect=taken, imagine=taken + 1) for began, taken in ((0, 3), (100, 30))]
    assert stage_seconds([each for process in records for each in process]) == {(1, IMAGINE): 31}


def test_an_evaluation_that_a_process_begins_with_takes_no_stage_away() -> None:
    records = epoch_of(0, 0, 1, imagine=3) + [record(100, 108, 1, "eval"), *epoch_of(100, 108, 2, collect=4)]
    assert stage_seconds(records) == {(1, IMAGINE): 3, (2, COLLECT): 4}


def test_collecting_beside_is_left_out() -> None:
    ours = epoch_of(0, 10, 1, train_dynamics=20, imagine=5) + epoch_of(0, 35, 2, train_dynamics=20, imagine=5)
    theirs = [record(1, second, epoch, "collect") for second, epoch in ((9, 1), (18, 2), (40, 3))]
    found = stage_seconds(sorted([*ours, *theirs], key=lambda each: each["time"]))
    assert found == {(1, DYNAMICS): 30, (1, IMAGINE): 5, (2, DYNAMICS): 20, (2, IMAGINE): 5}  # 10 of them it waited
    # A process that had only collected when it was stopped did so alone.
    alone = [record(0, 4, 1, "collect"), *epoch_of(50, 50, 1, train_dynamics=6), *epoch_of(50, 56, 2, collect=3)]
    assert stage_seconds(alone) == {(1, COLLECT): 4, (2, COLLECT): 3}


def test_work_without_records_ends_when_it_is_published() -> None:
    """Scripted episodes and measures log nothing."""
    records = [record(0, 100, 1, DYNAMICS), record(0, 110, 1, DYNAMICS), record(0, 150, 1, IMAGINE)]
    silent = [START + timedelta(seconds=second) for second in (90, 130)]
    assert stage_seconds(records, silent) == {(1, DYNAMICS): 20, (1, IMAGINE): 20}


def test_other_commands_and_odd_records_tell_nothing() -> None:
    odd = [
        {"stage": COLLECT, "epoch": 1, "time": at(5)},
        {"began": "soon", "time": at(5), "epoch": 1, "stage": COLLECT},
    ]
    odd += [record(0, 5, None, COLLECT), {"began": at(0), "time": None, "epoch": 1, "stage": DYNAMICS}]
    assert stage_seconds(odd) == {}


# -- of several -------------------------------------------------------------------------------------------------------


def test_runs_count_by_their_median_epoch(tmp_path: Path) -> None:
    """A first epoch that compiles, and epochs before a stage begins, move neither stage nor sum."""
    runs = []
    for seed, slower in ((1, 0.0), (2, 1.0)):
        records, start = [], 0.0
        for epoch, (collect, dynamics, imagine) in enumerate([(1, 0, 0), (4, 100, 0), (4, 10, 20), (4, 10, 22)], 1):
            stages = {"collect": collect, "train_dynamics": dynamics and dynamics + slower, "imagine": imagine}
            stages = {name: seconds for name, seconds in stages.items() if seconds}
            records += epoch_of(0, start, epoch, **stages)
            start += sum(stages.values())
        runs.append(run_of(tmp_path / f"{seed}", records, seed=seed))
    rows = {row["stage"]: row for row in epoch_costs({"rem": runs}, QUIET)}
    assert list(rows) == [COLLECT, DYNAMICS, IMAGINE, "epoch"]
    assert (rows[COLLECT]["seconds"], rows[COLLECT]["epochs"], rows[COLLECT]["runs"]) == (4, 8, 2)
    dynamics = rows[DYNAMICS]
    assert (dynamics["seconds"], dynamics["lowest_run"], dynamics["highest_run"]) == (10.5, 10, 11)
    assert (dynamics["seconds_25"], dynamics["seconds_75"]) == (10.25, 77.75)  # of 10, 10, 11, 11, 100, 101
    assert rows["epoch"]["seconds"] == 4 + 10.5 + 21
    assert (rows["epoch"]["lowest_run"], rows["epoch"]["highest_run"]) == (35, 36)
    assert (rows["epoch"]["seconds_25"], rows["epoch"]["seconds_75"]) == (34.75, 36.25)  # of 34, 36, 35, 37
    (alone,) = [row for row in epoch_costs({"rem": runs[:1]}, QUIET) if row["stage"] == IMAGINE]
    assert (alone["seconds"], alone["lowest_run"], alone["highest_run"], alone["epochs"]) == (21, None, None, 2)


def test_a_run_without_a_whole_epoch_is_left_out_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = run_of(tmp_path / "good", epoch_of(0, 0, 1, collect=3)), run_of(tmp_path / "bad", [])
    assert {row["runs"] for row in epoch_costs({"rem": [good, bad], "iris": [bad]}, QUIET)} == {1}
    assert f"{bad} has logged no whole epoch of wm run: left out" in capsys.readouterr().err
    with pytest.raises(ArtifactError, match="no run has logged a whole epoch of wm run yet, of iris"):
        epoch_costs({"iris": [bad]}, QUIET)


def test_runs_that_differ_in_seed_and_environment_alone_are_one_variant(tmp_path: Path) -> None:
    made = [
        run_of(tmp_path / "a", [], seed=1, environment={"id": "x"}),
        run_of(tmp_path / "b", [], seed=2, environment={"id": "y"}),
        run_of(tmp_path / "c", [], preset="iris", seed=1, environment={"id": "x"}),
    ]
    assert group_runs(made, []) == {"rem": made[:2], "iris": made[2:]}
    wider = run_of(tmp_path / "d", [], seed=1, environment={"id": "x"}, backbone={"width": 8})
    assert group_runs([*made, wider], []) == {str(made[0]): made[:2], "iris": made[2:3], str(wider): [wider]}
    assert group_runs(made, ["environment.id"]) == {
        "environment.id=x": [made[0], made[2]],
        "environment.id=y": [made[1]],
    }
    with pytest.raises(UsageError, match="--by environment.ide: no such setting; did you mean 'environment.id'?"):
        group_runs(made, ["environment.ide"])
    with pytest.raises(UsageError, match="is named twice"):
        group_runs([made[0], tmp_path / "b" / ".." / "a"], [])
    with pytest.raises(ArtifactError, match="is no run of wm run"):
        group_runs([scored(tmp_path / "e", 1.0)], [])


# -- what a run logged ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_epochs_and_stages_are_those_that_a_run_logged(tmp_path: Path) -> None:
    """A tiny run of three epochs, in which the tokenizer trains in two and imagination begins in the second."""
    plan = ["run.epochs=3", "run.collect_epochs=3", "run.tokenizer_after=0", "run.tokenizer_epochs=2"]
    plan += ["run.dynamics_after=0", "run.controller_after=1", "run.evaluate_every=2", "run.evaluate_episodes=2"]
    folder = tmp_path / "run"
    run_loop(open_context(folder, None, [*TINY, *plan], create=True, quiet=True, bind=True))
    records = Run.open(folder, create=False).history()
    found = stage_seconds(records)
    assert set(found) == {(each["epoch"], each["stage"]) for each in records if each["stage"] != "eval"}
    assert set(found) == {
        *((epoch, stage) for epoch in (1, 2, 3) for stage in (COLLECT, DYNAMICS)),
        *((epoch, TOKENIZER) for epoch in (1, 2)),
        *((epoch, IMAGINE) for epoch in (2, 3)),
    }
    # Stages and evaluations one after the other fill the time from the process's beginning to its last record.
    times = [datetime.fromisoformat(each["time"]) for each in records]
    evaluated = sum(
        (time - before).total_seconds()
        for before, time, each in zip(times[:-1], times[1:], records[1:], strict=True)
        if each["stage"] == "eval"
    )
    whole = (times[-1] - datetime.fromisoformat(records[0]["began"])).total_seconds()
    assert sum(found.values()) + evaluated == pytest.approx(whole)
    rows = {row["stage"]: row for row in epoch_costs({"tiny": [folder]}, QUIET)}
    assert {stage: row["epochs"] for stage, row in rows.items()} == {
        COLLECT: 3, TOKENIZER: 2, DYNAMICS: 3, IMAGINE: 2, "epoch": 2
    }  # fmt: skip


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A run of two epochs."""
    records = epoch_of(0, 0, 1, collect=3, train_dynamics=10) + epoch_of(0, 13, 2, collect=4, train_dynamics=12)
    return run_of(tmp_path / "logged", records, backbone={"kind": "retnet"})


def test_the_command_shows_and_draws_them(logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "epochs.png"
    line = ["compare", str(logged), "--cost", str(picture)]
    assert main.run([*line, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == epoch_costs({"rem": [logged]}, QUIET)
    assert picture.stat().st_size > 1000
    assert main.run([*line, "--format", "csv"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split(",") == list(rows[0]) and len(lines) == len(rows)
    assert float(lines[-1].split(",")[2]) == rows[-1]["seconds"]
    assert main.run([*line, "--format", "markdown", "--by", "backbone.kind"]) == 0
    assert "| stage | backbone.kind=retnet |" in capsys.readouterr().out


def test_the_variants_of_a_sweep_have_their_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'folder = "{tmp_path}/runs"\n[vary]\npreset = ["rem-quick", "iris-quick"]\nseed = [1, 2]\n')
    sweep = read_sweep(file)
    with pytest.raises(ArtifactError, match="has begun yet; see: wm sweep status"):
        begun_runs(sweep, QUIET)
    for run in sweep.runs[:3]:
        records = epoch_of(0, 0, 1, collect=3, imagine=5 if run.variant == "rem-quick" else 50)
        run_of(run.folder, records, seed=int(run.name[-1]))
    assert main.run(["compare", "--sweep", str(file), "--cost", str(tmp_path / "a.svg"), "--json"]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert "warning: not begun yet: iris-quick/seed-2\n" in shown.err
    assert {(row["variant"], row["runs"]): row["seconds"] for row in rows if row["stage"] == "imagine"} == {
        ("rem-quick", 2): 5,
        ("iris-quick", 1): 50,
    }
    assert "rem-quick" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["RUN", "--cost", "a.png", "--curves", "b.png"], "--cost shows seconds of an epoch alone"),
        (["RUN", "--cost", "a.png", "--protocol", "generation"], "--cost shows seconds of an epoch alone"),
        (["RUN", "--cost", "a.png", "--against", "b"], "--cost shows seconds of an epoch alone"),
        (["RUN", "--cost", "a.png", "--sweep", "b.toml"], "--cost shows seconds of an epoch alone"),
        (["--cost", "a.png"], "no runs: name some"),
        (["RUN", "--cost", "a.txt"], "a.txt"),
        (["nowhere", "--cost", "a.png"], "nowhere"),
    ],
)
def test_a_cost_that_cannot_be_shown_is_refused_in_one_line(
    line: list[str], message: str, logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main.run(["compare", *(str(logged) if word == "RUN" else word for word in line)]) != 0
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out
    assert list(tmp_path.iterdir()) == [logged]
