"""`wm compare`: compare the evaluations of several runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wmcli.cli.evaluate import ProtocolName
from wmcli.cli.options import Format, Json, Quiet, complete_key, refuse_both_forms
from wmcli.cli.output import EXACT, Form, Row, answer, chosen, emit_json, filled
from wmcli.cli.schema import describe_comparison
from wmcli.errors import UsageError
from wmcli.progress import Progress

if TYPE_CHECKING:
    from wmcli.stages.protocol import Protocol
    from wmcli.stages.score_pictures import Over
    from wmcli.stages.scores import Score

PICTURES = "Pictures"


def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Runs with evaluations.", show_default=False)
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare the variants of a sweep: games, aggregates, cost. Curves of several games get a file each.",
        ),
    ] = None,
    protocol: Annotated[
        ProtocolName,
        typer.Option(
            metavar="NAME",
            help="Evaluations to compare: returns, gridworld, held-out, generation, recall, reward, doors or probe.",
        ),
    ] = "returns",
    against: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Run to compare RUN... with. Repeatable.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Make a row for each value of this setting (section.key). Repeatable.",
            autocompletion=complete_key,
        ),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw curves in one picture (.png): returns over environment steps, with a line for each run or"
            " value of --by, or the errors of --protocol generation or recall.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    over: Annotated[
        Literal["steps", "minutes"],
        typer.Option(
            help="Horizontal axis of --curves for returns: environment steps, or minutes of work on the run.",
            rich_help_panel=PICTURES,
        ),
    ] = "steps",
    profiles: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw performance profiles (.png): the share of runs above each score, with a line for each value of"
            " --by, or for RUN... and --against.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    priors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the attention priors that the runs learned (.png): over updates, or with --by the last ones of"
            " each value.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    attention: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw attention priors as matrices, and the attention paid to stored episodes (.png), with a row for"
            " each run or value of --by.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    strips: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw a test episode as each run imagines it, below the real one (.png): --protocol generation,"
            " recall, reward or doors.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    as_json: Json = False,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Compare the evaluations of several runs: tables, statistics, pictures.

    Examples:
        wm compare runs/a runs/b --against runs/c --against runs/d
        wm compare runs/* --by backbone.kind --curves returns.png
        wm compare runs/* --format latex
        wm compare runs/mamba2 runs/gru --protocol gridworld
        wm compare --sweep backbones.toml --profiles profiles.png
    """
    refuse_both_forms(as_json, form)
    if sweep is not None:
        if runs or against or by or priors or attention or strips or protocol != "returns":
            raise UsageError(
                "--sweep names runs and groups itself: omit RUN, --against, --by, --protocol, --priors, --attention,"
                " --strips."
            )
        _compare_sweep(sweep, curves, over, profiles, as_json, form, Progress(quiet))
        return
    if not runs:
        raise UsageError("no runs: name some, or the file of a sweep with --sweep.")
    from wmcli.stages.protocols import PROTOCOLS
    from wmcli.stages.scores import read_scores

    choice = PROTOCOLS[protocol]
    pictures = {"curves": curves, "profiles": profiles, "priors": priors, "attention": attention, "strips": strips}
    _check(choice, against=against, by=by, **pictures)
    if over != "steps" and (curves is None or choice.needs == "dynamics"):
        raise UsageError(f"--over {over} is for curves of returns: add --curves FILE.")
    progress = Progress(quiet)
    every = read_scores([*runs, *(against or ())], protocol, progress)
    scores, others = every[: len(runs)], every[len(runs) :]
    _draw(scores, others, choice, by or (), progress, over, **pictures)
    rows, statistics = _compare(scores, others, choice, by, progress)
    if as_json:
        emit_json(describe_comparison(protocol, scores, others, rows, statistics))
    elif choice.needs == "dynamics" or chosen(form) in EXACT:
        answer(rows, list(rows[0]), form)
    elif by:
        _show_groups(rows, by, form)
    else:
        _show_statistics(rows, form)


def _check(
    protocol: Protocol,
    *,
    against: list[Path] | None,
    by: list[str] | None,
    curves: Path | None,
    profiles: Path | None,
    priors: Path | None,
    attention: Path | None,
    strips: Path | None,
) -> None:
    """Refuse options that exclude each other, and pictures that cannot be written."""
    if against and (by or curves):
        raise UsageError("--against compares two sets of runs: omit --by and --curves.")
    if protocol.needs == "dynamics" and (against or by or priors or profiles):
        raise UsageError(f"--protocol {protocol.name} scores dynamics: omit --against, --by, --priors and --profiles.")
    if curves and protocol.needs == "dynamics" and protocol.plot_curves is None:
        raise UsageError(f"--protocol {protocol.name} has no curves: omit --curves.")
    if strips and protocol.draw_strips is None:
        raise UsageError(
            f"--protocol {protocol.name} has no strips: add --protocol generation, recall, reward or doors."
        )
    from wmcli.report.files import check_target

    for picture in filter(None, (curves, profiles, priors, attention, strips)):
        check_target(picture, (".png", ".svg", ".pdf"))


