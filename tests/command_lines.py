"""Find `wm` command lines, options and settings keys in text, and check them against the program.

`PROGRAM` is the command line itself; `KEYS` holds every dotted settings key, of all kinds of all sections.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from wmcli.cli import main
from wmcli.settings import Settings, resolve
from wmcli.stages.opening import DEFAULT_PRESET

PROGRAM: Any = typer.main.get_command(main.app)


def commands(group: Any = PROGRAM, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it: `("presets", "show")`."""
    for name, command in group.commands.items():
        yield (*above, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))


COMMANDS = dict(commands())


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for each in get_args(annotation) for section in _sections(each)]


def _keys(section: type[BaseModel], above: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield above + name
        for below in _sections(field.annotation):
            yield from _keys(below, f"{above}{name}.")


KEYS = set(_keys(Settings, ""))
_SECTIONS = sorted({key.partition(".")[0] for key in KEYS if "." in key})
_FILES = "toml|safetensors|json|jsonl|png|gif|webp|py|mk|md|zarr"

# A section's name, then the rest of a key; not a part of a longer name or a path, a file's name, or a key that is
# completed at run time.
_KEY = re.compile(
    rf"(?<![\w./@-])(?:{'|'.join(_SECTIONS)})(?:\.(?!(?:{_FILES})\b)[a-z]\w*(?<!_))+(?![\w({{/*])", re.ASCII
)  # fmt: skip
# Capitals, and `key`, stand for a key that the reader chooses.
_SET = re.compile(r"--set[ =]+(?!(?:section\.)?key=)([a-z_0-9.{}]+)=", re.ASCII)
FOREIGN = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"}  # of torchrun
FOREIGN |= {"--me", "--noheader", "--array", "--oneliner"}  # of SLURM
_OPTION = re.compile(r"(?<![\w-])(?<!var\()--[a-z][a-z-]*")  # not the name of a color
# Words before `wm` that tell a command line from prose, as in "this wm reads".
_COMMAND = re.compile(r"(?:^|[`(;]|: |&& |with |see |run )wm ([a-z][a-z-]*)((?: [a-z]+\b)?)([^`;)\n]*)", re.MULTILINE)


def wrong_mentions(text: str) -> list[str]:
    """The settings keys, commands and options named in `text` that do not exist; `{}` stands for a part unknown."""
    free = ("alternatives.", "environment.kwargs.")
    wrong = [f"key {key}" for key in _KEY.findall(text) if key not in KEYS and not key.startswith(free)]
    wrong += [
        f"key {key}" for key in _SET.findall(text) if "{" not in key and key not in KEYS and not key.startswith(free)
    ]
    rest = text
    for found in _COMMAND.finditer(text):
        name, second, line = found.groups()
        command = COMMANDS.get((name, second.strip()), COMMANDS.get((name,)))
        if command is None:
            wrong.append(f"command wm {name}")
            continue
        line = re.split(r", | or |[.:](?: |$)| && ", line)[0]
        wrong += [f"wm {name} {option}" for option in _OPTION.findall(line) if option not in _options(command)]
        rest = rest.replace(line, "", 1) if line else rest
    every = {option for command in COMMANDS.values() for option in _options(command)} | _options(PROGRAM) | FOREIGN
    return wrong + [f"option {option}" for option in _OPTION.findall(rest) if option not in every]


def _options(command: Any) -> set[str]:
    if default := getattr(command, "default", None):
        command = command.commands[default]
    every = (option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
    return {option for option in every if option.startswith("--")} | {"--help"}


def words(line: str) -> list[str]:
    """A command line as its arguments, without the `wm` in front and without a comment behind."""
    return shlex.split(line, comments=True)[1:]


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters that a command would be called with. Raises what the command line raises on wrong usage."""
    command, rest = PROGRAM, list(arguments)
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    if default := getattr(command, "default", None):
        command = command.commands[default]
    return dict(command.make_context("wm", rest).params)


class _Reached(Exception):
    """Raised in the place of a stage."""


def settings(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Settings | None:
    """The settings that a command line comes to in a new run, None for a command that takes none.

    Raises UsageError where they do not resolve, and what the command line raises on wrong usage.
    """
    given = parse(arguments)
    if "settings" not in given or given.get("runs"):
        return None
    if arguments[0] == "presets":
        return resolve(given["name"], given["settings"] or [])
    found = SimpleNamespace()

    def open_context(_run: Any, preset: str | None, overrides: Sequence[str] = (), **_: bool) -> None:
        found.settings = resolve(preset or DEFAULT_PRESET, overrides)
        raise _Reached

    # By its name in sys.modules, as the commands import it: other tests may have left the package another module.
    monkeypatch.setattr(importlib.import_module("wmcli.stages.opening"), "open_context", open_context)
    if given.get("suite"):  # of no run

        def profile_suite(_file: Any, *, presets: Sequence[str] | None, overrides: Sequence[str], **_: Any) -> None:
            open_context(None, presets and presets[0], overrides)

        monkeypatch.setattr(importlib.import_module("wmcli.stages.profile_suite"), "profile_suite", profile_suite)
    with pytest.raises(_Reached):
        PROGRAM.main(args=list(arguments), prog_name="wm", standalone_mode=False)
    return found.settings
