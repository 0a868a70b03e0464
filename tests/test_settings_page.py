"""docs/settings.md, `wm settings` and the settings themselves say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wmcli.cli.main import run as wm
from wmcli.config import preset_names
from wmcli.settings import flatten, resolve
from wmcli.settings.describe import explained, markdown, settings_of_section

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def test_the_page_is_that_of_the_code() -> None:
    """If not: python -m wmcli.settings.describe > docs/settings.md."""
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_every_setting_is_described() -> None:
    rows = settings_of_section()
    assert len({(row.key, row.kind) for row in rows}) == len(rows)
    alone = {"alternatives.backbone"}
    assert not [row.key for row in rows if not row.description and row.key not in alone]
    assert not [row.key for row in rows if "typing." in row.type or "<" in row.type.replace("<=", "").replace("< ", "")]


def test_whole_numbers_have_units() -> None:
    """Except a seed, and a rank."""
    whole = [row for row in settings_of_section() if row.type.startswith("int")]
    assert len(whole) > 100
    assert {row.key for row in whole if not row.unit} == {"seed", "backbone.dt_rank"}
    assert not [row.key for row in whole if "[" in row.description]


@pytest.mark.parametrize("preset", preset_names())
def test_every_key_of_a_preset_is_explained(preset: str) -> None:
    settings = resolve(preset)
    keys = {key for key in flatten(settings) if not key.startswith("alternatives.")}
    assert keys <= explained(settings).keys()


def test_the_command_answers(capfd: pytest.CaptureFixture[str]) -> None:
    assert wm(["settings", "backbone", "--kind", "mamba2", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert {row["key"] for row in rows} >= {"backbone.head_width", "backbone.width"}
    assert all(row["kind"] == "mamba2" for row in rows)
    width = next(row for row in rows if row["key"] == "backbone.head_width")
    assert (width["type"], width["default"]) == ("int >= 1", 64)
    assert wm(["settings", "controller.discount", "--format", "csv"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 3, "a heading and two kinds"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["backbon"], "no setting or section 'backbon'; did you mean 'backbone'?"),
        (["backbone", "--kind", "mamba3"], "no setting backbone of kind mamba3"),
    ],
)
def test_missing_items_are_one_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert wm(["settings", *arguments]) == 2
    assert message in capfd.readouterr().err
