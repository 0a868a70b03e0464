"""`wm artifacts`, `lineage`, `verify`, `presets` and `envs`, the first three on a small run made here."""

from __future__ import annotations

import json
import sys

import pytest

from wmcli.artifacts import Run
from wmcli.cli import main
from wmcli.cli.options import may_create

MACHINE = {"wm": "0", "torch": "0", "device": "cpu", "threads": 1, "precision": "float32"}


def publish(run, kind, inputs, text, previous=None):
    job = run.job(kind, {"text": text}, inputs | ({"previous": previous} if previous else {}))
    with job.work() as work:
        (work.payload / "data.bin").write_bytes(text.encode())
        return work.publish(settings={"seed": 3}, metrics={"loss": 0.25}, environment={"id": "x"}, machine=MACHINE)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """experience 1 and 2, a tokenizer of the second, dynamics of both."""
    folder = tmp_path / "a run"
    monkeypatch.setenv("WM_RUN", str(folder))
    run = Run.open(folder, create=True)
    first = publish(run, "experience", {}, "one")
    second = publish(run, "experience", {}, "second", previous=first)
    tokenizer = publish(run, "tokenizer", {"experience": second}, "tokenizer")
    publish(run, "dynamics", {"experience": second, "tokenizer": tokenizer}, "dynamics!")
    return run


def rows(arguments, capsys):
    assert main.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lines(arguments, capsys):
    assert main.run(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.split("\t") for line in out.splitlines()[1:]]


def test_artifacts(run, capsys):
    shown = rows(["artifacts"], capsys)
    assert [row["name"] for row in shown] == ["experience@1", "experience@2", "tokenizer@1", "dynamics@1"]
    assert shown[1]["bytes"] == len("second")
    assert shown[3]["inputs"] == {"experience": "experience@2", "tokenizer": "tokenizer@1"}
    assert shown[3]["metrics"] == {"loss": 0.25}
    assert shown[3]["path"] == str(run.path / "dynamics" / "v0001")
    assert [row["name"] for row in rows(["artifacts", "experience"], capsys)] == ["experience@1", "experience@2"]
    assert main.run(["artifacts", "tokenizer"]) == 0
    assert capsys.readouterr().out.split("\t")[:2] == ["name", "state"]  # a heading
    plain = lines(["artifacts", "tokenizer"], capsys)
    assert plain[0][:2] == ["tokenizer@1", "published"]
    assert len(plain[0]) == 7


def test_artifacts_shows_what_is_pruned_and_what_cannot_be_read(run, capsys):
    run.prune("experience", {1})
    (run.path / "tokenizer" / "v0001" / "manifest.json").write_text("{}")
    assert [row["state"] for row in rows(["artifacts"], capsys)] == ["pruned", "published", "damaged", "published"]


def test_a_missing_run_is_code_3(tmp_path, capsys):
    for command in ("artifacts", "lineage", "verify"):
        assert main.run([command, "--run", str(tmp_path / "none")]) == 3
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"wm {command}: no run at ")
        assert err.count("\n") == 1


def test_an_empty_run(tmp_path, capsys):
    assert rows(["artifacts", "--run", str(tmp_path)], capsys) == []
    assert main.run(["lineage", "--run", str(tmp_path)]) == 3
    assert "make one with: wm collect" in capsys.readouterr().err


@pytest.mark.parametrize("reference", [[], ["dynamics"], ["dynamics@1"], ["path"]])
def test_lineage(reference, run, capsys):
    if reference == ["path"]:
        reference = [str(run.path / "dynamics" / "v0001")]
    shown = rows(["lineage", *reference], capsys)
    assert [(row["depth"], row["role"], row["name"], row["state"]) for row in shown] == [
        (0, "", "dynamics@1", "published"),
        (1, "experience", "experience@2", "published"),
        (2, "previous", "experience@1", "published"),
        (1, "tokenizer", "tokenizer@1", "published"),
        (2, "experience", "experience@2", "repeated"),
    ]
    assert shown[1]["digest"] == shown[4]["digest"] == run.resolve("experience@2", "experience").digest
    plain = lines(["lineage", *reference], capsys)
    assert [line[:4] for line in plain[:2]] == [
        ["0", "", "dynamics@1", "published"],
        ["1", "experience", "experience@2", "published"],
    ]


def test_lineage_shows_what_is_gone(run, capsys):
    run.prune("experience", {1})
    (run.path / "tokenizer" / "v0001" / "manifest.json").unlink()
    states = {row["name"]: row["state"] for row in rows(["lineage", "dynamics"], capsys)}
    assert states["tokenizer@1"] == "missing"
    assert states["experience@1"] == "pruned"


