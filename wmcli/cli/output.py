"""All printing on stdout, and tables on stderr beside the path of a published artifact.

A result is a Rich table on a terminal and tab-separated lines with a heading in a pipe. `--format` chooses another
form. `--json` prints one JSON document:

- a command that publishes prints an artifact (see schema.py);
- a command that lists prints an array of flat objects, one for each row;
- a command that summarizes prints one object.

Rich is imported with the first table.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

import typer

from wmcli import ranks
from wmcli.cli.schema import describe
from wmcli.errors import MachineError

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact

Row = Mapping[str, Any]
Rows = Sequence[Row | None]
"""None is a rule between its neighbors."""
Form = Literal["table", "tsv", "csv", "markdown", "latex"]
EXACT = ("tsv", "csv")
"""Forms for programs: all digits, errors in columns of their own."""
FEWEST = 2  # columns that a narrow terminal always shows
TEXT_WIDTH = 24  # characters; longer texts are broken between words, into columns of at least this width
_ENDLESS = 100_000  # characters


def line(text: str) -> None:
    """Print one line on stdout."""
    _print(text)


def emit_json(value: Any) -> None:
    """Print one JSON document, indented on a terminal. NaN and infinity, which JSON lacks, become null."""
    _print(_json(value))


def published(artifact: Artifact, as_json: bool) -> None:
    """Print the path of a published artifact, or its record as JSON.

    Raises:
        MachineError: It cannot be printed. The work is done all the same, and another command would do it twice.
    """
    about = f"{artifact.name} was published, so do not run the command again: {artifact.path}"
    _print(_json(describe(artifact)) if as_json else str(artifact.path), about)


def _json(value: Any) -> str:
    return json.dumps(_finite(value), indent=2 if sys.stdout.isatty() else None, allow_nan=False)


def _print(text: str, done: str = "free some space, or send it elsewhere") -> None:
    """Print a text on stdout. Raises MachineError if that is full, with what to do then."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise MachineError(f"standard output: {error.strerror}; {done}") from None


def silence_stdout() -> None:
    """Discard stdout's buffer, so that Python does not fail on it again at exit."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())


def chosen(form: Form | None) -> Form:
    """Return the form of a result. None is a table on a terminal and TSV in a pipe."""
    return form or ("table" if sys.stdout.isatty() else "tsv")


def answer(rows: Rows, columns: Sequence[str], form: Form | None = None) -> None:
    """Print the rows on stdout.

    Args:
        rows: Values by column. A missing value or None is "-", in CSV an empty cell.
        columns: Columns to print, the most important first. A narrow terminal omits the last ones.
        form: Value of `--format`.
    """
    from wmcli.report.tables import FORMS

    if chosen(form) == "table":
        draw_table(rows, columns, sys.stdout)
    else:
        line(FORMS[chosen(form)](rows, columns))


def remark(lines: Sequence[str], form: Form | None = None) -> None:
    """Print remarks under a table, one line each, in forms for people. A terminal breaks long ones between words."""
    if chosen(form) == "table" and lines:
        from rich.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=_ENDLESS)
        for text in lines:
            console.print(text, markup=False, highlight=False)
    elif chosen(form) == "latex":
        for text in lines:
            line(f"% {text}")
    elif chosen(form) == "markdown" and lines:
        line("")  # a line right under a table would be a row of it
        for text in lines:
            line(f"- {text}")


def draw_table(rows: Rows, columns: Sequence[str], stream: TextIO, title: str | None = None) -> None:
    """Draw a Rich table with numbers aligned right and long texts broken.

    A terminal that is too narrow omits the last columns, and a line names them. Elsewhere the width has no limit.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(file=stream) if stream.isatty() else Console(file=stream, width=_ENDLESS)
    unbounded = console.options.update_width(_ENDLESS)
    shown = list(columns)
    while len(shown) > FEWEST and Measurement.get(console, unbounded, _table(rows, shown)).minimum > console.width:
        shown.pop()
    if title:
        console.print(title, markup=False, highlight=False)
    console.print(_table(rows, shown))
    if left_out := columns[len(shown) :]:
        console.print(f"A wider terminal shows: {', '.join(left_out)}", style="dim", markup=False, highlight=False)


def _table(rows: Rows, columns: Sequence[str]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from wmcli.report.tables import heading, numeric, short

    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        cells = [short(row.get(column)) for row in rows if row is not None]
        right, widest = numeric(rows, column), max(map(len, cells), default=0)
        whole = right or widest <= TEXT_WIDTH or not any(" " in cell for cell in cells)
        table.add_column(
            heading(column),
            justify="right" if right else "left",
            no_wrap=whole,
            overflow="fold",
            min_width=widest if whole else TEXT_WIDTH,
        )
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(Text(short(row.get(column))) for column in columns))
    return table


def draw_beside(rows: Rows, columns: Sequence[str], title: str) -> None:
    """Draw a table on stderr if that is a terminal, of several ranks on the first one."""
    if sys.stderr.isatty() and ranks.is_first():
        draw_table(rows, columns, sys.stderr, title)


def filled(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the columns that are not empty."""
    return [column for column in columns if any(row.get(column) is not None for row in rows)]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
