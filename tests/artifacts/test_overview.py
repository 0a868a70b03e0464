"""`wm runs` and `wm diff`: what they say of runs in every state."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from wmcli.artifacts import Run
from wmcli.artifacts.lock import HOLDER, exclusive
from wmcli.artifacts.overview import (
    COLUMNS,
    bytes_on_disk,
    describe_run,
    differences,
    find_runs,
    seconds_of_work,
)
from wmcli.errors import ArtifactError, UsageError

SETTINGS = {
    "seed": 3,
    "environment": {"id": "wm/Catch-v0"},
    "run": {"epochs": 2},
    "backbone": {"kind": "retnet", "width": 8, "heads": 2},
}


def publish(run, kind, metrics=None, epoch=None, **identity):
    with run.job(kind, identity, {}).work() as work:
        (work.payload / "data.bin").write_bytes(b"12345")
        return work.publish(
            settings=SETTINGS | identity,
            metrics=metrics or {},
            environment={"id": "wm/Catch-v0"},
            machine={"device": "cpu"},
            extra={} if epoch is None else {"epoch": epoch},
        )


def score(run, mean, epoch=None, **identity):
    metrics = {"protocol": "returns", "mean": mean, "stderr": 0.25, "episodes": 9, "total_steps": 70}
    return publish(run, "evaluation", metrics, epoch, mean=mean, **identity)


@pytest.fixture
def run(tmp_path):
    run = Run.open(tmp_path / "runs" / "a", create=True)
    run.bind("quickstart", SETTINGS)
    return run


def test_runs_are_found_at_any_depth_and_not_inside_others(run, tmp_path):
    folder = tmp_path / "runs"
    Run.open(folder / "deep" / "er" / "b", create=True).bind("rem", {})
    publish(Run.open(folder / "c", create=True), "experience")  # without a run.toml
    Run.open(run.path / "inside", create=True).bind("rem", {})
    Run.open(folder / ".hidden", create=True).bind("rem", {})
    (folder / "empty").mkdir()
    (folder / "again").symlink_to(run.path)
    (folder / "deep" / "up").symlink_to(folder)  # a loop
    found = [str(path.relative_to(folder)) for path in find_runs(folder)]
    assert found == ["a", "c", "deep/er/b"]
    assert list(find_runs(run.path)) == [run.path]
    with pytest.raises(ArtifactError, match="no folder .*; start a run with: wm run"):
        list(find_runs(folder / "none"))


def test_a_new_run_is_idle(run):
    row = describe_run(run.path)
    assert tuple(row) == COLUMNS
    assert (row["status"], row["preset"], row["environment"], row["seed"]) == ("idle", "quickstart", "wm/Catch-v0", 3)
    assert (row["epoch"], row["epochs"], row["score"], row["problem"]) == (None, 2, None, None)
    assert row["bytes"] == sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())


def test_epoch_score_and_steps_are_the_newest(run):
    publish(run, "experience", {"total_steps": 40}, epoch=1)
    score(run, 0.5, epoch=1)
    publish(run, "experience", {"total_steps": 80}, epoch=2, again=1)
    row = describe_run(run.path)
    assert (row["status"], row["epoch"], row["steps"]) == ("idle", 2, 80)
    assert (row["score"], row["stderr"], row["episodes"], row["evaluation"]) == (0.5, 0.25, 9, "evaluation@1")
    score(run, 0.75, epoch=2)
    publish(run, "evaluation", {"protocol": "doors"}, epoch=2, other=1)  # is no score, and newer
    row = describe_run(run.path)
    assert (row["status"], row["score"], row["evaluation"]) == ("finished", 0.75, "evaluation@2")


def test_without_epochs_an_evaluation_finishes_until_something_is_trained(run, monkeypatch):
    score(run, 0.5)
    assert describe_run(run.path)["status"] == "finished"
    later = publish(run, "dynamics")
    manifest = later.manifest | {"created": "2100-01-01T00:00:00+00:00"}
    monkeypatch.setattr(Run, "get", lambda self, kind, version, get=Run.get: _dated(get(self, kind, version), manifest))
    assert describe_run(run.path)["status"] == "idle"


def _dated(artifact, manifest):
    return type(artifact)(artifact.path, manifest) if artifact.kind == manifest["kind"] else artifact


def test_a_checkpoint_waits(run):
    score(run, 0.5, epoch=2)
    with run.job("dynamics", {}, {}).work() as work:
        (work.path / "checkpoint").write_bytes(b"x")
    assert describe_run(run.path)["status"] == "interrupted"


def test_running_is_who_holds_the_lock_now(run):
    folder = run.path / "dynamics"
    folder.mkdir()
    code = f"""
from pathlib import Path
from wmcli.artifacts.lock import exclusive
with exclusive(Path({str(folder)!r}), "x"):
    print("held", flush=True)
    input()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    assert describe_run(run.path)["status"] == "running"
    other.kill()  # leaves the note of the holder behind
    other.communicate()
    assert (folder / HOLDER).exists()
    assert describe_run(run.path)["status"] == "idle"
    with exclusive(folder, "x"):
        pass


