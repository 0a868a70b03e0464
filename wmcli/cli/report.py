"""`wm report`: write a page about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wmcli.cli.options import OUTPUT_PANEL, Quiet, complete_key
from wmcli.cli.output import line
from wmcli.errors import UsageError
from wmcli.progress import Progress

if TYPE_CHECKING:
    from wmcli.stages.report import Suite

OUT = Path("report.html")


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Runs, or folders of runs.", show_default=False)
    ] = None,
    sweep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Report the runs of a sweep, by its variants.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Make a variant for each value of this setting (section.key). Repeatable. Default: the settings in"
            " which the runs differ, apart from seed and environment.",
            autocompletion=complete_key,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page (.html).", rich_help_panel=OUTPUT_PANEL)] = OUT,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about one or several runs: scores beside published
    ones, curves, films, settings, lineage, and the commands to repeat them.

    The page needs no network. Runs that are damaged are named and left out.

    Examples:
        wm report runs/catch --out catch.html
        wm report runs --by backbone.kind
        wm report --sweep backbones.toml --out backbones.html
    """
    if sweep is not None and runs:
        raise UsageError("--sweep names the runs itself: omit RUN.")
    if sweep is None and not runs:
        raise UsageError("no runs: name some, or the file of a sweep with --sweep.")
    from wmcli.report.files import check_target
    from wmcli.stages.report import report as write

    check_target(out, (".html",))
    suite = None if sweep is None else _read_suite(sweep)
    write(runs or [], out, Progress(quiet), by=by or (), suite=suite)
    line(str(out))


def _read_suite(file: Path) -> Suite:
    """Read what a sweep knows of its runs."""
    from wmcli.stages.report import Suite
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.tables import changed_runs, sweep_records

    plan = read_sweep(file)
    variants: dict[str, list[Path]] = {}
    for run in plan.runs:
        variants.setdefault(run.variant, []).append(run.folder)
    return Suite(file, variants, sweep_records(plan), changed_runs(plan))
