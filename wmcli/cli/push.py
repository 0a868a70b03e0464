"""`wm push` and `wm pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.options import RUN_PANEL, Json, Quiet
from wmcli.cli.output import emit_json, line

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="A folder: file:///..., s3://..., gs://..., hf://..., any of fsspec.", show_default=False
    ),
]


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)],
    url: Url,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a run to a URL: its versions, settings and metrics.

    Versions that a copy there has already are not sent again. Checkpoints of
    unfinished work and TensorBoard's files stay here.

    Examples:
        wm push runs/catch s3://lab/worlds/catch
        wm push runs/catch file:///mnt/backup/catch
    """
    from wmcli.artifacts import Run
    from wmcli.artifacts.remote import push as send
    from wmcli.progress import Progress

    progress = Progress(quiet)
    done = send(Run.open(run, create=False), url, progress)
    progress.say(f"push: {len(done['versions'])} versions sent")
    if as_json:
        emit_json(done)
    else:
        line(done["url"])


def pull(
    url: Url,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="DIR",
            help="The run directory: new, or an earlier copy. Default: runs/ and the last part of URL.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a run from a URL that wm push wrote. Every file is checked on arrival.

    Examples:
        wm pull s3://lab/worlds/catch
        wm pull file:///mnt/backup/catch --run runs/catch-copy
    """
    from wmcli.artifacts.remote import pull as fetch
    from wmcli.progress import Progress

    progress = Progress(quiet)
    done = fetch(url, run or Path("runs") / url.rstrip("/").rpartition("/")[2], progress)
    progress.say(f"pull: {len(done['versions'])} versions fetched")
    if as_json:
        emit_json(done)
    else:
        line(done["run"])
