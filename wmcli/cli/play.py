"""`wm play`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from wmcli.cli.options import DEFAULT_RUN, Controller, Device, Json, Preset, Quiet, RunFolder, Seed, Set, overrides
from wmcli.cli.output import emit_json, line
from wmcli.errors import UsageError


def play(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write, .gif or .mp4.")],
    imagination: Annotated[
        bool,
        typer.Option(
            "--imagination", help="Act in the world model after a few real frames, beside the real environment."
        ),
    ] = False,
    actions: Annotated[
        str | None,
        typer.Option(
            "--actions",
            metavar="LIST",
            help="First actions, e.g. 0,0,2 or LEFT,LEFT,RIGHT. The controller chooses the next ones.",
        ),
    ] = None,
    context_frames: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            min=1,
            help="With --imagination: number of real frames before it. Default: dynamics.context, as in training.",
        ),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    controller: Controller = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Film the controller in the real environment or in imagination.

    Examples:
        wm play --run runs/catch --imagination --out dream.gif
        wm play --run runs/catch --imagination --actions LEFT,LEFT --out dream.gif
    """
    if context_frames is not None and not imagination:
        raise UsageError("--context is the number of real frames before imagined ones: add --imagination.")
    from wmcli.stages.opening import open_context
    from wmcli.stages.play import play as stage

    changes = overrides(settings, {"seed": seed, "training.device": device})
    context = open_context(run, preset, changes, create=False, quiet=quiet)
    source: Literal["real", "imagination"] = "imagination" if imagination else "real"
    seed = context.settings.seed
    film = stage(
        context,
        source=source,
        out=out,
        controller=controller,
        seed=seed,
        actions=actions,
        context_frames=context_frames,
    )
    if as_json:
        emit_json({"path": str(film.path), "frames": film.frames, "return": film.total, "ended": film.ended})
    else:
        line(str(film.path))
