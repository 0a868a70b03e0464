"""`wm diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.options import Format, Json, refuse_both_forms
from wmcli.cli.output import answer, emit_json


def diff(
    left: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a version such as runs/a/dynamics/v0003.")],
    right: Annotated[Path, typer.Argument(metavar="RUN", help="Another of the same sort.")],
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Show the differing settings of two runs or two artifacts.

    Artifacts are also compared by environment, machine and inputs. Without a
    difference nothing is printed.

    Examples:
        wm diff runs/a runs/b
        wm diff runs/a/dynamics/v0003 runs/a/dynamics/v0004
    """
    from wmcli.artifacts.overview import differences

    refuse_both_forms(as_json, form)
    rows = differences(left, right)
    if as_json:
        emit_json(rows)
    elif rows:
        answer(rows, ["part", "key", "left", "right"], form)
