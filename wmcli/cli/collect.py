"""`wm collect`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from wmcli.cli.options import (
    DEFAULT_RUN,
    INPUT_PANEL,
    RUN_PANEL,
    Device,
    Environment,
    Fresh,
    Json,
    Preset,
    Quiet,
    RunFolder,
    Seed,
    Set,
    Trust,
    complete_actor,
    overrides,
)
from wmcli.cli.output import published
from wmcli.errors import UsageError


def collect(
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    environment: Environment = None,
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Controller that acts: controller@7, a path, or random. Default: the newest of the run, else random.",
            rich_help_panel=INPUT_PANEL,
            autocompletion=complete_actor,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Decisions to collect.")] = None,
    policy: Annotated[
        Literal["learned", "scripted", "recorded"] | None,
        typer.Option(
            metavar="NAME",
            help="learned: the controller; scripted: episodes of a memory task by its script; recorded: trajectories of"
            " Memory Maze from --set collect.recordings=FOLDER. Short for --set collect.policy=NAME.",
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Training episodes. Short for --set collect.episodes=N."),
    ] = None,
    where: Annotated[
        Literal["here", "ray"] | None,
        typer.Option(
            "--on",
            metavar="WHERE",
            help="here, or ray: environments are played on the machines of a Ray cluster, which needs --set"
            " collect.apart=true. Short for --set collect.on=WHERE.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster. Default: RAY_ADDRESS, else a new one of this machine.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None,
    fresh: Fresh = False,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Play the environment and append the experience to the run.

    Examples:
        wm collect --run runs/catch --preset quickstart --steps 2000
        wm collect --run runs/doors --preset doors-small --episodes 2000
        wm collect --preset s4wm-3d --set collect.recordings=DIR --policy recorded
        wm collect --run runs/pong --set collect.apart=true --on ray
    """
    from wmcli.stages.collect import collect as stage
    from wmcli.stages.opening import open_context

    short = {"seed": seed, "training.device": device, "environment.id": environment}
    short |= {"collect.policy": policy, "collect.episodes": episodes, "collect.on": where}
    changes = overrides(settings, short)
    context = open_context(run, preset, changes, create=True, quiet=quiet, fresh=fresh, trust=trust)
    if address is not None:
        if getattr(context.settings.collect, "on", "here") != "ray":
            raise UsageError("--address is that of a Ray cluster: add --on ray.")
        os.environ["RAY_ADDRESS"] = address
    published(stage(context, controller=controller, steps=steps), as_json)
