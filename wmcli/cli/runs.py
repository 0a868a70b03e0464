"""`wm runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wmcli.cli.human import ago, count
from wmcli.cli.options import Format, Json, refuse_both_forms
from wmcli.cli.output import EXACT, Row, answer, chosen, emit_json
from wmcli.progress import size

RUNS = Path("runs")
SHOWN = ("name", "status", "epoch", "score", "steps", "active", "environment", "preset", "size", "seed")
"""Columns for a person, the most important first."""


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the runs.")] = RUNS,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """List the runs below a folder with their progress and newest score.

    running: a process writes in it now. interrupted: the same command resumes
    from a checkpoint. finished: the last epoch was evaluated, or run.patience
    ended the run. damaged: a file cannot be read. idle: none of these.

    Examples:
        wm runs
        wm runs runs/memory-12 --json
    """
    from wmcli.artifacts.overview import COLUMNS, describe_run, find_runs

    refuse_both_forms(as_json, form)
    rows = [describe_run(path) for path in find_runs(folder)]
    if as_json:
        emit_json(rows)
    elif not rows:
        typer.echo(f"no runs below {folder}", err=True)
    elif chosen(form) in EXACT:
        answer(rows, COLUMNS, form)
    else:
        answer([_for_a_person(row, folder) for row in rows], SHOWN, form)
        for problem in filter(None, (row["problem"] for row in rows)):
            typer.echo(problem, err=True)


def _for_a_person(row: dict[str, Any], folder: Path) -> Row:
    """Return a row in columns that fit a terminal."""
    path = Path(row["name"])
    return row | {
        "name": path.name if path == folder else str(path.relative_to(folder)),
        "epoch": row["epochs"] and f"{row['epoch'] or '-'}/{row['epochs']}",
        "score": None if row["score"] is None else _score(row["score"], row["stderr"], row["episodes"]),
        "steps": count(row["steps"]),
        "size": size(row["bytes"]),
        "active": ago(row["active"]),
    }


def _score(mean: float, stderr: float | None, episodes: int) -> str:
    """Return `0.98 ± 0.02 (50)`: mean, standard error, number of episodes."""
    spread = "" if stderr is None else f" ± {stderr:.2g}"
    return f"{mean:.4g}{spread} ({episodes})"
