"""`wm verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from wmcli.cli.lineage import find
from wmcli.cli.options import DEFAULT_RUN, Json, RunFolder, complete_reference
from wmcli.cli.output import answer, emit_json
from wmcli.errors import ArtifactError

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact


def verify(
    reference: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="Only this artifact.", autocompletion=complete_reference),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """Check every file of the run's artifacts against its recorded size and sha256.

    Examples:
        wm verify dynamics@3 --run runs/catch
    """
    from wmcli.artifacts import Run, check

    if reference is None:
        states = check(Run.open(run, create=False))
    else:
        artifact = find(run, reference)
        states = [(artifact.name, *examine(artifact))]
    rows = [{"name": name, "state": state, "detail": detail} for name, state, detail in states]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["name", "state", "detail"])
    damaged = [row["name"] for row in rows if row["state"] == "damaged"]
    if damaged:
        raise ArtifactError(f"{len(damaged)} of {len(rows)} artifacts damaged: {', '.join(damaged)}.")


def examine(artifact: Artifact) -> tuple[str, str]:
    """State and detail of one artifact, in the words of `check`."""
    try:
        for role in artifact.inputs:
            artifact.input(role)
        if artifact.pruned:
            return "pruned", "only its manifest was kept"
        artifact.verify_again()
    except ArtifactError as error:
        return "damaged", str(error)
    return "ok", ""
