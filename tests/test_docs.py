"""Every command line in README.md and docs/ is one that wm understands, and every settings key in them exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from command_lines import COMMANDS, parse, settings, words, wrong_mentions

from wmcli.errors import UsageError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [
    *PAGES,
    *sorted((ROOT / "docs").glob("*.mk")),
    ROOT / "docs" / "Makefile",
    *sorted((ROOT / "presets").rglob("*.toml")),
]


def command_lines(page: str) -> list[str]:
    """The command lines in a page's fenced blocks and between its backticks."""
    pieces = re.split(r"^ *```.*$", page, flags=re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", "\n".join(pieces[::2]))]
    lines = [re.split(r"[;$] ", line)[-1] for block in pieces[1::2] for line in block.splitlines()]
    commands = [part.strip() for line in (*spans, *lines) for part in line.split("&&")]
    return [command for command in commands if command == "wm" or command.startswith("wm ")]


LINES = sorted({line for page in PAGES for line in command_lines(page.read_text())})


@pytest.mark.parametrize("line", LINES)
def test_command_lines_work(line, monkeypatch):
    """With a number for N. Settings of a preset resolve. A lone command or `--set` is only named."""
    arguments = words(re.sub(r"\bN\b", "3", line))
    if len(arguments) == 1 or arguments[1:] == ["--set"]:
        assert arguments[0] == "--help" or (arguments[0],) in COMMANDS
        return
    given = parse(arguments)
    preset = given.get("preset") or given.get("name")
    # NAME and PRESET are for the reader to choose.
    if preset not in (None, "NAME", "PRESET") and not any(re.search(r"\bNAME$", each) for each in arguments):
        settings(arguments, monkeypatch)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_names_in_a_text_exist(path):
    without_python = re.sub(r"```python.*?```", "", path.read_text(), flags=re.DOTALL)  # a test runs those
    assert not wrong_mentions(without_python)


def test_a_wrong_command_line_is_found(monkeypatch):
    page = "Try `wm run quickstart\n--set controller.lr=1` or\n```sh\n$ wm collect --fresh  # again\n```\n"
    first, second = command_lines(page)
    with pytest.raises(UsageError, match="controller.lr"):
        settings(words(first), monkeypatch)
    assert words(second) == ["collect", "--fresh"]


def test_tables_of_atari_scores_are_those_of_the_file() -> None:
    """As `python docs/atari_scores.py` writes them."""
    spec = importlib.util.spec_from_file_location("atari_scores", ROOT / "docs" / "atari_scores.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scores, page = module.read(module.SCORES), module.PAGE.read_text()
    for lines in (module.table(scores), module.table_of_others(scores)):
        assert "\n".join(lines) + "\n\n" in page
    assert module.read(module.CURVES), "the picture's points"
