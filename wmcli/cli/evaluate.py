"""`wm eval`: score one run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wmcli.cli.options import (
    DEFAULT_RUN,
    INPUT_PANEL,
    Controller,
    Device,
    Dynamics,
    Force,
    Fresh,
    Json,
    Preset,
    Quiet,
    RunFolder,
    Seed,
    Set,
    Trust,
    is_default,
    may_create,
    overrides,
)
from wmcli.cli.output import draw_beside, filled, published
from wmcli.errors import UsageError

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact
    from wmcli.stages.protocol import Protocol

ProtocolName = Literal[
    "returns", "training", "gridworld", "held-out", "generation", "recall", "reward", "doors", "probe"
]
"""Keys of `stages.protocols.PROTOCOLS`, repeated since help and completion must not import torch."""


def evaluate(
    context: typer.Context,
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", hidden=True)] = None,
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    controller: Controller = None,
    episodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of complete episodes.")] = None,
    dynamics: Dynamics = None,
    experience: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Experience with the test episodes to imagine (default: that of the dynamics) or training games.",
            rich_help_panel=INPUT_PANEL,
        ),
    ] = None,
    protocol: Annotated[
        ProtocolName,
        typer.Option(
            metavar="NAME",
            help="returns: the controller's episodes. training: the last 5 (--episodes) games of collecting."
            " gridworld: errors and cost of dynamics on cells. held-out: dreams beside held-out episodes."
            " generation, recall, reward, doors, probe: memory of the dynamics in a memory task.",
        ),
    ] = "returns",
    fresh: Fresh = False,
    force: Force = False,
    as_json: Json = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Score the controller of one run over complete episodes, or its training games or dynamics with --protocol.

    Examples:
        wm eval --run runs/catch --episodes 100
        wm eval --controller robot-controller
        wm eval --run runs/drama --protocol training
        wm eval --run runs/s4wm --protocol generation
        wm eval --run runs/mamba2 --protocol gridworld
    """
    if runs:
        raise UsageError(
            f"it scores one run: wm eval --run {shlex.quote(str(runs[0]))}; to compare runs:"
            f" wm compare {shlex.join(map(str, runs))}"
        )
    from wmcli.stages.opening import open_context
    from wmcli.stages.protocols import PROTOCOLS

    choice = PROTOCOLS[protocol]
    _check_inputs(choice, controller=controller, dynamics=dynamics, experience=experience)
    if controller and _is_handed_on(controller) and is_default(context, "run"):
        run, controller = Path(controller), None
    short = {"seed": seed, "training.device": device}
    inputs: dict[str, Any]
    if choice.needs == "controller":
        inputs = {"controller": controller, "episodes": episodes}
    elif choice.needs == "experience":
        inputs = {"experience": experience, "episodes": episodes}
    else:
        short["evaluation.episodes"] = episodes
        inputs = {"dynamics": dynamics} | ({"experience": experience} if choice.reads_experience else {})
    changes, create = overrides(settings, short), may_create(inputs[choice.needs])
    opened = open_context(run, preset, changes, create=create, quiet=quiet, fresh=fresh, force=force, trust=trust)
    report(choice.evaluate(opened, **inputs), as_json, quiet)


def _is_handed_on(reference: str) -> bool:
    """Return whether a reference is a folder of `wm export controller`. Such a folder is a run of its own."""
    from wmcli.artifacts.manifest import MODEL

    return (Path(reference) / MODEL).is_file()


def _check_inputs(protocol: Protocol, *, controller: str | None, dynamics: str | None, experience: str | None) -> None:
    """Refuse inputs that the protocol does not read."""
    if controller and protocol.needs != "controller":
        raise UsageError(f"--protocol {protocol.name} scores {protocol.needs}: omit --controller.")
    if dynamics and protocol.needs != "dynamics":
        raise UsageError(f"--dynamics is for protocols that score dynamics: give --{protocol.needs} instead.")
    if experience and not protocol.reads_experience:
        raise UsageError(
            "--experience is for held-out episodes and training games:"
            f" --protocol {protocol.name} plays its own episodes."
        )


def report(evaluation: Artifact, as_json: bool, quiet: bool) -> None:
    """Print the path of an evaluation, or its record as JSON; draw its table on a terminal."""
    from wmcli.stages.protocols import PROTOCOLS

    if not (as_json or quiet):
        rows = PROTOCOLS[evaluation.metrics["protocol"]].table([evaluation])
        draw_beside(rows, filled(rows, list(rows[0])), evaluation.name)
    published(evaluation, as_json)
