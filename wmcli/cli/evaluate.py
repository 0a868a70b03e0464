"""`wm eval`: score one run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from wmcli.cli.output import Row, draw_beside, filled, published
from wmcli.errors import UsageError

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact
    from wmcli.stages.context import Context

DynamicsProtocol = Literal["gridworld", "generation", "recall", "reward", "doors", "probe"]
Protocol = Literal["returns", DynamicsProtocol]


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
        Protocol,
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
    _check_inputs(protocol, controller=controller, dynamics=dynamics, experience=experience)
    from wmcli.stages.context import open_context

    changes = {"seed": seed, "training.device": device}
    if protocol != "returns":
        changes["evaluation.episodes"] = episodes
    given = overrides(settings, changes)
    create = may_create(controller if protocol == "returns" else dynamics)
    context = open_context(run, preset, given, create=create, quiet=quiet, fresh=fresh, force=force)
    if protocol == "returns":
        from wmcli.stages.evaluate import evaluate as stage

        report_score(stage(context, controller=controller, episodes=episodes), as_json, quiet)
    else:
        report_measure(_measure(context, protocol, dynamics, experience), protocol, as_json, quiet)


def _check_inputs(protocol: Protocol, *, controller: str | None, dynamics: str | None, experience: str | None) -> None:
    """Refuse inputs that the protocol does not read."""
    if protocol != "returns" and controller:
        raise UsageError(f"--protocol {protocol} scores dynamics: leave out --controller.")
    if protocol == "returns" and dynamics:
        raise UsageError("--dynamics is for protocols that score dynamics; otherwise give the --controller.")
    if protocol in ("returns", "gridworld") and experience:
        raise UsageError(f"--experience is for the memory tasks: --protocol {protocol} plays episodes of its own.")


def _measure(context: Context, protocol: DynamicsProtocol, dynamics: str | None, experience: str | None) -> Artifact:
    """Score dynamics by a protocol."""
    if protocol == "gridworld":
        from wmcli.stages.grid_world import evaluate_grid_world

        return evaluate_grid_world(context, dynamics=dynamics)
    from wmcli.stages.memory import evaluate_memory

    return evaluate_memory(context, measure=protocol, dynamics=dynamics, experience=experience)


def dynamics_rows(evaluations: list[Artifact], protocol: Protocol) -> Sequence[Row]:
    """Return the table of a protocol that scores dynamics."""
    if protocol == "gridworld":
        from wmcli.stages.grid_world import table
    else:
        from wmcli.stages.memory_table import table
    return table(evaluations)


def report_measure(evaluation: Artifact, protocol: Protocol, as_json: bool, quiet: bool) -> None:
    """Print where an evaluation of dynamics is; draw its table for a person who watches."""
    if not (as_json or quiet):
        rows = dynamics_rows([evaluation], protocol)
        draw_beside(rows, list(rows[0]), evaluation.name)
    published(evaluation, as_json)


def report_score(evaluation: Artifact, as_json: bool, quiet: bool) -> None:
    """Print what a stage prints. Beside our score stand the published ones: in the JSON as `references`, for a person
    who watches in a table on stderr; a log has the stage's own line."""
    from wmcli.metrics.atari import references

    metrics = evaluation.metrics
    beside = references(metrics["environment"], metrics["random_mean"])
    if not (as_json or quiet):
        title = f"{evaluation.name}, episodes: {metrics['episodes']}"
        if metrics["stderr"] is not None:
            title += f", standard error of the mean: {metrics['stderr']:.2g}"
        ours = {"name": "this run", "score": metrics["mean"], "runs": 1}
        rows = [ours | {"human_normalized": metrics["human_normalized"]}, *beside]
        columns = ["name", "score", "human_normalized", "runs", "lowest", "highest", "caveat"]
        draw_beside(rows, filled(rows, columns), title)
    published(evaluation, as_json, references=beside)
