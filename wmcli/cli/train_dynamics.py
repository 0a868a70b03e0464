"""`wm train-dynamics`."""

from __future__ import annotations

from typing import Annotated

import typer

from wmcli.cli.options import (
    DEFAULT_RUN,
    Backbone,
    Device,
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
    Teacher,
    Tokenizer,
    Trust,
    may_create,
    overrides,
    refuse_both,
)
from wmcli.cli.output import published


def train_dynamics(
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    experience: Experience = None,
    controller: Teacher = None,
    backbone: Backbone = None,
    updates: Annotated[int | None, typer.Option(min=1, metavar="N", help="Short for --set dynamics.updates=N.")] = None,
    fresh: Fresh = False,
    more: More = False,
    force: Force = False,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Train the dynamics model on the collected frames.

    Its inputs are tokens, or frames if it trains its own encoder. Models for
    planning (unizero, muzero) also learn policy and value.

    Examples:
        wm train-dynamics --run runs/catch --backbone mamba2
    """
    refuse_both(more, force)
    from wmcli.stages.dynamics import train_dynamics as stage
    from wmcli.stages.opening import open_context

    short = {"seed": seed, "training.device": device, "backbone.kind": backbone, "dynamics.updates": updates}
    create = may_create(tokenizer, experience)
    changes = overrides(settings, short)
    context = open_context(
        run, preset, changes, create=create, quiet=quiet, fresh=fresh, force=force, more=more, trust=trust
    )
    published(stage(context, tokenizer=tokenizer, experience=experience, controller=controller), as_json)
