"""`wm run`: all stages of a preset in one process, epoch by epoch."""

from __future__ import annotations

from typing import Annotated

import typer

from wmcli import ranks
from wmcli.cli.evaluate import report
from wmcli.cli.options import (
    DEFAULT_RUN,
    INPUT_PANEL,
    REPEAT_PANEL,
    RUN_PANEL,
    Backbone,
    Device,
    Environment,
    Fresh,
    HeldOut,
    ImageSize,
    Json,
    Preset,
    Quiet,
    RunFolder,
    Seed,
    Set,
    Trust,
    complete_preset,
    overrides,
)
from wmcli.cli.output import published
from wmcli.errors import UsageError
from wmcli.progress import Progress


def run(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET",
            help="Preset of a new run. An existing run continues with its own.",
            autocompletion=complete_preset,
        ),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    environment: Environment = None,
    backbone: Backbone = None,
    fresh: Fresh = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Train again if an existing version has other settings.",
            rich_help_panel=REPEAT_PANEL,
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Begin with recorded episodes, as wm import does: a file, a folder, or minari:ID. No epoch collects,"
            " unless --set run.collect_epochs=N.",
            rich_help_panel=INPUT_PANEL,
        ),
    ] = None,
    held_out: HeldOut = 0,
    size: ImageSize = None,
    from_epoch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Apply --set from epoch N on. Earlier epochs stay as they are.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Collect, train and imagine for all epochs of a preset, then evaluate.

    The same command resumes a stopped run. Settings changed by --set stay with
    the run: --set run.epochs=N extends a finished one.

    With --set run.overlap=true a second process collects the next epoch's
    experience while the models train.

    Examples:
        wm run quickstart --run runs/catch
        wm run drama-quick --backbone s4 --run runs/s4
        wm run unizero --env ALE/MsPacman-v5 --run runs/mspacman
        wm run --run runs/catch --set run.epochs=2
        wm run rem --data recordings --held-out 10 --run runs/robot
    """
    if name and preset and name != preset:
        raise UsageError(f"two presets: {name} and --preset {preset}; give one of them.")
    if data is None and (held_out or size is not None):
        raise UsageError("--held-out and --size are for --data: add --data PATH.")
    from wmcli.artifacts import Run
    from wmcli.artifacts.finished import find_finished, note_finished

    short = {"seed": seed, "training.device": device, "environment.id": environment, "backbone.kind": backbone}
    changes = overrides(settings, short)
    opened = Run(run.absolute())
    is_plain = data is None and from_epoch is None and ranks.size() == 1  # others always ask the loop
    if is_plain and not (fresh or force) and (made := find_finished(opened, name or preset, changes)) is not None:
        Progress(quiet).say(f"run: {opened} has finished, and nothing has changed since: nothing to do")
        published(made, as_json)
        return
    from wmcli.stages.imported import Importing
    from wmcli.stages.loop import run_loop
    from wmcli.stages.opening import open_context

    importing = None if data is None else Importing(data, size=size, held_out=held_out)
    if importing is not None:
        changes += importing.defaults(run, changes)
    context = open_context(
        run,
        name or preset,
        changes,
        create=True,
        quiet=quiet,
        fresh=fresh,
        force=force,
        bind=True,
        from_epoch=from_epoch,
        trust=trust,
    )
    artifact = run_loop(context, importing=importing)
    if is_plain:
        note_finished(opened, changes, artifact)
    if artifact.kind == "evaluation":
        report(artifact, as_json, quiet)
    else:
        published(artifact, as_json)
