"""`wm play`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from wmcli.cli.options import DEFAULT_RUN, Controller, Device, Json, Preset, Quiet, RunFolder, Seed, Set, overrides
from wmcli.cli.output import emit_json, line


def play(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the video goes: a .gif or .mp4.")],
    imagination: Annotated[
        bool, typer.Option("--imagination", help="Dream beside the real game instead of only playing it.")
    ] = False,
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    controller: Controller = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Record the controller playing, in the real environment or in imagination.

    Examples:
        wm play --run runs/catch --imagination --out dream.gif
    """
    from wmcli.stages.context import open_context
    from wmcli.stages.play import play as stage

    changes = overrides(settings, {"seed": seed, "training.device": device})
    context = open_context(run, preset, changes, create=False, quiet=quiet)
    source: Literal["real", "imagination"] = "imagination" if imagination else "real"
    path = stage(context, source=source, out=out, controller=controller, seed=context.settings.seed)
    if as_json:
        emit_json({"path": str(path)})
    else:
        line(str(path))
