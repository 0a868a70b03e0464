"""`wm train-tokenizer`."""

from __future__ import annotations

from typing import Annotated

import typer

from wmcli.cli.options import (
    DEFAULT_RUN,
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
    Trust,
    may_create,
    overrides,
    refuse_both,
)
from wmcli.cli.output import published


def train_tokenizer(
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    experience: Experience = None,
    updates: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Short for --set tokenizer.updates=N.")
    ] = None,
    fresh: Fresh = False,
    more: More = False,
    force: Force = False,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Train the tokenizer on the collected frames.

    Examples:
        wm train-tokenizer --run runs/catch --updates 2000
    """
    refuse_both(more, force)
    from wmcli.stages.opening import open_context
    from wmcli.stages.tokenizer import train_tokenizer as stage

    changes = overrides(settings, {"seed": seed, "training.device": device, "tokenizer.updates": updates})
    create = may_create(experience)
    context = open_context(
        run, preset, changes, create=create, quiet=quiet, fresh=fresh, force=force, more=more, trust=trust
    )
    published(stage(context, experience=experience), as_json)
