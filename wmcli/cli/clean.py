"""`wm clean`: remove checkpoints and weights that are no longer needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.options import Format, Json, refuse_both_forms
from wmcli.cli.output import answer, emit_json
from wmcli.errors import UsageError


def clean(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Remove stopped work and unused weights of old models.

    Lists them and asks first. Kept are all experience, evaluations and
    manifests, the newest version of each kind, the best evaluated controller,
    their inputs, and the inputs of other runs.

    Examples:
        wm clean runs/catch
    """
    refuse_both_forms(as_json, form)
    from wmcli.artifacts import Run, find_removable

    opened = Run.open(run, create=False)
    removable = find_removable(opened)
    rows = [
        {"name": each.name, "bytes": each.size, "last_written": each.written, "what": each.description}
        for each in removable
    ]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["name", "bytes", "last_written", "what"], form)
    if not removable:
        typer.echo(f"nothing to remove in {run}", err=True)
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nothing was removed: the input is no terminal to confirm on; add --yes.")
        if not typer.confirm(f"Remove {sum(each.size for each in removable) / 1e6:,.1f} MB?", err=True):
            return
    for each in removable:
        each.remove()