def test_lineage_of_something_else(run, capsys):
    assert [row["name"] for row in rows(["lineage", "experience@1"], capsys)] == ["experience@1"]
    assert main.run(["lineage", "dynamic@1"]) == 2
    assert "did you mean 'dynamics'?" in capsys.readouterr().err
    assert main.run(["lineage", "dynamics@9"]) == 3


def test_verify(run, capsys):
    assert lines(["verify"], capsys) == [
        [name, "ok", ""] for name in ("experience@1", "experience@2", "tokenizer@1", "dynamics@1")
    ]
    assert lines(["verify", "tokenizer"], capsys) == [["tokenizer@1", "ok", ""]]
    run.prune("experience", {1})
    assert lines(["verify", "experience@1"], capsys)[0][1] == "pruned"
    (run.path / "tokenizer" / "v0001" / "data.bin").write_bytes(b"Tokenizer")
    for arguments, found in ([], ["pruned", "unusable", "damaged", "unusable"]), (["tokenizer@1"], ["damaged"]):
        # A second look in the same process must not trust the first.
        assert main.run(["verify", *arguments]) == 3
        out, err = capsys.readouterr()
        assert [line.split("\t")[1] for line in out.splitlines()[1:]] == found
        assert err.startswith(
            f"wm verify: {len(found) - (len(found) > 1)} of {len(found)} artifacts are not as they were: "
        )
        assert "tokenizer@1 damaged" in err


def test_clean_shows_first_and_removes_when_told(run, capsys, monkeypatch):
    publish(run, "dynamics", {}, "newer")
    folder = str(run.path)
    assert [row["name"] for row in rows(["clean", folder, "--yes"], capsys)] == ["dynamics@1"]
    assert main.run(["clean", folder]) == 0
    assert "nothing to remove" in capsys.readouterr().err
    publish(run, "dynamics", {}, "newest")
    assert main.run(["clean", folder]) == 2  # nobody there to ask
    assert "add --yes" in capsys.readouterr().err
    assert [artifact.version for artifact in run.artifacts("dynamics")] == [2, 3]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert main.run(["clean", folder]) == 0
    assert [artifact.version for artifact in run.artifacts("dynamics")] == [2, 3]
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert main.run(["clean", folder]) == 0
    assert [artifact.version for artifact in run.artifacts("dynamics")] == [3]
    assert main.run(["clean", str(run.path / "nowhere")]) == 3


def test_a_person_gets_a_table(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main.run(["artifacts"]) == 0
    out, _ = capsys.readouterr()
    assert "created" in out
    assert "\t" not in out


def test_a_stage_may_make_a_run_only_from_the_artifacts_of_others(run, monkeypatch):
    monkeypatch.chdir(run.path)  # where "tokenizer" is also the name of a folder
    assert may_create("tokenizer/v0001", str(run.path / "experience" / "v0001"))
    assert not may_create("tokenizer")
    assert not may_create("tokenizer@1", "experience/v0001")
    assert not may_create("elsewhere/v0001")
    assert not may_create(None)


# -- presets and environments -----------------------------------------------------------------------------------------


def test_presets(capsys):
    listed = rows(["presets"], capsys)
    assert listed == rows(["presets", "list"], capsys)
    assert all(row["about"] for row in listed)
    name = listed[0]["name"]
    shown = rows(["presets", "show", name, "--set", "seed=12345"], capsys)
    assert shown["name"] == name
    assert shown["settings"]["seed"] == 12345
    assert "parameters" not in shown
    assert ["seed", "12345"] in lines(["presets", "show", name, "--set", "seed=12345"], capsys)


def test_presets_count_parameters(capsys):
    counts = rows(["presets", "show", "quickstart", "--parameters"], capsys)["parameters"]
    assert {"tokenizer", "dynamics", "controller"} <= set(counts)
    printed = dict(lines(["presets", "show", "quickstart", "--parameters"], capsys))
    assert {key for key in printed if key.startswith("parameters.")} == {f"parameters.{part}" for part in counts}
    assert "controller.learning_rate" in printed


def test_wrong_setting_is_one_line(capsys):
    name = rows(["presets"], capsys)[0]["name"]
    assert main.run(["presets", "show", name, "--set", "sead=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wm presets: ")
    assert "did you mean 'seed'?" in err
    assert err.count("\n") == 1


def test_envs(capsys):
    listed = rows(["envs"], capsys)
    assert "wm/Catch-v0" in [row["id"] for row in listed]
    assert len(lines(["envs"], capsys)) == len(listed)
