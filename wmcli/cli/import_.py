"""`wm import`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from wmcli.cli.options import (
    DEFAULT_RUN,
    INPUT_PANEL,
    Device,
    Environment,
    HeldOut,
    ImageSize,
    Json,
    Preset,
    Quiet,
    RunFolder,
    Seed,
    Set,
    Trust,
    overrides,
)
from wmcli.cli.output import published


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="PATH", help="File or folder of recorded episodes, or minari:ID. See docs/data.md."),
    ],
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    environment: Environment = None,
    form: Annotated[
        Literal["npz", "hdf5", "zarr", "mp4", "minari", "lerobot"] | None,
        typer.Option(
            "--from",
            metavar="FORM",
            help="npz, hdf5, zarr, mp4, minari or lerobot. Default: what it looks like.",
            rich_help_panel=INPUT_PANEL,
        ),
    ] = None,
    size: ImageSize = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Read only this part of the observation. Repeatable.", rich_help_panel=INPUT_PANEL
        ),
    ] = None,
    actions: Annotated[
        Literal["after", "before"] | None,
        typer.Option(
            metavar="WHEN",
            help="after or before: when the action of a row of Dreamer's files was taken, seen from its observation.",
            rich_help_panel=INPUT_PANEL,
        ),
    ] = None,
    held_out: HeldOut = 0,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="Draw the held-out episodes by the seed.", rich_help_panel=INPUT_PANEL)
    ] = False,
    drop_last: Annotated[
        bool,
        typer.Option(
            "--drop-last",
            help="Cut off the last action of episodes whose closing observation is unknown.",
            rich_help_panel=INPUT_PANEL,
        ),
    ] = False,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Read recorded experience and append it to the run.

    A new run without --env gets the environment data/NAME, which nobody
    can play: train on it, and score its world model.

    Examples:
        wm import recordings --run runs/robot --held-out 10
        wm import minari:atari/breakout/expert-v0 --size 64
        wm import lerobot-folder --part images.top --size 64
    """
    from wmcli.stages.imported import Importing, import_experience
    from wmcli.stages.opening import open_context

    short = {"seed": seed, "training.device": device, "environment.id": environment}
    changes = overrides(settings, short)
    importing = Importing(source, form, size, tuple(part or ()), actions, held_out, shuffled, drop_last)
    changes += importing.defaults(run, changes)
    context = open_context(run, preset, changes, create=True, quiet=quiet, trust=trust)
    published(import_experience(context, importing), as_json)
