"""`wm eval`: score a controller, or put the scores of several runs together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
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
    Format,
    Fresh,
    Json,
    Preset,
    Quiet,
    RunFolder,
    Seed,
    Set,
    complete_key,
    may_create,
    overrides,
    refuse_both_forms,
)
from wmcli.cli.output import EXACT, Form, Row, answer, chosen, draw_beside, emit_json, published
from wmcli.errors import UsageError
from wmcli.progress import Progress

if TYPE_CHECKING:
    from wmcli.artifacts import Artifact

MANY_PANEL = "Many runs"


def evaluate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Runs already scored, to put together.", show_default=False),
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
            autocompletion=complete_key,
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
            help="Draw the curves of RUN... in one picture (.png): returns over environment steps, a line for each run"
            " or value of --by; or what --protocol generation or recall measured.",
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
            metavar="NAME",
            help="returns of the controller's episodes; gridworld: errors and cost of dynamics on cells; or what"
            " dynamics remember of a memory task: generation, recall, reward, doors, probe.",
        ),
    ] = "returns",
    fresh: Fresh = False,
    force: Force = False,
    as_json: Json = False,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Score the controller over complete episodes, or put the scores of several runs together.

    Examples:
        wm eval --run runs/catch --episodes 100
        wm eval --run runs/s4wm --protocol generation
        wm eval runs/a runs/b --against runs/c --against runs/d
        wm eval runs/* --by backbone.kind --curves returns.png
        wm eval runs/* --format latex
        wm eval --protocol gridworld runs/mamba2 runs/gru
    """
    refuse_both_forms(as_json, form)
    of_dynamics = protocol != "returns"  # the other protocols score dynamics
    if by and (against or of_dynamics or not runs):
        raise UsageError("--by groups the scores of several runs: wm eval RUN... --by KEY, without --against.")
    if of_dynamics and (controller or against or priors):
        raise UsageError(f"--protocol {protocol} scores dynamics: leave out --controller, --against and --priors.")
    if curves and (against or not (runs and protocol in ("returns", "generation", "recall"))):
        raise UsageError(
            "--curves draws several runs of returns, generation or recall, without --against: wm eval RUN... --curves"
            " FILE.png"
        )
    if strips and not (runs and protocol == "generation"):
        raise UsageError(
            "--strips draws what several runs imagine: wm eval RUN... --protocol generation --strips FILE.png"
        )
    if runs and (settings or seed or device or controller or dynamics or episodes or experience):
        raise UsageError("RUN... puts together what is there; to evaluate one run anew give it as --run.")
    if form and not runs:
        raise UsageError("--format is for the table of several runs: wm eval RUN... --format csv")
    if runs:
        from wmcli.report.files import check_target

        for picture in filter(None, (curves, priors, strips)):
            check_target(picture, (".png", ".svg", ".pdf"))
        progress = Progress(quiet)
        if priors:
            from wmcli.stages.aggregate import compare_priors

            compare_priors(runs, priors)
        if strips:
            from wmcli.stages.memory import draw_strips

            draw_strips(runs, strips)
        if of_dynamics:
            _dynamics_table(runs, protocol, curves, progress, as_json, form)
            return
        if curves:
            from wmcli.stages.aggregate import draw_returns

            draw_returns(runs, by or (), curves, progress)
        if by:
            _grouped_by(runs, by, progress, as_json, form)
        else:
            _together(runs, against, progress, as_json, form)
        return
    if priors:
        raise UsageError("--priors draws what several runs learned: wm eval RUN... --priors FILE.png")
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
        published(artifact, as_json)
    else:
        create = may_create(controller)
        context = open_context(run, preset, changes, create=create, quiet=quiet, fresh=fresh, force=force)
        report_score(stage(context, controller=controller, episodes=episodes), as_json, quiet)


# -- one score --------------------------------------------------------------------------------------------------------


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
        draw_beside(rows, _filled(rows, columns), title)
    published(evaluation, as_json, references=beside)


def _filled(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """The columns that are not empty."""
    return [column for column in columns if any(row.get(column) is not None for row in rows)]


# -- many runs --------------------------------------------------------------------------------------------------------


def _dynamics_rows(evaluations: list[Artifact], protocol: str) -> Sequence[Row]:
    if protocol == "gridworld":
        from wmcli.stages.grid_world import table
    else:
        from wmcli.stages.memory_table import table
    return table(evaluations)


def _dynamics_table(
    runs: list[Path], protocol: str, curves: Path | None, progress: Progress, as_json: bool, form: Form | None
) -> None:
    from wmcli.stages.aggregate import read_scores

    evaluations = [score.evaluation for score in read_scores(runs, protocol, progress)]
    if curves:
        from wmcli.stages.memory_table import draw_curves

        draw_curves(evaluations, curves)
    rows = _dynamics_rows(evaluations, protocol)
    if as_json:
        emit_json(rows)
    else:
        answer(rows, list(rows[0]), form)


def _together(
    runs: list[Path], against: list[Path] | None, progress: Progress, as_json: bool, form: Form | None
) -> None:
    from wmcli.stages.aggregate import aggregate

    result = aggregate(runs, against or None, progress)
    if as_json:
        emit_json(result)
    elif chosen(form) in EXACT:
        answer(result["rows"], list(result["rows"][0]), form)
    else:
        parts = [[_readable(row) for row in part] for _, part in groupby(result["rows"], key=_part)]
        every = [row for part in parts for row in part]
        shown = _filled(every, ["name", "score", "human-normalized", "environment", "episodes", "steps", "runs"])
        answer([row for part in parts for row in (*part, None)][:-1], shown, form)


def _grouped_by(runs: list[Path], keys: list[str], progress: Progress, as_json: bool, form: Form | None) -> None:
    from wmcli.stages.aggregate import compare_settings

    rows = compare_settings(runs, keys, progress)
    if as_json:
        emit_json(rows)
    elif chosen(form) in EXACT:
        answer(rows, list(rows[0]), form)
    else:
        shown = [row | {"mean": _with_interval(row["mean"], row["low"], row["high"])} for row in rows]
        answer(shown, [*keys, "mean", "unit", "runs", "episodes", "steps"], form)


def _part(row: Row) -> str:
    """The part of the table a row stands in: runs, their aggregates, or what was published of one kind."""
    from wmcli.stages.aggregate import ALL

    if row["evaluation"]:
        return "runs"
    return ALL if row["name"] == ALL else f"{row['environment']} {row['statistic']}"


def _readable(row: Row) -> dict[str, Any]:
    """A row of `aggregate` in few columns, each number with its error."""
    from wmcli.stages.aggregate import ALL, NORMALIZED

    shown = {key: row[key] for key in ("name", "episodes", "steps", "runs")}
    shown["environment"] = re.sub(r"^(ALE|wm)/|-v\d+$", "", row["environment"])
    if ALL in (row["name"], row["environment"]):
        shown["name"] += f": {row['statistic'].replace('_', ' ')}"
    if row["stderr"] is not None:
        score = f"{row['score']:.4g} ± {row['stderr']:.2g}"
    else:
        score = _with_interval(row["score"], row["low"], row["high"])
    if row["unit"] == NORMALIZED:
        return shown | {"human-normalized": score}
    return shown | {"score": score, "human-normalized": row["human_normalized"]}


def _with_interval(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.4g}" if low is None or high is None else f"{value:.3g} ({low:.3g} to {high:.3g})"
