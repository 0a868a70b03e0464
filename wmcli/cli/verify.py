"""`wm verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from wmcli.cli.lineage import find
from wmcli.cli.options import DEFAULT_RUN, Format, Json, RunFolder, complete_reference, refuse_both_forms
from wmcli.cli.output import answer, emit_json
from wmcli.errors import ArtifactError, MachineError


def verify(
    reference: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="Only this artifact.", autocompletion=complete_reference),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Check every file of the run's artifacts against its recorded sha256.

    States: ok; pruned (only manifest and pictures remain); damaged (files differ from
    the manifest); damaged pictures (still usable); unusable (an input is
    damaged); unreadable (the disk or the permissions fail).

    Examples:
        wm verify dynamics@3 --run runs/catch
    """
    refuse_both_forms(as_json, form)
    from wmcli.artifacts import Run, check, examine

    if reference is None:
        states = check(Run.open(run, create=False))
    else:
        artifact = find(run, reference)
        states = [(artifact.name, *examine(artifact))]
    rows = [{"name": name, "state": state, "detail": detail} for name, state, detail in states]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["name", "state", "detail"], form)
    bad = [f"{row['name']} {row['state']}" for row in rows if row["state"] not in ("ok", "pruned")]
    if bad:
        failed = f"{len(bad)} of {len(rows)} artifacts failed: {', '.join(bad)}."
        unread = [row["detail"] for row in rows if row["state"] == "unreadable"]
        if unread and not any(row["state"].startswith("damaged") for row in rows):
            raise MachineError(f"{failed} {unread[0]}")
        raise ArtifactError(failed)
