"""Random command lines from every option of every command: whatever is wrong is told in one line."""

from __future__ import annotations

import inspect
import os
import re
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from searching import searching

sys.path.append(str(Path(__file__).parent.parent / "faults"))  # for the process that starts commands in milliseconds

import fault_shim
from fault_commands import Places
from warm import Ended, Warm

from wmcli.cli.main import app
from wmcli.cli.setting_keys import setting_keys
from wmcli.errors import WmError

EXAMPLES = int(os.environ.get("WM_TEST_EXAMPLES", "15"))
"""Of each command."""
SECONDS = 15.0
MEMORY = 6 << 30
"""Bytes that a command may allocate. A larger request fails as on a machine without that memory."""
LONG = ("run", "collect", "imagine", "train-tokenizer", "train-dynamics", "eval", "play", "profile", "watch", "sweep")
"""Commands that may go on beyond SECONDS: nothing was wrong, or little."""
CODES = {0, 75, *(each.exit_code for each in WmError.__subclasses__())}

GOOD = ["run", "nothing", "experience@1", "tokenizer", "controller@1", "dynamics@1", "run/dynamics/v0001", "quickstart"]
ODD = [
    *("", " ", "-", ".", "..", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/dev/null/x", "x" * 300),
    *("0", "-1", "7", "9223372036854775808", "1e400", "nan", "1_000", "0x10", "true", "null", "[]", "{}", "[1, [2"),
    *("experience@0", "experience@99999999999999999999", "@1", "controller@best", "no@1", "run/run.toml", "text"),
    *("é", "\udcff", "a\nb", "%s", "*", "a,b", "a=b", "a:b", "file://", "file:///dev/null", "no://x", "http://"),
    *("http://127.0.0.1:9/x", ".x:Id", "os:system", "bin", "ALE/Pong-v5", "auto", "cuda:9", "meta", "json", "slurm"),
    "out.gif",
]
VALUE = st.sampled_from(GOOD + ODD) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
SETTING = st.tuples(
    st.sampled_from(sorted(setting_keys())),
    st.sampled_from(["0", "-1", "1", "3", "1e12", "1000000000000", "1e400", "nan", "", "[]", "[0]", "[1e9]", "{}", "x"])
    | VALUE,
).map("=".join)


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command without subcommands, and the words that call it."""
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, each in command.commands.items():
        yield from leaves(each, (*words, name))


LEAVES = {" ".join(words): command for words, command in leaves(typer.main.get_command(app))}


def fitting(name: str, kind: Any) -> st.SearchStrategy[str]:
    """Return values that fit an option, by its name and type."""
    kinds = [each for each in (kind, *get_args(kind)) if each is not type(None)]
    if name == "settings":
        return SETTING
    if int in kinds or float in kinds:
        return st.sampled_from(["1", "2", "3", "8"])
    choices = [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
    return st.sampled_from(choices or GOOD)


@st.composite
def options(draw: st.DrawFn, command: Any) -> list[str]:
    """Draw some of the options and arguments of a command. Most have a value that fits the option."""
    types = get_type_hints(inspect.unwrap(command.callback))
    line = []
    for each in (parameter for parameter in command.params if parameter.name != "help"):
        is_argument = each.param_type_name == "argument"
        if not draw(st.integers(0, 9)) < (8 if is_argument else 2):
            continue
        value = draw(fitting(each.name, types.get(each.name)) | VALUE)
        if is_argument:
            line.append(value)
        else:
            line += [each.opts[0]] + ([] if each.is_flag else [value])
    return line


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    if reason := fault_shim.missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp())
    warm = Warm(folder)
    resource.prlimit(warm.process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
    yield warm
    warm.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def place(warm: Warm) -> Iterator[Path]:
    """A folder with a run, a text and a binary file."""
    folder = Path(tempfile.mkdtemp())
    made = Places(warm, folder).made("eval")
    (made / "text").write_text("[a]\nb = 1\n")
    (made / "bin").write_bytes(bytes(range(256)) * 40)
    (made / "nothing").mkdir()
    yield made
    shutil.rmtree(folder)


def wrong(name: str, ended: Ended) -> str | None:
    """Return what is wrong with the end of a command line."""
    if ended.code is None:
        return None if name.split()[0] in LONG else f"still running after {SECONDS} seconds"
    if name == "doctor" and ended.code == 1 and "problems: 0" not in ended.said:
        return None
    if ended.code not in CODES:
        return f"exit code {ended.code}"
    if "Traceback" in ended.said or "Traceback" in ended.out:
        return "a traceback"
    if ended.code in (0, 75):
        return None
    told = [each for each in ended.said.splitlines() if re.match(r"wm[ :]", each)]
    if len(told) != 1 or told[0] != ended.said.rstrip("\n").split("\n")[-1]:
        return "not one line at the end"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_whatever_is_on_a_command_line_is_answered_in_one_line(name: str, warm: Warm, place: Path) -> None:
    codes = Counter[int | None]()

    @searching(EXAMPLES)
    @given(options(LEAVES[name]))
    def holds(line: list[str]) -> None:
        folder = Path(tempfile.mkdtemp())
        shutil.copytree(place, folder, symlinks=True, dirs_exist_ok=True)
        ended = warm.run(*name.split(), *line, cwd=folder, seconds=SECONDS)
        shutil.rmtree(folder)
        codes[ended.code] += 1
        assert (fault := wrong(name, ended)) is None, f"{fault}: wm {name} {line}\n{ended.said[-2000:]}"

    try:
        holds()
    finally:
        print(name, dict(codes))
