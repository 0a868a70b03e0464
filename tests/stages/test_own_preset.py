"""A preset of the user's own, named by the path of its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_run import TINY

from wmcli.artifacts import Run
from wmcli.cli.main import run as wm
from wmcli.config import preset_header, preset_values
from wmcli.errors import UsageError
from wmcli.settings import resolve
from wmcli.stages.collect import collect
from wmcli.stages.opening import open_context

MINE = """
about = "Mine"
base = "quickstart"

[dynamics]
batch = 7

[alternatives.backbone.mamba2]
head_width = 16
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(MINE, encoding="utf-8")
    return str(path)


def test_it_states_differences_from_its_base(mine: str) -> None:
    settings = resolve(mine)
    assert settings.dynamics.batch == 7 and settings.tokenizer == resolve("quickstart").tokenizer
    assert preset_header(mine)["about"] == "Mine" and preset_header(mine)["system"] == "REM"
    other = resolve(mine, ["backbone.kind=mamba2"]).backbone
    assert (other.head_width, other.width) == (16, settings.backbone.width)


def test_a_base_is_relative_to_the_file_that_names_it(mine: str, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "more.toml"
    path.write_text('base = "../mine.toml"\n[dynamics]\nclip = 3.0\n', encoding="utf-8")
    settings = resolve(str(path))
    assert (settings.dynamics.batch, settings.dynamics.clip) == (7, 3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "mine.toml"', "base leads in a circle"),
        ('base = "none.toml"', "none.toml: No such file"),
        ('base = "remm"', "no preset called 'remm'; did you mean 'rem'?"),
        ("[dynamics]\nhorizon = 3", "dynamics.horizon is called dynamics.sequence_length since wm 0.2.0"),
        ("[backbone.s4]\nstate = 3", "backbone.s4.state is called backbone.state_size since wm 0.2.0"),
        ("[dynamics]\nbach = 3", "unknown key 'dynamics.bach'; did you mean 'batch'?"),
        (
            "[alternatives.backbone.mamba3]\nx = 1",
            "alternatives.backbone.mamba3: backbone.kind = 'mamba3': there is none",
        ),
        ("[alternatives.backbone.s4]\nheads = 1", "alternatives.backbone.s4: unknown key 'backbone.heads'"),
        ("[dynamics", "not valid TOML"),
    ],
)
def test_its_errors_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        resolve(str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="mine.toml"):
        preset_values(str(path))


def test_a_run_is_bound_to_it(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    collect(open_context(folder, "./mine.toml", TINY, create=True, quiet=True))
    assert Run.open(folder, create=False).bound()["preset"] == "./mine.toml"
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    again = open_context(folder, "../mine.toml", create=True, quiet=True)  # the same file by another path
    assert again.settings.dynamics.batch == 4, "TINY's"
    assert open_context(folder, None, create=False, quiet=True).settings == again.settings, "the file is not needed"
    with pytest.raises(UsageError, match="is bound to preset ./mine.toml, not rem"):
        open_context(folder, "rem", create=True, quiet=True)


def test_a_file_that_has_changed_is_not_passed_over(mine: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    collect(open_context(folder, mine, TINY, create=True, quiet=True))
    Path(mine).write_text(MINE.replace("batch = 7", "batch = 8"), encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"mine.toml has changed since run .* was bound to it; change settings .* --set"
    ):
        open_context(folder, mine, create=True, quiet=True)


def test_commands_take_it(mine: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert wm(["presets", "show", mine, "--changed", "--explain", "--format", "tsv"]) == 0
    out = capfd.readouterr().out
    assert "dynamics.batch\t7\t16" in out and "description" in out
    assert wm(["presets", "show", "nowhere.toml"]) == 2
