"""`wm imagine`."""

from __future__ import annotations

from typing import Annotated

import typer

from wmcli.cli.options import (
    DEFAULT_RUN,
    Device,
    Dynamics,
    Experience,
    Force,
    Fresh,
    Json,
    More,
    Preset,
    Quiet,
    RunFolder,
    Seed,
    Set,
    Trust,
    may_create,
    overrides,
    refuse_both,
)
from wmcli.cli.output import published


def imagine(
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    dynamics: Dynamics = None,
    experience: Experience = None,
    updates: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Short for --set controller.updates=N.")
    ] = None,
    fresh: Fresh = False,
    more: More = False,
    force: Force = False,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Train the controller in imagination, inside the dynamics model.

    A planner (mcts) searches stored frames again, as targets for the dynamics.

    Examples:
        wm imagine --run runs/catch --set controller.entropy_weight=0.01
    """
    refuse_both(more, force)
    from wmcli.stages.imagine import imagine as stage
    from wmcli.stages.opening import open_context

    changes = overrides(settings, {"seed": seed, "training.device": device, "controller.updates": updates})
    create = may_create(dynamics, experience)
    context = open_context(
        run, preset, changes, create=create, quiet=quiet, fresh=fresh, force=force, more=more, trust=trust
    )
    published(stage(context, dynamics=dynamics, experience=experience), as_json)