def test_damage_is_a_row(run):
    publish(run, "experience", {"total_steps": 40})
    broken = publish(run, "tokenizer")
    (broken.path / "manifest.json").write_text("{}")
    row = describe_run(run.path)
    assert (row["status"], row["steps"]) == ("damaged", 40)
    assert "tokenizer/v0001/manifest.json: not a manifest" in row["problem"]
    (run.path / "run.toml").write_text("preset = ")
    assert "run.toml: not valid TOML" in describe_run(run.path)["problem"]
    odd = Run.open(run.path.parent / "odd", create=True)
    publish(odd, "evaluation", {"protocol": "returns"})  # a manifest that says too little
    assert describe_run(odd.path)["status"] == "damaged"


def test_nothing_is_written(run):
    publish(run, "experience")
    (run.path / "experience" / "latest").unlink()
    before = sorted(run.path.rglob("*"))
    describe_run(run.path)
    assert sorted(run.path.rglob("*")) == before


def test_a_pruned_version_counts_its_remaining_bytes(run):
    version = publish(run, "experience")
    whole = bytes_on_disk(version.path)
    run.prune("experience", {1})
    assert bytes_on_disk(version.path) == sum(file.stat().st_size for file in version.path.iterdir()) != whole


# -- differences ------------------------------------------------------------------------------------------------------


def other(first, name, **settings):
    second = Run.open(first.path.parent / name, create=True)
    second.bind(settings.pop("preset", "quickstart"), SETTINGS | settings)
    return second


def keys(rows):
    return [(row["key"], row["left"], row["right"]) for row in rows]


def test_runs_differ_in_preset_seed_and_settings(run):
    second = other(run, "b", preset="rem", seed=4, run={"epochs": 2, "keep": 3})
    assert keys(differences(run.path, second.path)) == [
        ("preset", "quickstart", "rem"),
        ("seed", 3, 4),
        ("run.keep", None, 3),
    ]
    assert differences(run.path, run.path) == []


def test_settings_of_backbones_that_were_not_chosen_are_left_out(run):
    second = other(run, "b", alternatives={"backbone": {"s4": {"state_size": 8}}})
    assert differences(run.path, second.path) == []
    third = other(run, "c", backbone={"kind": "s4", "width": 8, "state_size": 64})
    assert keys(differences(run.path, third.path)) == [
        ("backbone.kind", "retnet", "s4"),
        ("backbone.heads", 2, None),
        ("backbone.state_size", None, 64),
    ]


def test_artifacts_differ_in_more(run):
    first = publish(run, "dynamics")
    parent = publish(run, "experience")
    with run.job("dynamics", {"x": 1}, {"experience": parent}).work() as work:
        second = work.publish(
            settings=SETTINGS | {"seed": 9}, metrics={}, environment={"id": "ALE/Pong-v5"}, machine={"device": "cuda"}
        )
    assert [(row["part"], *keys([row])[0]) for row in differences(first.path, second.path)] == [
        ("settings", "seed", 3, 9),
        ("environment", "id", "wm/Catch-v0", "ALE/Pong-v5"),
        ("machine", "device", "cpu", "cuda"),
        ("inputs", "experience", None, f"experience@1 {parent.digest[:12]}"),
    ]
    assert differences(first.path / "manifest.json", second.path) == differences(first.path, second.path)


def test_incomparable_inputs_are_named(run, tmp_path):
    version = publish(run, "dynamics")
    with pytest.raises(UsageError, match="two runs or two artifacts"):
        differences(run.path, version.path)
    with pytest.raises(ArtifactError, match="v0009/manifest.json: No such file or directory"):
        differences(version.path, version.path.with_name("v0009"))
    with pytest.raises(ArtifactError, match="no run at"):
        differences(run.path, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="has no run.toml"):
        differences(run.path, tmp_path / "empty")


# -- time of work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "until", "want"),
    [
        ([(0, 10), (0, 40)], 40, 40),
        ([(0, 10), (0, 40)], 20, 10),  # the line of second 40 comes later
        ([(0, 10), (100, 130)], 200, 10 + 30),  # interrupted for 90 seconds
        ([(0, 10), (5, 12), (0, 30), (5, 35)], 40, 35),  # a second process collects
        ([(None, 10), (None, 40), (100, 130)], 200, 30 + 30),  # begun by an older version
        ([], 10, 0),
    ],
)
def test_pauses_between_processes_are_no_work(lines, until, want):
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def moment(second):
        return (start + timedelta(seconds=second)).isoformat()

    records = [{"time": moment(time)} | ({} if began is None else {"began": moment(began)}) for began, time in lines]
    assert seconds_of_work(records, start + timedelta(seconds=until)) == want
