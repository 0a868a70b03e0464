"""`wm doctor`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.options import DEFAULT_RUN, Format, Json, refuse_both_forms
from wmcli.cli.output import answer, emit_json


def doctor(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Examine this run as well.")] = None,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Examine this machine and a run, and say what to do.

    Versions, extras, devices, memory, the file system and its locks; of a run
    its permissions, schema, locks and what killed processes left. Nothing is
    changed. ok, warning (works, but see the remedy) or problem; exit code 1
    with a problem. wm verify checks the files of a run.

    Examples:
        wm doctor
        wm doctor runs/catch --json
    """
    refuse_both_forms(as_json, form)
    from wmcli.stages.doctor import examine_machine, examine_run

    of_run = list(examine_run(run)) if run is not None else []
    findings = [*examine_machine(run or Path(os.environ.get("WM_RUN", DEFAULT_RUN))), *of_run]
    rows = [finding._asdict() for finding in findings]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["topic", "name", "state", "found", "remedy"], form)
    counts = Counter(finding.state for finding in findings)
    typer.echo(f"problems: {counts['problem']}, warnings: {counts['warning']}", err=True)
    if counts["problem"]:
        raise typer.Exit(1)
