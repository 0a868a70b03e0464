"""`wm sweep`: run a suite of runs, and look at it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wmcli.cli.command import Command, Group
from wmcli.cli.options import REPEAT_PANEL, Format, Json, Quiet, refuse_both_forms
from wmcli.cli.output import EXACT, Row, answer, chosen, draw_table, emit_json, filled, line
from wmcli.errors import UsageError
from wmcli.progress import duration, size

if TYPE_CHECKING:
    from wmcli.sweeps.plan import Sweep

SHOWN = ("run", "state", "epoch", "stage", "rate", "left", "score", "took", "memory", "attempts", "last")
WATCH_SECONDS = 2.0


class SweepGroup(Group):
    """A group whose first word may be a file in place of a command: `wm sweep FILE` is `wm sweep run FILE`."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=SweepGroup, no_args_is_help=True)

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="The file of the sweep (.toml), or a suite of the package with its scale, such as rem-ablations:cpu.",
        show_default=False,
    ),
]


@app.callback()
def sweep() -> None:
    """Run a suite of runs: games, seeds and settings from one file.

    Each run is a `wm run` in a folder of its own, so it resumes like one.
    The same command finds done runs again and goes on with the others.
    The papers' tables and figures are suites of the package: wm sweep list.

    Examples:
        wm sweep backbones.toml
        wm sweep rem-ablations:cpu
        wm sweep backbones.toml --on slurm
        wm sweep backbones.toml --dry-run
        wm sweep status backbones.toml --watch
    """


@app.command("run", cls=Command)
def run(
    file: File,
    on: Annotated[
        Literal["local", "slurm", "ray"],
        typer.Option("--on", metavar="WHERE", help="local (this machine), slurm or ray; see docs/scale.md."),
    ] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the command of each run that is left, as a shell line.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run failed runs again.", rich_help_panel=REPEAT_PANEL)
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Measure first how long it will take.")
    ] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run all runs of a sweep that are not done: `run` may be left out.

    Examples:
        wm sweep run backbones.toml --no-estimate
        wm sweep run backbones.toml --on ray --retry
    """
    from wmcli.progress import Progress
    from wmcli.sweeps.plan import check_settings, read_sweep
    from wmcli.sweeps.run import run_sweep, runs_left, shell_lines

    plan = read_sweep(file)
    check_settings(plan)
    left = runs_left(plan, retry=retry)
    if dry_run and as_json:
        emit_json([{"run": each.name, "folder": str(each.folder), "command": ["wm", *each.arguments]} for each in left])
        return
    if dry_run:
        for command in shell_lines(left):
            line(command)
        return
    progress = Progress(quiet)
    if estimate and left and not quiet:
        from wmcli.sweeps.estimate import estimate_sweep

        estimate_sweep(plan, left, on, progress)
    rows = run_sweep(plan, on, progress, retry=retry)
    if as_json:
        emit_json(rows)
    else:
        line(str(plan.folder))


@app.command("list", cls=Command)
def list_suites(as_json: Json = False, form: Format = None) -> None:
    """List the suites of the package, with the number of runs at each scale.

    smoke: a few updates of every run, to see that all of it works. cpu: at
    most two hours on two cores. paper: as published.

    Examples:
        wm sweep list
    """
    from wmcli.sweeps.plan import list_runs

    refuse_both_forms(as_json, form)
    rows = list_runs()
    if as_json:
        emit_json(rows)
    else:
        answer(rows, list(dict.fromkeys(key for row in rows for key in row)), form)


@app.command("status", cls=Command)
def status(
    file: File,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds, until all is done.")] = False,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Show where each run of a sweep stands.

    waiting: not begun. running: with its rate and the time left. requeued:
    stopped at a checkpoint, and goes on. done. failed: with its last line.

    Examples:
        wm sweep status backbones.toml
        wm sweep status backbones.toml --json
    """
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.status import COLUMNS, count_states, describe_sweep

    refuse_both_forms(as_json, form)
    plan = read_sweep(file)
    if watch:
        if as_json or form:
            raise UsageError("--watch is for people: omit --json and --format.")
        _watch(plan)
    rows = describe_sweep(plan)
    if as_json:
        emit_json(rows)
    elif chosen(form) in EXACT and not watch:
        answer(rows, COLUMNS, form)
    else:
        readable = [_for_a_person(row) for row in rows]
        answer(readable, filled(readable, SHOWN), form)
        typer.echo(count_states(rows), err=True)


def _watch(plan: Sweep) -> None:
    """Draw the table again and again until no run is left, or until Ctrl-C."""
    import io

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from wmcli.sweeps.status import DONE, FAILED, count_states, describe_sweep

    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        rows = describe_sweep(plan)
        while any(row["state"] not in (DONE, FAILED) for row in rows):
            readable = [_for_a_person(row) for row in rows]
            drawn = io.StringIO()
            draw_table(readable, filled(readable, SHOWN), drawn)
            live.update(Text.from_ansi(drawn.getvalue() + count_states(rows)), refresh=True)
            time.sleep(WATCH_SECONDS)
            rows = describe_sweep(plan)


def _for_a_person(row: dict[str, Any]) -> Row:
    """Return a row of the state in columns that fit a terminal."""
    running, failed = row["state"] == "running", row["state"] == "failed"
    return {
        "run": row["run"],
        "state": row["state"],
        "epoch": row["epochs"] and f"{row['epoch'] or '-'}/{row['epochs']}",
        "stage": row["stage"] if running else None,
        "rate": f"{row['updates_per_second']:.3g}/s" if running and row["updates_per_second"] else None,
        "left": duration(row["seconds_left"]) if running and row["seconds_left"] is not None else None,
        "score": None if row["score"] is None else f"{row['score']:.4g}",
        "took": None if row["seconds"] is None else duration(row["seconds"]),
        "memory": row["peak_bytes"] and size(row["peak_bytes"]),
        "attempts": row["attempts"],
        "last": row["last"] if failed else None,
    }
