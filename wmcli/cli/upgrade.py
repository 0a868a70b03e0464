"""`wm upgrade`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.options import Format, Json, refuse_both_forms
from wmcli.cli.output import answer, emit_json


def upgrade(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be written.")] = False,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Bring a run of an earlier wm to the present schema.

    Runs of earlier versions work without it. It rewrites run.toml with the same
    settings under today's names. Artifacts never change, since their digests
    are referred to; they are read as they are. Afterwards an earlier wm does
    not read the run.

    Examples:
        wm upgrade runs/catch --dry-run
    """
    refuse_both_forms(as_json, form)
    from wmcli.artifacts import Run
    from wmcli.artifacts.upgrade import is_outdated, plan_upgrade, upgrade_run

    opened = Run.open(run, create=False)
    parts = plan_upgrade(opened) if dry_run else upgrade_run(opened)
    rows = [part._asdict() for part in parts]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["part", "number", "schema", "newest", "action", "reason"], form)
    done = f"{'would upgrade' if dry_run else 'upgraded'} {run}" if is_outdated(parts) else f"{run} is up to date"
    typer.echo(done, err=True)
