"""`wm export`: experience and controllers, for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from wmcli.cli.command import Command, Group
from wmcli.cli.options import DEFAULT_RUN, INPUT_PANEL, OUTPUT_PANEL, Controller, Experience, Quiet, RunFolder
from wmcli.cli.output import line

app = typer.Typer(cls=Group, no_args_is_help=True)

Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder to write, new or empty.", rich_help_panel=OUTPUT_PANEL)
]


@app.callback()
def export() -> None:
    """Write experience in formats of others, or a controller to hand on.

    Examples:
        wm export experience --run runs/catch --to minari --out catch-minari
        wm export controller --run runs/catch --out catch-controller
    """


@app.command("experience", cls=Command)
def experience(
    run: RunFolder = DEFAULT_RUN,
    reference: Experience = None,
    form: Annotated[
        Literal["npz", "minari", "lerobot"],
        typer.Option("--to", metavar="FORM", help="npz, minari or lerobot.", rich_help_panel=OUTPUT_PANEL),
    ] = "npz",
    out: Out = Path("experience"),
    held_out: Annotated[
        Literal["validation", "test"] | None,
        typer.Option(metavar="PART", help="Only the validation or test episodes.", rich_help_panel=INPUT_PANEL),
    ] = None,
    lossy: Annotated[
        bool,
        typer.Option("--lossy", help="For lerobot: images as videos, with loss.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write the experience of a run as episodes in another format.

    Exact unless --lossy: imported again it has the same digest.

    Examples:
        wm export experience --run runs/catch --out catch-npz
        wm export experience --to lerobot --lossy --out catch-lerobot
    """
    from wmcli.artifacts import Run
    from wmcli.progress import Progress
    from wmcli.stages.exported import export_experience

    artifact = Run.open(run, create=False).resolve(reference or "experience", "experience")
    line(str(export_experience(artifact, form, out, Progress(quiet), held_out=held_out, lossy=lossy)))


@app.command("controller", cls=Command)
def controller(
    run: RunFolder = DEFAULT_RUN,
    reference: Controller = None,
    out: Out = Path("controller"),
    quiet: Quiet = False,
) -> None:
    """Write a controller with its world model and a model card.

    The folder is a run of its own: wm eval --run DIR scores it.

    Examples:
        wm export controller --run runs/catch --out catch-controller
        wm export controller --controller controller@best --out best
    """
    from wmcli.artifacts import Run
    from wmcli.progress import Progress
    from wmcli.stages.exported import export_controller

    artifact = Run.open(run, create=False).resolve(reference or "controller", "controller")
    line(str(export_controller(artifact, out, Progress(quiet))))
