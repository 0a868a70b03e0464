"""`wm artifacts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from wmcli.cli.human import SHORT, ago
from wmcli.cli.options import DEFAULT_RUN, Format, Json, RunFolder, complete_kind, refuse_both_forms
from wmcli.cli.output import EXACT, Row, answer, chosen, emit_json
from wmcli.cli.schema import describe
from wmcli.errors import ArtifactError, MachineError, UsageError
from wmcli.progress import size

if TYPE_CHECKING:
    from wmcli.artifacts import Run


def artifacts(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help="List this kind only.", autocompletion=complete_kind),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """List every version of every artifact in the run.

    The size is that on disk now. A pruned version has manifest and pictures only.

    Examples:
        wm artifacts dynamics --run runs/catch
    """
    from wmcli.artifacts import KINDS, Run
    from wmcli.config import did_you_mean

    refuse_both_forms(as_json, form)
    if kind is not None and kind not in KINDS:
        raise UsageError(f"no artifacts of kind '{kind}'; {did_you_mean(kind, KINDS)}")
    opened = Run.open(run, create=False)
    kinds = [each for each in KINDS if kind in (None, each)]
    rows = [_row(opened, each, version) for each in kinds for version in opened.versions(each)]
    if as_json:
        emit_json(rows)
    elif chosen(form) in EXACT:
        answer(
            [row | {"digest": row.get("digest", "")[:12]} for row in rows],
            ["name", "state", "created", "bytes", "metric", "inputs", "digest"],
            form,
        )
    else:
        answer([_for_a_person(row) for row in rows], ["name", "age", "size", "digest", "metric", "inputs"], form)


def _for_a_person(row: dict[str, Any]) -> Row:
    """Return a row in columns that fit a terminal of 80: state beside size, inputs without roles."""
    if row["state"] in ("damaged", "unreadable"):
        return {"name": row["name"], "size": row["state"]}
    return {
        "name": row["name"],
        "age": ago(row["created"]),
        "size": f"pruned {size(row['bytes'])}" if row["state"] == "pruned" else size(row["bytes"]),
        "metric": (row["metric"] or "").replace("_", " ") or None,
        "inputs": " ".join(dict.fromkeys(row["inputs"].values())) or None,
        "digest": row["digest"][:SHORT],
    }


def _row(run: Run, kind: str, version: int) -> dict[str, Any]:
    """Return the JSON of one version. It is damaged if its manifest cannot be read; `wm verify` reads the files.

    `bytes` are on disk now, manifest included; `published_bytes` are those of the files that were published.
    """
    from wmcli.artifacts import KEY_METRICS
    from wmcli.artifacts.overview import bytes_on_disk

    name = f"{kind}@{version}"
    try:
        artifact = run.resolve(name, kind)
    except (ArtifactError, MachineError) as error:
        state = "damaged" if isinstance(error, ArtifactError) else "unreadable"
        return {"name": name, "kind": kind, "version": version, "state": state, "error": str(error)}
    metrics = {key: artifact.metrics.get(key) for key in KEY_METRICS.get(kind, ())}
    return {
        **describe(artifact),
        "metric": ", ".join(f"{key} {value:.4g}" for key, value in metrics.items() if value is not None) or None,
        "state": "pruned" if artifact.pruned else "published",
        "created": artifact.manifest["created"],
        "bytes": bytes_on_disk(artifact.path),
        "published_bytes": sum(entry["size"] for entry in artifact.manifest["files"]),
        "inputs": {role: f"{reference.kind}@{reference.version}" for role, reference in artifact.inputs.items()},
    }
