"""`wm artifacts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from wmcli.cli.options import DEFAULT_RUN, Json, RunFolder, complete_kind
from wmcli.cli.output import answer, emit_json, identity
from wmcli.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from wmcli.artifacts import Run


def artifacts(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help="Only this kind.", autocompletion=complete_kind),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    as_json: Json = False,
) -> None:
    """List every version of every artifact in the run.

    Examples:
        wm artifacts dynamics --run runs/catch
    """
    from wmcli.artifacts import KINDS, Run
    from wmcli.config import did_you_mean

    if kind is not None and kind not in KINDS:
        raise UsageError(f"no artifacts of kind '{kind}'; {did_you_mean(kind, KINDS)}")
    opened = Run.open(run, create=False)
    kinds = [each for each in KINDS if kind in (None, each)]
    rows = [describe(opened, each, version) for each in kinds for version in opened.versions(each)]
    if as_json:
        emit_json(rows)
    else:
        answer(
            [row | {"digest": row.get("digest", "")[:12]} for row in rows],
            ["name", "state", "created", "bytes", "metric", "inputs", "digest"],
        )


def describe(run: Run, kind: str, version: int) -> dict[str, Any]:
    """One version as plain values. Damaged is what has no readable manifest; `wm verify` reads the files."""
    from wmcli.artifacts import KEY_METRICS

    name = f"{kind}@{version}"
    try:
        artifact = run.resolve(name, kind)
    except ArtifactError as error:
        return {"name": name, "kind": kind, "version": version, "state": "damaged", "error": str(error)}
    key = KEY_METRICS.get(kind)
    value = artifact.metrics.get(key) if key else None
    return identity(artifact) | {
        "metric": None if value is None else f"{key} {value:.4g}",
        "state": "pruned" if artifact.pruned else "published",
        "created": artifact.manifest["created"],
        "bytes": sum(entry["size"] for entry in artifact.manifest["files"]),
        "inputs": {role: f"{reference.kind}@{reference.version}" for role, reference in artifact.inputs.items()},
        "metrics": artifact.metrics,
    }
