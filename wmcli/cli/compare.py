"""`wm compare`: compare the evaluations of several runs, and published scores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wmcli.cli.evaluate import ProtocolName
from wmcli.cli.options import Format, Json, Quiet, complete_key, refuse_both_forms
from wmcli.cli.output import EXACT, Form, Row, answer, chosen, emit_json, filled, remark
from wmcli.cli.schema import describe_comparison
from wmcli.errors import UsageError
from wmcli.progress import Progress

if TYPE_CHECKING:
    from wmcli.metrics.atari import Column
    from wmcli.stages.protocol import Protocol
    from wmcli.stages.scores import Score

PICTURES = "Pictures"
Groups = Mapping[str, Sequence["Score"]]


def complete_column() -> list[str]:
    from wmcli.metrics.atari import columns

    return [column.name for column in columns()]


def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Runs with evaluations.", show_default=False)
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare the variants of a sweep: games, aggregates, cost.",
        ),
    ] = None,
    published: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Put published Atari-100k scores beside, as a variant with intervals. Repeatable. Without runs,"
            " compare published scores alone. Without this option tables have the values of all systems.",
            autocompletion=complete_column,
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
            " value of --by, or the errors of --protocol generation or recall. Several games get a file each.",
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
    band: Annotated[
        Literal["bootstrap", "stderr", "range"],
        typer.Option(
            help="Band of --curves around the mean return of several runs: its 95 % bootstrap interval, one standard"
            " error to either side, or the lowest to the highest run.",
            rich_help_panel=PICTURES,
        ),
    ] = "bootstrap",
    profiles: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw performance profiles (.png): the share of runs above each score, with a line for each value of"
            " --by, for RUN... and --against, and for --published.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    intervals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw mean, median, interquartile mean and optimality gap of the same, with 95 % intervals (.png).",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    improvement: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the probability of improvement (.png): over the first of our variants, and over each published"
            " one. Without runs: of the first published one over each other.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    priors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the attention priors that the runs learned (.png).", rich_help_panel=PICTURES
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
    losses: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the losses of dynamics models on held-out episodes over updates (.png), dotted in training, with"
            " a line for each run or value of --by: training.held_out_every.",
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
    cost: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show seconds of an epoch by stage instead, and draw them (.png): of RUN... by --by, or by preset over"
            " seeds, or of the variants of --sweep. Runs need no evaluation.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    as_json: Json = False,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Compare the evaluations of several runs, and published scores: tables,
    statistics, pictures.

    Examples:
        wm compare runs/a runs/b --against runs/c --against runs/d
        wm compare runs/* --by backbone.kind --curves returns.png
        wm compare runs/* --published REM --published IRIS
        wm compare --published REM --published IRIS --profiles profiles.png
        wm compare runs/* --format latex
        wm compare runs/mamba2 runs/gru --protocol gridworld
        wm compare --sweep backbones.toml --profiles profiles.png
        wm compare runs/rem-1 runs/rem-2 runs/iris-1 --cost epochs.png
    """
    refuse_both_forms(as_json, form)
    if cost is not None:
        if (
            published
            or against
            or curves
            or profiles
            or priors
            or strips
            or protocol != "returns"
            or (sweep and (runs or by))
        ):
            raise UsageError("--cost shows seconds of an epoch alone: give RUN... with --by, or --sweep, and no more.")
        _compare_cost(runs or [], sweep, by or (), cost, as_json, form, Progress(quiet))
        return
    drawn = {
        "curves": curves,
        "profiles": profiles,
        "intervals": intervals,
        "improvement": improvement,
        "priors": priors,
        "attention": attention,
        "losses": losses,
        "strips": strips,
    }
    pictures = {name: path for name, path in drawn.items() if path is not None}
    _check_sources(runs, sweep, published, pictures, bool(against or by or protocol != "returns"))
    if improvement is not None and sweep is None and not (by or against) and len(published or ()) + bool(runs) < 2:
        raise UsageError("--improvement needs two to compare: add --by, --against or --published.")
    style = _style(over, band, curves is not None and protocol == "returns")
    columns, progress = _columns(published), Progress(quiet)
    if not runs:
        if sweep is None:
            _draw({}, columns, pictures, style, progress)
            _compare_published({}, columns, as_json, form, progress)
        else:
            _compare_sweep(sweep, columns, pictures, style, as_json, form, progress)
        return
    from wmcli.stages.protocols import PROTOCOLS
    from wmcli.stages.scores import differences, read_scores

    choice = PROTOCOLS[protocol]
    _check_protocol(choice, pictures, against=against, by=by, published=published)
    every = read_scores([*runs, *(against or ())], protocol, progress)
    scores, others = every[: len(runs)], every[len(runs) :]
    _draw_runs(scores, others, choice, columns, by or (), pictures, style, progress)
    if columns:
        groups = _groups(scores, others, by or ())
        for line in differences(list(groups.values()), by or ()):
            progress.warn(line)
        _compare_published(groups, columns, as_json, form, progress)
        return
    rows, statistics = _compare(scores, others, choice, by, progress)
    if as_json:
        emit_json(describe_comparison(protocol, scores, others, rows, statistics))
    elif choice.needs == "dynamics" or chosen(form) in EXACT:
        answer(rows, list(rows[0]), form)
    elif by:
        _show_groups(rows, by, form)
    else:
        _show_statistics(rows, form)


