"""`wm clean`: remove checkpoints, weights and remains that are no longer needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.options import Format, Json, refuse_both_forms
from wmcli.cli.output import answer, emit_json
from wmcli.errors import UsageError
from wmcli.progress import size


def clean(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Remove stopped work, unused weights of old models, and what crashes left.

    Lists them and asks first. Kept are all experience, evaluations and
    manifests, the newest version of each kind, the best evaluated controller,
    their inputs, and the inputs of other runs. While a process works on the
    run, all weights stay.

    Examples:
        wm clean runs/catch
        wm clean runs/catch --dry-run
    """
    refuse_both_forms(as_json, form)
    if yes and dry_run:
        raise UsageError("--yes removes and --dry-run does not: give one of them.")
    from wmcli.artifacts import Run, find_removable
    from wmcli.artifacts.store import USED_BY

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
    for user in opened.missing_users():
        typer.echo(
            f"weights stay for {user}, which is not there; if it is gone for good, remove its lines from"
            f" {run / USED_BY}",
            err=True,
        )
    if not removable:
        typer.echo(f"nothing to remove in {run}", err=True)
        return
    total = size(sum(each.size for each in removable))
    if dry_run:
        typer.echo(f"would free {total}", err=True)
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nothing was removed: the input is no terminal to confirm on; add --yes.")
        if not typer.confirm(f"Remove {total}?", err=True):
            return
    for each in removable:
        each.remove()
