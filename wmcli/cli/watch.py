"""`wm watch`: show runs in progress in a browser."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wmcli.cli.runs import RUNS
from wmcli.cli.serving import LOCAL, PORT, Host, OpenPage, Port, opener
from wmcli.errors import UsageError

if TYPE_CHECKING:
    from wmcli.stages.watch import Watch


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help=f"Runs, or folders of runs. Default: {RUNS}.", show_default=False),
    ] = None,
    sweep: Annotated[Path | None, typer.Option(metavar="FILE", help="Show the runs of a sweep.")] = None,
    host: Host = LOCAL,
    port: Port = PORT,
    open_page: OpenPage = None,
) -> None:
    """Show runs in progress in a browser: states, curves, films.

    The page follows runs as they train, stop and go on. It changes nothing,
    and runs may come and go. Ctrl-C ends it.

    Examples:
        wm watch
        wm watch runs/catch runs/pong --port 0
        wm watch --sweep backbones.toml
    """
    if sweep is not None and runs:
        raise UsageError("--sweep names the runs itself: omit RUN.")
    from wmcli.browser.page import page
    from wmcli.browser.server import check_installed, serve
    from wmcli.progress import Progress
    from wmcli.stages.watch import WatchSession

    check_installed()
    folders = [] if sweep else runs or [RUNS]
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder}: is a file; name a run, or a folder of runs.")
    what = str(sweep) if sweep else ", ".join(map(str, folders))
    shared = _watch_sweep(sweep) if sweep else _watch_folders(folders)
    serve(
        lambda: WatchSession(shared, what),
        page("watch"),
        host=host,
        port=port,
        progress=Progress(),
        title=f"watching {what}",
        ready=opener(open_page),
    )


def _watch_folders(folders: list[Path]) -> Watch:
    from wmcli.stages.watch import Watch

    return Watch(folders)


def _watch_sweep(file: Path) -> Watch:
    from wmcli.stages.watch import Watch
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.status import describe_sweep

    plan = read_sweep(file)
    return Watch([], lambda describe: describe_sweep(plan, describe), f"wm sweep {shlex.quote(str(file))}")
