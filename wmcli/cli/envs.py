"""`wm envs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.options import Format, Json, complete_environment, refuse_both_forms
from wmcli.cli.output import answer, emit_json, line
from wmcli.errors import UsageError


def envs(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENV", help="Memory tasks to draw.", show_default=False, autocompletion=complete_environment
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw an episode of each ENV from above (.png, .svg or .pdf): walls, objects and doors, and the"
            " walk of the script.",
        ),
    ] = None,
    episode: Annotated[int, typer.Option(metavar="SEED", min=0, help="Seed of the episodes that --picture draws.")] = 0,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """List the installed environments, or draw memory tasks from above.

    Examples:
        wm envs --json
        wm envs wm/FourRooms-v0 wm/MultiDoorsKeys-3-v0 --picture tasks.png
    """
    refuse_both_forms(as_json, form)
    if picture is not None:
        if as_json or form:
            raise UsageError("--picture prints no table: omit --json and --format.")
        _draw(tasks or [], picture, episode)
        return
    if tasks:
        raise UsageError(f"{' '.join(tasks)}: ENV is for --picture FILE; the list has no arguments.")
    from wmcli.envs import list_environments

    rows = list_environments()
    if as_json:
        emit_json(rows)
    else:
        answer(rows, list(dict.fromkeys(column for row in rows for column in row)), form)


def _draw(tasks: list[str], picture: Path, episode: int) -> None:
    """Draw one episode of each task from above into a file, and print its path."""
    from wmcli.envs.tasks import TASKS
    from wmcli.envs.top_view import top_view
    from wmcli.report.files import check_target
    from wmcli.report.plots import SUFFIXES, write_figure
    from wmcli.report.top_view import top_views

    if others := [name for name in tasks if name not in TASKS]:
        raise UsageError(f"--picture draws memory tasks, and {others[0]} is none: choose from {', '.join(TASKS)}.")
    if not tasks:
        raise UsageError(f"--picture draws the tasks that you name: choose from {', '.join(TASKS)}.")
    check_target(picture, SUFFIXES)
    write_figure(picture, top_views({name: top_view(TASKS[name], episode) for name in dict.fromkeys(tasks)}))
    line(str(picture))