def _draw(
    scores: Sequence[Score],
    against: Sequence[Score],
    protocol: Protocol,
    by: Sequence[str],
    progress: Progress,
    over: Over,
    *,
    curves: Path | None,
    profiles: Path | None,
    priors: Path | None,
    attention: Path | None,
    strips: Path | None,
) -> None:
    """Draw the pictures that have a file."""
    from wmcli.report.plots import write_figure
    from wmcli.stages.score_pictures import compare_priors, draw_profiles, draw_returns

    if profiles:
        draw_profiles(scores, against, by, profiles)
    if priors:
        compare_priors(scores, by, priors)
    if attention:
        from wmcli.stages.attention import draw_attention

        draw_attention(scores, by, attention, progress)
    if strips and protocol.draw_strips:
        protocol.draw_strips([score.evaluation for score in scores], strips)
    if curves and protocol.plot_curves:
        write_figure(curves, protocol.plot_curves([score.evaluation for score in scores]))
    elif curves:
        draw_returns(scores, by, curves, progress, over)


# -- sweeps -----------------------------------------------------------------------------------------------------------


def _compare_sweep(
    file: Path,
    curves: Path | None,
    over: Over,
    profiles: Path | None,
    as_json: bool,
    form: Form | None,
    progress: Progress,
) -> None:
    """Compare the variants of a sweep: tables of games, aggregates and cost, and pictures."""
    from wmcli.report.files import check_target
    from wmcli.stages.score_pictures import draw_group_profiles, draw_lines
    from wmcli.stages.variants import AGGREGATES, COLUMNS, COST, games_table, variants_table
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.tables import compare_sweep

    for picture in filter(None, (curves, profiles)):
        check_target(picture, (".png", ".svg", ".pdf"))
    found = compare_sweep(read_sweep(file), progress)
    if profiles:
        draw_group_profiles(found.scores, profiles)
    if curves:
        games = list(dict.fromkeys(score.environment for members in found.scores.values() for score in members))
        for game in games:
            lines = {
                variant: some
                for variant, members in found.scores.items()
                if (some := [score for score in members if score.environment == game])
            }
            name = re.sub(r"[^\w.]+", "-", game.rpartition("/")[2])
            draw_lines(lines, curves if len(games) == 1 else curves.with_stem(f"{curves.stem}-{name}"), progress, over)
    if found.missing:
        progress.warn(f"{len(found.missing)} runs have no evaluation yet: {', '.join(found.missing[:5])}, ...")
    if as_json:
        emit_json({"rows": found.rows, "missing": found.missing})
    elif chosen(form) in EXACT:
        answer(found.rows, COLUMNS, form)
    else:
        tables = [games_table(found.rows), variants_table(found.rows, AGGREGATES), variants_table(found.rows, COST)]
        for table in filter(None, tables):
            answer(table, list(dict.fromkeys(key for row in table for key in row)), form)


# -- tables -----------------------------------------------------------------------------------------------------------


def _compare(
    scores: Sequence[Score],
    against: Sequence[Score],
    protocol: Protocol,
    by: Sequence[str] | None,
    progress: Progress,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the table and the statistics of a comparison."""
    from wmcli.stages.aggregate import aggregate, compare_settings

    if protocol.needs == "dynamics":
        return protocol.table([score.evaluation for score in scores]), {}
    if by:
        return compare_settings(scores, by, progress), {}
    statistics = aggregate(scores, against, progress)
    return statistics.pop("rows"), statistics


def _show_statistics(rows: list[dict[str, Any]], form: Form | None) -> None:
    """Print each run's score and their statistics, with a line between parts."""
    parts = [[_readable(row) for row in part] for _, part in groupby(rows, key=_part)]
    every = [row for part in parts for row in part]
    columns = filled(every, ["name", "score", "human-normalized", "environment", "episodes", "steps", "runs"])
    answer([row for part in parts for row in (*part, None)][:-1], columns, form)


def _show_groups(rows: list[dict[str, Any]], keys: list[str], form: Form | None) -> None:
    """Print a row for each value of some settings."""
    cells = [row | {"mean": _with_interval(row["mean"], row["low"], row["high"])} for row in rows]
    answer(cells, [*keys, "mean", "unit", "runs", "episodes", "steps"], form)


def _part(row: Row) -> str:
    """Return the part of the table of a row: runs, their aggregates, or published scores of one kind."""
    from wmcli.stages.aggregate import ALL

    if row["evaluation"]:
        return "runs"
    return ALL if row["name"] == ALL else f"{row['environment']} {row['statistic']}"


def _readable(row: Row) -> dict[str, Any]:
    """Return a row of `aggregate` in fewer columns, each number with its error."""
    from wmcli.stages.aggregate import ALL
    from wmcli.stages.scores import NORMALIZED

    cells = {key: row[key] for key in ("name", "episodes", "steps", "runs")}
    cells["environment"] = re.sub(r"^(ALE|wm)/|-v\d+$", "", row["environment"])
    if ALL in (row["name"], row["environment"]):
        cells["name"] += f": {row['statistic'].replace('_', ' ')}"
    if row["stderr"] is not None:
        score = f"{row['score']:.4g} ± {row['stderr']:.2g}"
    else:
        score = _with_interval(row["score"], row["low"], row["high"])
    if row["unit"] == NORMALIZED:
        return cells | {"human-normalized": score}
    return cells | {"score": score, "human-normalized": row["human_normalized"]}


def _with_interval(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.4g}" if low is None or high is None else f"{value:.3g} ({low:.3g} to {high:.3g})"
