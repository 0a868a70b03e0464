"""`wm play`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from wmcli.cli.options import (
    DEFAULT_RUN,
    INPUT_PANEL,
    Controller,
    Device,
    Json,
    Preset,
    Quiet,
    RunFolder,
    Seed,
    Set,
    Trust,
    overrides,
)
from wmcli.cli.output import emit_json, line
from wmcli.cli.serving import BROWSER_PANEL, LOCAL, PORT, Host, OpenPage, Port, opener
from wmcli.errors import UsageError


def play(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Film to write: .webp, .gif or .mp4.")
    ] = None,
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
    browser: Annotated[
        bool,
        typer.Option(
            "--browser",
            help="Play in a browser: the real environment and dreams of it, side by side, under the same keys.",
            rich_help_panel=BROWSER_PANEL,
        ),
    ] = False,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Dream in the newest world model of another run as well. Repeatable.",
            rich_help_panel=BROWSER_PANEL,
        ),
    ] = None,
    experience: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Stored frames that a dream may start from. Default: the newest of this run.",
            rich_help_panel=INPUT_PANEL,
        ),
    ] = None,
    host: Host = LOCAL,
    port: Port = PORT,
    open_page: OpenPage = None,
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    controller: Controller = None,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Play in the real environment and in imagination: in a browser, or on film.

    Examples:
        wm play --run runs/catch --browser
        wm play --run runs/catch --browser --against runs/other
        wm play --run runs/catch --imagination --out dream.webp
        wm play --run runs/catch --imagination --actions LEFT,LEFT --out dream.gif
    """
    changes = overrides(settings, {"seed": seed, "training.device": device})
    if browser:
        given = {"--out": out, "--imagination": imagination, "--actions": actions, "--context": context_frames}
        if names := [name for name, value in given.items() if value]:
            raise UsageError(f"--browser makes no film: omit {', '.join(names)}.")
        if as_json:
            raise UsageError("--browser prints no result: omit --json.")
        from wmcli.stages.dreaming.serve import play_in_browser
        from wmcli.stages.opening import open_context

        play_in_browser(
            open_context(run, preset, changes, create=False, quiet=quiet, trust=trust),
            controller=controller,
            against=[str(path) for path in against or ()],
            experience=experience,
            host=host,
            port=port,
            ready=opener(open_page),
        )
        return
    if out is None:
        raise UsageError("name a film with --out FILE, or play in a browser with --browser.")
    if against or experience:
        raise UsageError("--against and --experience are for playing in a browser: add --browser.")
    if context_frames is not None and not imagination:
        raise UsageError("--context is the number of real frames before imagined ones: add --imagination.")
    from wmcli.stages.opening import open_context
    from wmcli.stages.play import play as stage

    context = open_context(run, preset, changes, create=False, quiet=quiet, trust=trust)
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
