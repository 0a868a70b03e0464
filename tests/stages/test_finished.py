"""`wm run` on a finished run: it answers at once, and only while there is nothing to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import TINY, command, copied, latest, settings

from wmcli.artifacts import Run, finished
from wmcli.artifacts.finished import NOTE, find_finished, note_finished
from wmcli.artifacts.manifest import MANIFEST
from wmcli.cli import main

PLAN = ["run.epochs=2", "run.collect_epochs=2", *(f"run.{each}_after=0" for each in ("tokenizer", "dynamics"))]
PLAN += ["run.controller_after=0", "run.evaluate_every=0", "evaluation.episodes=1", "collect.steps=12"]
UPDATES = [f"{each}.updates=1" for each in ("tokenizer", "dynamics", "controller")]
OWN = settings(*TINY, *PLAN, *UPDATES)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that `wm run` finished. Only to be read."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main.run(["run", "quickstart", "--run", str(folder), *OWN, "--quiet"]) == 0
    return folder


@pytest.fixture
def run(first: Path, tmp_path: Path) -> Path:
    """A finished run to change at will, with a note that counts here."""
    folder = copied(first, tmp_path / "run")
    note_finished(Run(folder), [], latest(folder, "evaluation"))
    assert find(folder) == latest(folder, "evaluation").digest
    return folder


def find(run: Path) -> str | None:
    made = find_finished(Run(run), None, [])
    return None if made is None else made.digest


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs that the loop looked through."""
    seen: list[Path] = []
    from wmcli.stages import loop

    walk = loop._walk
    monkeypatch.setattr(loop, "_walk", lambda context, *rest: seen.append(context.run.path) or walk(context, *rest))
    return seen


