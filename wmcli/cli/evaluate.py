"""`wm eval`: score a controller, or put the scores of several runs together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from wmcli.cli.output import Row, answer, draw_beside, emit_json, identity, line
from wmcli.errors import UsageError

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact

MANY_PANEL = "Many runs"


def evaluate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Runs already scored, to put together.", show_default=False),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Compare RUN... with this one. Repeatable.", rich_help_panel=MANY_PANEL),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A row for each value of this setting (section.key) among RUN... Repeatable.",
            rich_help_panel=MANY_PANEL,
        ),
    ] = None,
    priors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the attention priors that RUN... learned (.png).", rich_help_panel=MANY_PANEL
        ),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the curves of RUN... in one picture (.png): --protocol generation or recall.",
            rich_help_panel=MANY_PANEL,
        ),
    ] = None,
    strips: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw a test episode as each of RUN... imagines it, below the truth (.png): --protocol generation.",
            rich_help_panel=MANY_PANEL,
        ),
    ] = None,
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
        Literal["returns", "gridworld", "generation", "recall", "reward", "doors", "probe"],
        typer.Option(
            help="returns of the controller's episodes; gridworld: errors and cost of dynamics on cells; or what"
            " dynamics remember of a memory task: generation, recall, reward, doors, probe."
        ),
    ] = "returns",
    fresh: Fresh = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score the controller over complete episodes, or put the scores of several runs together.

    Examples: wm eval --run runs/catch --episodes 100; wm eval runs/a runs/b --against runs/c --against runs/d;
    wm eval runs/* --by backbone.name; wm eval --protocol gridworld runs/mamba2 runs/gru;
    wm eval --run runs/s4wm --protocol generation
    """
    of_dynamics = protocol != "returns"  # the other protocols score dynamics
    if by and (against or of_dynamics or not runs):
        raise UsageError("--by sorts the scores of several runs: wm eval RUN... --by KEY, without --against.")
    if of_dynamics and (controller or against or priors):
        raise UsageError(f"--protocol {protocol} scores dynamics: leave out --controller, --against and --priors.")
    if curves and not (runs and protocol in ("generation", "recall")):
        raise UsageError(
            "--curves draws several runs of generation or recall: wm eval RUN... --protocol recall --curves FILE.png"
        )
    if strips and not (runs and protocol == "generation"):
        raise UsageError(
            "--strips draws what several runs imagine: wm eval RUN... --protocol generation --strips FILE.png"
        )
    if runs and (settings or seed or device or controller or dynamics or episodes or experience):
        raise UsageError("RUN... puts together what is there; to evaluate one run anew give it as --run.")
    if runs and strips:
        from wmcli.stages.memory import draw_strips

        draw_strips(runs, strips)
    if runs and of_dynamics:
        _dynamics_table(runs, protocol, curves, as_json)
        return
    if priors:
        from wmcli.stages.evaluate import compare_priors

        if not runs:
            raise UsageError("--priors draws what several runs learned: wm eval RUN... --priors FILE.png")
        compare_priors(runs, priors)
    if runs and by:
        _sorted_by(runs, by, as_json)
        return
    if runs:
        _together(runs, against, as_json)
        return
    if against:
        raise UsageError("--against compares with runs that stand before it: wm eval RUN... --against RUN")
    if dynamics and not of_dynamics:
        raise UsageError("--dynamics is for protocols that score dynamics; otherwise give the --controller.")
    if experience and protocol in ("returns", "gridworld"):
        raise UsageError(f"--experience is for the memory tasks: --protocol {protocol} plays episodes of its own.")
    from wmcli.stages.context import open_context
    from wmcli.stages.evaluate import evaluate as stage

    changes = overrides(settings, {"seed": seed, "training.device": device})
    if protocol != "returns":
        changes = overrides(changes, {"evaluation.episodes": episodes})
        create = may_create(dynamics)
        context = open_context(run, preset, changes, create=create, quiet=quiet, fresh=fresh, force=force)
        if protocol == "gridworld":
            from wmcli.stages.grid_world import evaluate_grid_world

            artifact = evaluate_grid_world(context, dynamics=dynamics)
        else:
            from wmcli.stages.memory import evaluate_memory

            artifact = evaluate_memory(context, measure=protocol, dynamics=dynamics, experience=experience)
        if not (as_json or quiet):
            rows = _dynamics_rows([artifact], protocol)
            draw_beside(rows, list(rows[0]), artifact.name)
    else:
        create = may_create(controller)
        context = open_context(run, preset, changes, create=create, quiet=quiet, fresh=fresh, force=force)
        artifact = stage(context, controller=controller, episodes=episodes)
        if not (as_json or quiet):
            show_score(artifact)
    if as_json:
        who = identity(artifact)
        emit_json(artifact.metrics | {"artifact": who["path"], "name": who["name"], "digest": who["digest"]})
    else:
        line(str(artifact.path))