# -- checks, before any work ------------------------------------------------------------------------------------------


def _check_sources(
    runs: list[Path] | None,
    sweep: Path | None,
    published: list[str] | None,
    pictures: Mapping[str, Path],
    chosen_runs: bool,
) -> None:
    """Refuse options that do not go with what is compared, and pictures that cannot be written.

    Args:
        runs: RUN...
        sweep: --sweep.
        published: --published.
        pictures: Files by the name of their option.
        chosen_runs: Whether --against, --by or --protocol was given.
    """
    from wmcli.report.files import check_target

    if runs and sweep is not None:
        raise UsageError("--sweep names the runs itself: omit RUN.")
    if not runs and sweep is None and not published:
        raise UsageError("no runs: name some, the file of a sweep with --sweep, or published scores with --published.")
    of_runs = chosen_runs or not pictures.keys().isdisjoint(("priors", "strips"))
    if not runs and of_runs:
        what = "--published alone compares" if sweep is None else "--sweep compares"
        raise UsageError(f"{what} variants: omit --against, --by, --protocol, --priors and --strips, or name runs.")
    if not runs and sweep is None and "curves" in pictures:
        raise UsageError("--curves is for runs: name some, or omit it; published scores are its dashed lines.")
    for picture in pictures.values():
        check_target(picture, (".png", ".svg", ".pdf"))


def _style(over: str, band: str, has_curves: bool) -> dict[str, Any]:
    """Return the options of curves of returns. Refuses them without such curves."""
    for flag, value, default in (("over", over, "steps"), ("band", band, "bootstrap")):
        if value != default and not has_curves:
            raise UsageError(f"--{flag} {value} is for curves of returns: add --curves FILE.")
    return {"over": over, "band": band}


def _columns(names: Sequence[str] | None) -> list[Column]:
    """Return the published columns of these names, of which there is none twice."""
    from wmcli.metrics.atari import column_of

    columns = [column_of(name) for name in names or ()]
    if twice := [column.name for place, column in enumerate(columns) if column in columns[:place]]:
        raise UsageError(f"--published {twice[0]} is given twice: give it once.")
    return columns


def _check_protocol(
    protocol: Protocol,
    pictures: Mapping[str, Path],
    *,
    against: list[Path] | None,
    by: list[str] | None,
    published: list[str] | None,
) -> None:
    """Refuse options that exclude each other, or that evaluations of this protocol do not have."""
    if against and (by or "curves" in pictures):
        raise UsageError("--against compares two sets of runs: omit --by and --curves.")
    of_returns = {"against": against, "by": by, "published": published, **pictures}
    given = [f"--{name}" for name, value in of_returns.items() if value and name not in ("curves", "strips")]
    if protocol.needs == "dynamics" and given:
        raise UsageError(f"--protocol {protocol.name} scores dynamics: omit {', '.join(given)}.")
    if "curves" in pictures and protocol.needs == "dynamics" and protocol.plot_curves is None:
        raise UsageError(f"--protocol {protocol.name} has no curves: omit --curves.")
    if "strips" in pictures and protocol.draw_strips is None:
        raise UsageError(
            f"--protocol {protocol.name} has no strips: add --protocol generation, recall, reward or doors."
        )


# -- pictures ---------------------------------------------------------------------------------------------------------


