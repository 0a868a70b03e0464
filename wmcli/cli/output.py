"""The only printer of the command line: answers on stdout, tables for people beside a published path on stderr.

An answer is a Rich table on a terminal, tab-separated lines without a heading in a pipe, and one JSON document with
`--json`. Rich is imported only when a table is really drawn.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact

Row = Mapping[str, Any]


def line(text: str) -> None:
    """One line on stdout."""
    typer.echo(text)


def emit_json(value: Any) -> None:
    """One JSON document on stdout, indented for a person. NaN and infinity, which JSON lacks, become null."""
    typer.echo(json.dumps(_finite(value), indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def published(artifact: Artifact, as_json: bool) -> None:
    """What a stage prints: the path of what it published and nothing else, or who that is as JSON."""
    if as_json:
        emit_json(identity(artifact) | {"metrics": artifact.metrics})
    else:
        line(str(artifact.path))


def identity(artifact: Artifact) -> dict[str, Any]:
    return {
        "kind": artifact.kind,
        "version": artifact.version,
        "name": artifact.name,
        "path": str(artifact.path),
        "digest": artifact.digest,
    }


def answer(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """The rows on stdout: a table for a person, one line a row with tabs between the columns for a pipe.

    A row that lacks a column, or has None there, shows "-".
    """
    if sys.stdout.isatty():
        draw_table(rows, columns, sys.stdout)
        return
    for row in rows:
        line("\t".join(_plain(row.get(column)) for column in columns))


def draw_table(rows: Sequence[Row], columns: Sequence[str], stream: TextIO, title: str | None = None) -> None:
    """A Rich table, numbers to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        drawn.add_column(column.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(_short(row.get(column))) for column in columns))
    Console(file=stream).print(drawn)


def draw_beside(rows: Sequence[Row], columns: Sequence[str], title: str) -> None:
    """A table for a person who watches, on stderr beside the published path; nothing where stderr is a log."""
    if sys.stderr.isatty():
        draw_table(rows, columns, sys.stderr, title)


def _short(value: Any) -> str:
    """A value for a person: floats to four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return _plain(value)


def _plain(value: Any) -> str:
    """A value in one cell of a line: exact, without tabs or line breaks."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return " ".join(f"{key}={_plain(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return " ".join(str(value).split())


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