@pytest.mark.parametrize("line", [[], ["quickstart"], ["--preset", "quickstart"], ["--quiet"]])
def test_a_finished_run_answers_without_looking_at_its_jobs(
    line: list[str], run: Path, walks: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main.run(["run", "--run", str(run), *line]) == 0
    out, err = capfd.readouterr()
    assert out == f"{latest(run, 'evaluation').path}\n"
    assert ("has finished, and nothing has changed since" in err) != ("--quiet" in line)
    assert not walks


def test_json_is_that_of_the_evaluation(run: Path, walks: list[Path], capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main.run(["run", "--run", str(run), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["digest"] == latest(run, "evaluation").digest
    assert not walks


def test_the_command_that_began_it_is_the_same_command(tmp_path: Path, walks: list[Path]) -> None:
    line = ["run", "quickstart", "--run", str(tmp_path / "run"), *OWN, "--quiet"]
    assert main.run(line) == 0 and len(walks) == 1
    assert main.run(line) == 0 and len(walks) == 1


def test_it_imports_no_torch(run: Path) -> None:
    check = "import sys; from wmcli.cli import main; sys.exit(main.run(sys.argv[1:]) or 'torch' in sys.modules)"
    line = [sys.executable, "-c", check, "run", "--run", str(run)]
    assert subprocess.run(line, env=os.environ | {"WM_TRUST": "1"}, capture_output=True).returncode == 0


def touched(run: Path) -> None:
    os.utime(run / "tokenizer" / "v0001" / MANIFEST)


def without_a_version(run: Path) -> None:
    Run(run).prune("tokenizer", {2})
    for each in (run / "tokenizer" / "v0002").iterdir():
        each.unlink()
    (run / "tokenizer" / "v0002").rmdir()


def pruned(run: Path) -> None:
    assert Run(run).prune("controller", {1}) == [1]


def with_other_settings(run: Path) -> None:
    path = run / "run.toml"
    path.write_text(path.read_text().replace("keep = ", "# kept\nkeep = "))


def with_a_version_more(run: Path) -> None:
    assert main.run(["eval", "--run", str(run), "--force", "--quiet"]) == 0


def with_stopped_work(run: Path) -> None:
    (run / "controller" / ".work-0123456789ab" / "payload").mkdir(parents=True)


def without_latest(run: Path) -> None:
    (run / "dynamics" / "latest").unlink()


def moved(run: Path) -> None:
    copied(run, run.with_name("copy"))
    run.rename(run.with_name("old"))
    run.with_name("copy").rename(run)


def without_note(run: Path) -> None:
    (run / NOTE).unlink()


CHANGES = [touched, without_a_version, pruned, with_other_settings, with_a_version_more, with_stopped_work]
CHANGES += [without_latest, moved, without_note]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_note_counts_until_anything_in_the_run_changes(change: Callable[[Path], None], run: Path) -> None:
    change(run)
    assert find(run) is None


@pytest.mark.parametrize("change", [without_a_version, without_latest, with_stopped_work])
def test_then_the_loop_looks_again(change: Callable[[Path], None], run: Path, walks: list[Path]) -> None:
    change(run)
    line = ["run", "--run", str(run), "--quiet"]
    assert main.run(line) == 0 and walks == [run]
    assert Run(run).versions("tokenizer") == [1, 2]
    assert (run / "dynamics" / "latest").resolve() == latest(run, "dynamics").path.resolve()
    assert main.run(line) == 0
    assert len(walks) == (2 if change is with_stopped_work else 1)


@pytest.mark.parametrize(
    "line", [["--set", "run.keep=7"], ["--set", "run.keep=7", "--from-epoch", "2"], ["--force"], ["--fresh"]]
)
def test_a_command_that_asks_for_something_else_is_no_repetition(line: list[str], run: Path, walks: list[Path]) -> None:
    refused = "--from-epoch" in line  # `run` cannot change between epochs
    assert main.run(["run", "--run", str(run), "--quiet", *line]) == (2 if refused else 0)
    assert bool(walks) != refused
    assert refused or Run(run).bound()["settings"]["run"]["keep"] == (7 if "run.keep=7" in line else 2)


def test_another_preset_is_refused_as_before(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["run", "rem", "--run", str(run)]) == 2
    assert "is bound to preset quickstart, not rem" in capfd.readouterr().err


def test_an_older_set_of_changes_counts_for_nothing(run: Path, walks: list[Path]) -> None:
    """A then B then A: the last one changes the settings back."""
    for keep in (7, 9, 7):
        assert main.run(["run", "--run", str(run), "--quiet", "--set", f"run.keep={keep}"]) == 0
    assert len(walks) == 3
    assert Run(run).bound()["settings"]["run"]["keep"] == 7


@pytest.mark.parametrize("name", ["__version__", "SCHEMA", "REVISIONS"])
def test_a_note_of_another_version_of_wm_does_not_count(name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, name, "another")
    assert find(run) is None


def test_a_note_that_is_none_is_replaced(run: Path, walks: list[Path]) -> None:
    right = (run / NOTE).read_bytes()
    (run / NOTE).write_bytes(right[:-7])
    assert main.run(["run", "--run", str(run), "--quiet"]) == 0
    assert walks == [run]
    assert (run / NOTE).read_bytes() == right


NOTES = [b"", b"{", b"[]", b"null", b"7", b"[" * 100_000, b'{"asked": 3}', b"\xff\xfe", b"{" + b" " * (1 << 20) + b"}"]


@pytest.mark.parametrize("note", NOTES, ids=range(len(NOTES)))
def test_a_note_may_hold_anything(note: bytes, run: Path) -> None:
    (run / NOTE).write_bytes(note)
    assert find(run) is None


@pytest.mark.parametrize(
    "part",
    [
        {"kind": "../.."},
        {"kind": 3},
        {"kind": ["evaluation"]},
        {"version": 10**30},
        {"version": "1"},
        {"version": {"a": 1}},
        {"state": None},
        {"state": []},
    ],
    ids=str,
)
def test_a_note_leads_to_a_version_of_its_run_or_nowhere(part: dict[str, object], run: Path) -> None:
    note = json.loads((run / NOTE).read_bytes())
    (run / NOTE).write_text(json.dumps(note | part))
    assert find(run) is None


def test_a_note_is_never_read_or_written_through_a_link(run: Path, tmp_path: Path, walks: list[Path]) -> None:
    outside = tmp_path / "outside"
    (run / NOTE).rename(outside)
    before = outside.read_bytes()
    (run / NOTE).symlink_to(outside)
    assert main.run(["run", "--run", str(run), "--quiet"]) == 0
    assert walks == [run]
    assert outside.read_bytes() == before and not (run / NOTE).is_symlink()


def test_a_pipe_in_its_place_stops_nothing(run: Path) -> None:
    (run / NOTE).unlink()
    os.mkfifo(run / NOTE)
    assert find(run) is None
    note_finished(Run(run), [], latest(run, "evaluation"))
    assert find(run) is not None


def test_a_run_that_takes_no_note_finishes_all_the_same(
    run: Path, walks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (run / NOTE).unlink()
    monkeypatch.setattr(finished, "write_durable", full)
    assert main.run(["run", "--run", str(run), "--quiet"]) == 0
    assert not (run / NOTE).exists()


def test_a_command_that_is_killed_leaves_no_note(tmp_path: Path) -> None:
    killed = command(tmp_path / "run", "run", "quickstart", *OWN, failpoint="publish-done")
    killed.communicate()
    assert killed.returncode
    assert not (tmp_path / "run" / NOTE).exists()