def _draw_runs(
    scores: Sequence[Score],
    against: Sequence[Score],
    protocol: Protocol,
    columns: Sequence[Column],
    by: Sequence[str],
    pictures: Mapping[str, Path],
    style: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Draw the pictures of runs that have a file."""
    from wmcli.report.plots import write_figure
    from wmcli.stages.score_pictures import compare_priors

    if "priors" in pictures:
        compare_priors(scores, pictures["priors"])
    if "attention" in pictures:
        from wmcli.stages.attention import draw_attention

        draw_attention(scores, by, pictures["attention"], progress)
    if "losses" in pictures:
        from wmcli.stages.loss_pictures import draw_losses

        draw_losses(scores, by, pictures["losses"], progress)
    if "strips" in pictures and protocol.draw_strips:
        protocol.draw_strips([score.evaluation for score in scores], pictures["strips"])
    if protocol.needs == "controller":
        lines = None if by else {str(score.run): [score] for score in scores}
        _draw(_groups(scores, against, by), columns, pictures, style, progress, lines)
    elif "curves" in pictures and protocol.plot_curves:
        write_figure(pictures["curves"], protocol.plot_curves([score.evaluation for score in scores]))


def _groups(scores: Sequence[Score], against: Sequence[Score], by: Sequence[str]) -> Groups:
    """Return scores by the name of their variant: values of settings, one of two sides, or one for all."""
    from wmcli.stages.scores import label_groups

    if by:
        return label_groups(scores, by)
    return {"RUN": scores, "--against": against} if against else {"all runs": scores}


def _draw(
    groups: Groups,
    columns: Sequence[Column],
    pictures: Mapping[str, Path],
    style: Mapping[str, Any],
    progress: Progress,
    lines: Groups | None = None,
) -> None:
    """Draw the pictures of scores that have a file. Curves have `lines` of their own, or those of the groups."""
    from wmcli.stages.pools import pool_variants
    from wmcli.stages.score_pictures import draw_curves, draw_improvement, draw_intervals, draw_profiles

    drawers = {"profiles": draw_profiles, "intervals": draw_intervals, "improvement": draw_improvement}
    if not pictures.keys().isdisjoint(drawers):
        pools = pool_variants(groups, columns)
        for name, draw in drawers.items():
            if name in pictures:
                draw(pools, pictures[name], progress)
    if "curves" in pictures:
        draw_curves(lines or groups, pictures["curves"], progress, published=columns, **style)


# -- sweeps and published scores --------------------------------------------------------------------------------------


def _compare_sweep(
    file: Path,
    columns: Sequence[Column],
    pictures: Mapping[str, Path],
    style: Mapping[str, Any],
    as_json: bool,
    form: Form | None,
    progress: Progress,
) -> None:
    """Compare the variants of a sweep: tables of games, aggregates and cost, and pictures."""
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.tables import compare_sweep

    found = compare_sweep(read_sweep(file), progress, columns or None)
    _draw(found.scores, columns, pictures, style, progress)
    if found.missing:
        progress.warn(f"{len(found.missing)} runs have no evaluation yet: {', '.join(found.missing[:5])}, ...")
    _show_variants(found.rows, columns, as_json, form, found.missing)


def _compare_published(
    groups: Groups, columns: Sequence[Column], as_json: bool, form: Form | None, progress: Progress
) -> None:
    """Compare published scores with each other, and with runs if there are some."""
    from wmcli.stages.variants import compare_variants

    _show_variants(compare_variants(groups, {}, progress, columns), columns, as_json, form)


def _show_variants(
    rows: list[dict[str, Any]], columns: Sequence[Column], as_json: bool, form: Form | None, missing: Sequence[str] = ()
) -> None:
    """Print the tables of variants, and what there is to say of the published scores in them."""
    from wmcli.stages import variants

    if as_json:
        emit_json({"rows": rows, "missing": missing})
    elif chosen(form) in EXACT:
        answer(rows, variants.COLUMNS, form)
    else:
        aggregates, cost = (variants.variants_table(rows, table) for table in (variants.AGGREGATES, variants.COST))
        for table in filter(None, (variants.games_table(rows), aggregates, variants.improvement_table(rows), cost)):
            answer(table, list(dict.fromkeys(key for row in table for key in row)), form)
        remark(variants.notes(rows, columns), form)


# -- cost -------------------------------------------------------------------------------------------------------------


def _compare_cost(
    runs: Sequence[Path],
    sweep: Path | None,
    by: Sequence[str],
    picture: Path,
    as_json: bool,
    form: Form | None,
    progress: Progress,
) -> None:
    """Show and draw the seconds of an epoch by variant and stage."""
    from wmcli.report.cost import draw_epochs, epoch_table
    from wmcli.report.files import check_target
    from wmcli.stages.cost import COLUMNS, STAGES, epoch_costs, group_runs
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.tables import begun_runs

    check_target(picture, (".png", ".svg", ".pdf"))
    if not runs and sweep is None:
        raise UsageError("no runs: name some, or the file of a sweep with --sweep.")
    variants = group_runs(runs, by) if sweep is None else begun_runs(read_sweep(sweep))
    rows = epoch_costs(variants, progress)
    draw_epochs(rows, "variant", STAGES, picture)
    if as_json:
        emit_json(rows)
    elif chosen(form) in EXACT:
        answer(rows, COLUMNS, form)
    else:
        table = epoch_table(rows, "variant")
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
    remark(
        [f"{name}: {caveat}" for name, caveat in {row["name"]: row["caveat"] for row in rows}.items() if caveat], form
    )


def _show_groups(rows: list[dict[str, Any]], keys: list[str], form: Form | None) -> None:
    """Print a row for each value of some settings."""
    cells = [row | {"mean": _with_interval(row["mean"], row["low"], row["high"])} for row in rows]
    answer(cells, [*keys, "mean", "unit", *filled(rows, ["human_normalized"]), "runs", "episodes", "steps"], form)


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
