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
    may_create,
    overrides,
)
from wmcli.cli.output import draw_beside, filled, published
from wmcli.errors import UsageError

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact
    from wmcli.stages.protocol import Protocol

ProtocolName = Literal["returns", "gridworld", "generation", "recall", "reward", "doors", "probe"]
"""The keys of `stages.protocols.PROTOCOLS`, which imports torch: completion and help do without."""


def evaluate(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", hidden=True)] = None,
    run: RunFolder = DEFAULT_RUN,
    preset: Preset = None,
    settings: Set = None,
    seed: Seed = None,
    device: Device = None,
    controller: Controller = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Complete episodes that make the score.")
    ] = None,
    dynamics: Dynamics = None,
    experience: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Experience whose test episodes to imagine. Default: what the dynamics learned from.",
            rich_help_panel=INPUT_PANEL,
        ),
    ] = None,
    protocol: Annotated[
        ProtocolName,
        typer.Option(
            metavar="NAME",
            help="returns of the controller's episodes; gridworld: errors and cost of dynamics on cells; or what"
            " dynamics remember of a memory task: generation, recall, reward, doors, probe.",
        ),
    ] = "returns",
    fresh: Fresh = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score the controller of one run over complete episodes, or its dynamics with --protocol.

    Examples:
        wm eval --run runs/catch --episodes 100
        wm eval --run runs/s4wm --protocol generation
        wm eval --run runs/mamba2 --protocol gridworld
    """
    if runs:
        raise UsageError(
            f"it scores one run: wm eval --run {shlex.quote(str(runs[0]))}; to compare runs:"
            f" wm compare {shlex.join(map(str, runs))}"
        )
    from wmcli.stages.context import open_context
    from wmcli.stages.protocols import PROTOCOLS

    chosen = PROTOCOLS[protocol]
    _check_inputs(chosen, controller=controller, dynamics=dynamics, experience=experience)
    changes = {"seed": seed, "training.device": device}
    inputs: dict[str, Any]
    if chosen.needs == "controller":
        inputs = {"controller": controller, "episodes": episodes}
    else:
        changes["evaluation.episodes"] = episodes
        inputs = {"dynamics": dynamics} | ({"experience": experience} if chosen.reads_experience else {})
    given, create = overrides(settings, changes), may_create(inputs[chosen.needs])
    context = open_context(run, preset, given, create=create, quiet=quiet, fresh=fresh, force=force)
    report(chosen.evaluate(context, **inputs), as_json, quiet)


def _check_inputs(protocol: Protocol, *, controller: str | None, dynamics: str | None, experience: str | None) -> None:
    """Refuse inputs that the protocol does not read."""
    if controller and protocol.needs != "controller":
        raise UsageError(f"--protocol {protocol.name} scores dynamics: leave out --controller.")
    if dynamics and protocol.needs != "dynamics":
        raise UsageError("--dynamics is for protocols that score dynamics; otherwise give the --controller.")
    if experience and not protocol.reads_experience:
        raise UsageError(f"--experience is for the memory tasks: --protocol {protocol.name} plays episodes of its own.")


def report(evaluation: Artifact, as_json: bool, quiet: bool) -> None:
    """Print the path of an evaluation, or its record as JSON; draw its table on a terminal."""
    from wmcli.stages.protocols import PROTOCOLS

    if not (as_json or quiet):
        rows = PROTOCOLS[evaluation.metrics["protocol"]].table([evaluation])
        draw_beside(rows, filled(rows, list(rows[0])), evaluation.name)
    published(evaluation, as_json)
