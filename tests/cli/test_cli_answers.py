"""What `wm artifacts`, `lineage`, `verify`, `runs`, `diff`, `presets` and `envs` answer, on small runs made here."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, timedelta

import pytest

from wmcli.artifacts import Run, Tree
from wmcli.cli import main, presets
from wmcli.cli.human import SHORT, ago
from wmcli.cli.options import may_create
from wmcli.config import preset_names
from wmcli.progress import size

NAMES = ("experience@1", "experience@2", "tokenizer@1", "dynamics@1")
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


def on_disk(folder):
    return sum(file.stat().st_size for file in folder.rglob("*"))


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Runs a command on a terminal of 80 columns and returns what a person sees, line by line."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def seen(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True)
            assert main.run(list(arguments)) == 0
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return seen


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
    assert shown[1]["published_bytes"] == len("second")
    assert shown[1]["bytes"] == on_disk(run.path / "experience" / "v0002") > len("second")
    assert shown[3]["inputs"] == {"experience": "experience@2", "tokenizer": "tokenizer@1"}
    assert shown[3]["metrics"] == {"loss": 0.25}
    assert shown[3]["path"] == str(run.path / "dynamics" / "v0001")
    assert [row["name"] for row in rows(["artifacts", "experience"], capsys)] == ["experience@1", "experience@2"]
    assert main.run(["artifacts", "tokenizer"]) == 0
    assert capsys.readouterr().out.split("\t")[:2] == ["name", "state"]  # a heading
    plain = lines(["artifacts", "tokenizer"], capsys)
    assert plain[0][:2] == ["tokenizer@1", "published"]
    assert len(plain[0]) == 7


def test_artifacts_shows_pruned_and_unreadable_versions(run, capsys):
    run.prune("experience", {1})
    (run.path / "tokenizer" / "v0001" / "manifest.json").write_text("{}")
    shown = rows(["artifacts"], capsys)
    assert [row["state"] for row in shown] == ["pruned", "published", "damaged", "published"]
    pruned = shown[0]
    assert pruned["published_bytes"] == len("one")
    assert pruned["bytes"] == on_disk(run.path / "experience" / "v0001")
    assert not (run.path / "experience" / "v0001" / "data.bin").exists()


def test_artifacts_fit_a_terminal(run, terminal):
    run.prune("experience", {1})
    first, second, tokenizer, dynamics = (
        next(line for line in terminal("artifacts") if line.split()[:1] == [name])
        for name in ("experience@1", "experience@2", "tokenizer@1", "dynamics@1")
    )
    assert "pruned" in first and "pruned" not in second
    assert run.resolve("dynamics", "dynamics").digest[:SHORT] in dynamics.split()
    assert re.search(r"\b\d min\b.* \d+ B\b", tokenizer)
    assert all(len(line) <= 80 for line in terminal("artifacts"))


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


def test_lineage_shows_removed_versions(run, capsys):
    run.prune("experience", {1})
    (run.path / "tokenizer" / "v0001" / "manifest.json").unlink()
    states = {row["name"]: row["state"] for row in rows(["lineage", "dynamics"], capsys)}
    assert states["tokenizer@1"] == "missing"
    assert states["experience@1"] == "pruned"


def test_a_terminal_shows_the_lineage_as_a_tree(run, terminal):
    run.prune("experience", {1})
    short = {name: run.resolve(name, name.partition("@")[0]).digest[:SHORT] for name in NAMES}
    assert terminal("lineage") == [
        f"dynamics@1  {short['dynamics@1']}",
        f"├── experience@2  {short['experience@2']}",
        f"│   └── previous: experience@1  {short['experience@1']}  pruned",
        f"└── tokenizer@1  {short['tokenizer@1']}",
        f"    └── experience@2  {short['experience@2']}  repeated",
    ]


def test_the_tree_of_a_long_run_is_cut(run, terminal, monkeypatch, capsys):
    tree = Tree("experience@1", "1" * 64, run.path / "experience" / "v0001")
    for number in range(2, 401):
        path = run.path / "experience" / f"v{number:04d}"
        tree = Tree(f"experience@{number}", "1" * 64, path, inputs={"previous": tree})
    monkeypatch.setattr("wmcli.artifacts.lineage", lambda artifact: tree)
    *drawn, last = terminal("lineage", "experience")
    assert all(len(line) <= 80 for line in drawn)
    assert last == f"{400 - len(drawn)} more on {400 - len(drawn)} levels below: --all shows them"
    whole = terminal("lineage", "experience", "--all")
    assert len(whole) == 400
    assert whole[-1].endswith("previous: experience@1  1111111")
    assert len(lines(["lineage", "experience"], capsys)) >= 400  # a pipe always gets all


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
        assert err.startswith(f"wm verify: {len(found) - (len(found) > 1)} of {len(found)} artifacts failed: ")
        assert "tokenizer@1 damaged" in err


def test_clean_shows_first_and_removes_when_told(run, capsys, monkeypatch):
    publish(run, "dynamics", {}, "newer")
    folder = str(run.path)
    assert [row["name"] for row in rows(["clean", folder, "--yes"], capsys)] == ["dynamics@1"]
    assert main.run(["clean", folder]) == 0
    assert "nothing to remove" in capsys.readouterr().err
    publish(run, "dynamics", {}, "newest")
    assert [row["name"] for row in rows(["clean", folder, "--dry-run"], capsys)] == ["dynamics@2"]
    assert main.run(["clean", folder, "--dry-run", "--yes"]) == 2
    run.note_use("0" * 64, run.path / "gone")
    capsys.readouterr()
    assert main.run(["clean", folder, "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert f"weights stay for {run}/gone" in told and "would free " in told
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
    assert "digest" in out
    assert "\t" not in out


def test_a_stage_may_make_a_run_only_from_the_artifacts_of_others(run, monkeypatch):
    monkeypatch.chdir(run.path)  # where "tokenizer" is also the name of a folder
    assert may_create("tokenizer/v0001", str(run.path / "experience" / "v0001"))
    assert not may_create("tokenizer")
    assert not may_create("tokenizer@1", "experience/v0001")
    assert not may_create("elsewhere/v0001")
    assert not may_create(None)


# -- runs and their differences ---------------------------------------------------------------------------------------


def bound(folder, **settings):
    run = Run.open(folder, create=True)
    run.bind("quickstart", {"environment": {"id": "wm/Catch-v0"}, "run": {"epochs": 2}} | settings)
    return run


def test_runs(tmp_path, terminal, capsys):
    scored = bound(tmp_path / "runs" / "a", seed=1)
    with scored.job("evaluation", {}, {}).work() as work:
        metrics = {"protocol": "returns", "mean": 0.5, "stderr": 0.25, "episodes": 9}
        work.publish(settings={}, metrics=metrics, environment=None, machine=MACHINE, extra={"epoch": 2})
    broken = bound(tmp_path / "runs" / "b")
    (broken.path / "run.toml").write_text("preset = ")
    folder = str(tmp_path / "runs")
    shown = rows(["runs", folder], capsys)
    assert [(row["name"], row["status"]) for row in shown] == [
        (f"{folder}/a", "finished"),
        (f"{folder}/b", "damaged"),
    ]
    assert shown[0].keys() == shown[1].keys()
    plain = lines(["runs", folder], capsys)
    assert plain[-2][:5] == [f"{folder}/a", "finished", "quickstart", "wm/Catch-v0", "1"]
    text = "\n".join(terminal("runs", folder))
    assert "2/2" in text and "0.5 ±" in text
    assert main.run(["runs", str(tmp_path / "none")]) == 3
    (tmp_path / "empty").mkdir()
    assert rows(["runs", str(tmp_path / "empty")], capsys) == []


def test_damaged_versions_are_reported_beside_the_table(tmp_path, monkeypatch, capsys):
    (bound(tmp_path / "a").path / "run.toml").write_text("preset = ")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main.run(["runs", str(tmp_path)]) == 0
    assert "run.toml: not valid TOML" in capsys.readouterr().err


def test_diff(run, tmp_path, terminal, capsys):
    first, second = bound(tmp_path / "a", seed=1), bound(tmp_path / "b", seed=2)
    differing = [{"part": "settings", "key": "seed", "left": 1, "right": 2}]
    assert rows(["diff", str(first.path), str(second.path)], capsys) == differing
    assert lines(["diff", str(first.path), str(second.path)], capsys)[-1] == ["settings", "seed", "1", "2"]
    assert lines(["diff", str(first.path), str(first.path)], capsys) == []
    assert rows(["diff", str(first.path), str(first.path)], capsys) == []
    versions = [str(run.path / "experience" / name) for name in ("v0001", "v0002")]
    assert [row["part"] for row in rows(["diff", *versions], capsys)] == ["inputs"]
    assert main.run(["diff", str(first.path), versions[0]]) == 2


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9949, "9.9 kB"),
        (9950, "10 kB"),
        (999_500, "1.0 MB"),
        (5e15, "5,000 TB"),
    ],
)
def test_sizes(number, text):
    assert size(number) == text


@pytest.mark.parametrize(
    ("hours", "text"), [(-1, "0 min"), (0.5, "30 min"), (1.9, "114 min"), (3, "3 h"), (47, "47 h"), (72, "3 days")]
)
def test_ages(hours, text):
    assert ago((datetime.now(UTC) - timedelta(hours=hours)).isoformat()) == text


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


def test_presets_of_a_system_and_quick_ones(capsys):
    drama = rows(["presets", "--system", "DRAMA"], capsys)
    assert "drama-quick" in [row["name"] for row in drama]
    assert {row["system"] for row in drama} == {"Drama"}
    quick = rows(["presets", "list", "--quick"], capsys)
    assert {"quickstart", "muzero-quick"} <= {row["name"] for row in quick}
    assert "drama" not in [row["name"] for row in quick]
    assert [row["name"] for row in rows(["presets", "--system", "drama", "--quick"], capsys)] == [
        "drama-atari",
        "drama-pong-small",
        "drama-quick",
        "wm-best",
    ]
    assert main.run(["presets", "--system", "strom"]) == 2
    assert "did you mean 'storm'?" in capsys.readouterr().err


def test_a_terminal_shows_presets_below_their_system(terminal):
    shown = terminal("presets")
    assert all(len(line) <= 80 for line in shown)
    names = {line.split()[0]: number for number, line in enumerate(shown) if line.startswith("  ") and line[2:3] != " "}
    assert set(preset_names()) == set(names)
    for system in presets.SYSTEMS:
        title = next(number for number, line in enumerate(shown) if re.match(rf"{system}(:|$)", line))
        first = min(number for number in names.values() if number > title)
        assert next(name for name, number in names.items() if number == first)
    assert any(line.startswith("Drama: Wang et al.: Drama: Mamba-Enabled") for line in terminal("presets", "--quick"))


def test_presets_show_lists_changed_settings(capsys):
    shown = rows(["presets", "show", "drama-s", "--changed"], capsys)
    assert (shown["base"], shown["system"]) == ("drama", "Drama")
    assert [(row["setting"], row["value"], row["base"]) for row in shown["changed"]] == [
        ("tokenizer.channels", [32, 64, 96, 128, 128], [16, 32, 48, 64, 64]),
        ("backbone.state_size", 32, 16),
    ]
    assert lines(["presets", "show", "drama-s", "--changed", "--set", "seed=5"], capsys)[-3:][0] == ["seed", "5", "1"]
    defaults = rows(["presets", "show", "rem", "--changed"], capsys)
    assert defaults["base"] is None
    assert ("environment.id", "ALE/Pong-v5", "wm/Catch-v0") in [
        (row["setting"], row["value"], row["base"]) for row in defaults["changed"]
    ]


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


# -- other forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (["artifacts"], ["name", "state"]),
        (["lineage"], ["depth", "role"]),
        (["verify"], ["name", "state"]),
        (["runs", ".."], ["name"]),
        (["envs"], ["id"]),
        (["presets"], ["name", "about"]),
        (["presets", "list"], ["name", "about"]),
        (["presets", "show", "quickstart"], ["setting", "value"]),
        (["presets", "show", "quickstart", "--changed"], ["setting", "value", "base"]),
    ],
)
def test_every_list_comes_in_every_form(arguments, columns, run, capsys, monkeypatch):
    monkeypatch.chdir(run.path)
    printed = {}
    for form in ("tsv", "csv", "markdown", "latex", "table"):
        assert main.run([*arguments, "--format", form]) == 0
        printed[form] = capsys.readouterr().out
    assert printed["tsv"].split("\n")[0].split("\t")[: len(columns)] == columns
    assert printed["csv"].split("\n")[0].split(",")[: len(columns)] == columns
    assert printed["markdown"].startswith(f"| {columns[0]} |")
    assert printed["latex"].rstrip().endswith(r"\end{tabular}")
    assert printed["table"] and "\t" not in printed["table"]
    assert main.run(arguments) == 0
    assert capsys.readouterr().out == printed["tsv"]
    assert main.run([*arguments, "--format", "csv", "--json"]) == 2
    assert "give one of them" in capsys.readouterr().err