# -- one score --------------------------------------------------------------------------------------------------------


def show_score(evaluation: Artifact) -> None:
    """Our score beside the published ones, for a person who watches; a log has the stage's own line."""
    metrics = evaluation.metrics
    title = f"{evaluation.name}, episodes: {metrics['episodes']}"
    if metrics["stderr"] is not None:
        title += f", standard error of the mean: {metrics['stderr']:.2g}"
    columns = ["name", "score", "lowest", "highest", "runs", "human_normalized", "caveat"]
    rows = score_rows(evaluation)
    draw_beside(rows, [column for column in columns if any(row.get(column) is not None for row in rows)], title)


def score_rows(evaluation: Artifact) -> list[Row]:
    """This run first, then what is published for its game, or else a random policy. Lowest and highest are of runs."""
    from wmcli.metrics.atari import game_table

    metrics = evaluation.metrics
    published_rows = game_table(evaluation.manifest["environment"]["id"], [metrics["mean"]])
    if published_rows is None:
        ours = {"name": "this run", "score": metrics["mean"], "runs": 1}
        return [ours, {"name": "random", "score": metrics["random_mean"]}]
    return [
        {
            "name": row.name,
            "score": row.score,
            "lowest": row.low if row.runs > 1 else None,
            "highest": row.high if row.runs > 1 else None,
            "runs": row.runs,
            "human_normalized": row.human_normalized,
            "caveat": row.caveat or None,
        }
        for row in published_rows
    ]


# -- many runs --------------------------------------------------------------------------------------------------------


def _dynamics_rows(evaluations: list[Artifact], protocol: str) -> Sequence[Row]:
    if protocol == "gridworld":
        from wmcli.stages.grid_world import table
    else:
        from wmcli.stages.memory_table import table
    return table(evaluations)


def _dynamics_table(runs: list[Path], protocol: str, curves: Path | None, as_json: bool) -> None:
    from wmcli.stages.evaluate import newest_evaluations

    evaluations = newest_evaluations(runs, protocol)
    if curves:
        from wmcli.stages.memory_table import draw_curves

        draw_curves(evaluations, curves)
    rows = _dynamics_rows(evaluations, protocol)
    if as_json:
        emit_json(rows)
    else:
        answer(rows, list(rows[0]))


def _together(runs: list[Path], against: list[Path] | None, as_json: bool) -> None:
    from wmcli.stages.evaluate import aggregate

    result = aggregate(runs, against or None)
    if as_json:
        emit_json(result)
    else:
        answer(aggregate_rows(result), ["statistic", "value", "low", "high"])


def _sorted_by(runs: list[Path], keys: list[str], as_json: bool) -> None:
    from wmcli.stages.evaluate import compare_settings

    rows = compare_settings(runs, keys)
    if as_json:
        emit_json(rows)
    else:
        answer(rows, list(rows[0]))


def aggregate_rows(result: Mapping[str, Any]) -> list[Row]:
    """A row for each number of an aggregate, and for each estimate `{"value", "low", "high"}` with its 95 % interval.

    Single scores and the performance profile are only in the JSON.
    """
    rows: list[Row] = []
    for name, value in result.items():
        if not isinstance(value, Mapping):
            rows.append({"statistic": name, "value": value})
        elif "value" in value:
            rows.append({"statistic": name, **value})
    return rows
