"""Every example in a command's help is one that works: it parses, and its settings resolve."""

from __future__ import annotations

import re

import pytest
from command_lines import COMMANDS, PROGRAM, settings, words

from wmcli.settings import resolve
from wmcli.stages.opening import DEFAULT_PRESET


def examples(text: str) -> list[str]:
    """The command lines behind "Example:" or "Examples:", which stand on lines of their own or behind a semicolon."""
    _, _, shown = text.partition("Example")
    return re.findall(r"(?:^|[:;`\n])\s*(wm(?: [^;`\n]+)?)", shown)


EXAMPLES = {f"wm {' '.join(name)}": examples(command.help or "") for name, command in COMMANDS.items()}


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_shows_itself(command):
    assert any(f"{line} ".startswith(f"{command} ") for line in EXAMPLES[command])


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_work(line, monkeypatch):
    """In a run of the default preset, where they name none."""
    settings(words(line), monkeypatch)


def test_the_setting_that_set_shows_can_be_set():
    shown = {
        example
        for command in COMMANDS.values()
        for parameter in command.params
        if "--set" in parameter.opts
        for example in re.findall(r"e\.g\. (\S+=\S+?)[.,:;]? ", parameter.help)
    }
    assert shown
    for example in shown:
        assert resolve(DEFAULT_PRESET, [example]) != resolve(DEFAULT_PRESET)


def test_the_first_line_that_a_newcomer_is_shown_works(monkeypatch):
    _, _, line = PROGRAM.epilog.partition(": ")
    assert settings(words(line), monkeypatch)
