"""`wm lineage`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wmcli.cli.options import DEFAULT_RUN, Json, RunFolder, complete_reference
from wmcli.cli.output import answer, emit_json
from wmcli.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact, Tree

LATE_FIRST = ("evaluation", "controller", "dynamics", "tokenizer", "experience", "profile")


def lineage(
    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="REF",
            help="kind, kind@7 or a path. Default: the newest evaluation, or else controller, dynamics, ...",
            autocompletion=complete_reference,
        ),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """List what an artifact was made from, back to the first experience. Repeated ones are followed once.

    Examples:
        wm lineage controller --run runs/catch
    """
    from wmcli.artifacts import lineage as trace

    rows = [describe(depth, role, tree) for depth, role, tree in trace(find(run, reference)).rows()]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["depth", "role", "name", "state", "digest", "path"])


def describe(depth: int, role: str, tree: Tree) -> dict[str, Any]:
    """One line of the tree as plain values: its inputs are the lines below it that are one deeper.

    It is a list and not nested, since a long run is hundreds of levels deep.
    """
    if tree.problem:
        state = "missing"
    elif tree.repeated:
        state = "repeated"
    else:
        state = "pruned" if tree.pruned else "published"
    return {
        "depth": depth,
        "role": role,
        "name": tree.name,
        "state": state,
        "problem": tree.problem,
        "digest": tree.digest,
        "path": str(tree.path),
    }


def find(folder: Path, reference: str | None) -> Artifact:
    """The artifact of any kind that `reference` names; without one, that of the latest stage the run has come to."""
    from wmcli.artifacts import KINDS, Run, open_artifact
    from wmcli.config import did_you_mean

    if reference is None:
        run = Run.open(folder, create=False)
        newest = next((artifact for kind in LATE_FIRST if (artifact := run.latest(kind)) is not None), None)
        if newest is None:
            raise ArtifactError(f"run {folder} holds no artifacts yet; make one with: wm collect --run {folder}")
        return newest
    kind = reference.partition("@")[0]
    if kind in KINDS:
        return Run.open(folder, create=False).resolve(reference, kind)
    if Path(reference).exists():
        return open_artifact(Path(reference))
    raise UsageError(f"no artifact '{reference}', neither a kind nor a path that exists; {did_you_mean(kind, KINDS)}")
