"""`wm compare`: compare the evaluations of several runs, and published scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from wmcli.cli.compare_tables import show_groups, show_statistics, show_variants
from wmcli.cli.evaluate import ProtocolName
from wmcli.cli.options import Format, Json, Quiet, complete_key, refuse_both_forms
from wmcli.cli.output import EXACT, Form, answer, chosen, emit_json
from wmcli.cli.schema import describe_comparison
from wmcli.errors import UsageError
from wmcli.progress import Progress

if TYPE_CHECKING:
    from wmcli.metrics.atari import Column
    from wmcli.stages.protocol import Protocol
    from wmcli.stages.scores import Score
    from wmcli.sweeps.plan import Sweep

PICTURES = "Pictures"
Groups = Mapping[str, Sequence["Score"]]
OF_PUBLISHED = {"profiles", "intervals", "improvement"}
"""Pictures of scores, without the runs that they are of."""
OF_FRAMES = {"strips"}
"""Pictures made of pixels, which are written as .png alone."""


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
            help="Compare the variants of a sweep, a file or the name of a suite: games, aggregates, cost, or the table"
            " of --protocol.",
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
            help="Evaluations to compare: returns, training, gridworld, held-out, generation, recall, reward, doors or"
            " probe.",
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
            help="Draw curves in one picture (.png, .svg or .pdf): returns over environment steps, with a line for"
            " each run or value of --by, or the errors of --protocol generation or recall. Several games get a file"
            " each.",
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
            help="Draw performance profiles (.png, .svg or .pdf): the share of runs above each score, with a line"
            " for each value of --by, for RUN... and --against, and for --published.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    intervals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw mean, median, interquartile mean and optimality gap of the same, with 95 % intervals"
            " (.png, .svg or .pdf).",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    improvement: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the probability of improvement (.png, .svg or .pdf): over the first of our variants, and over"
            " each published one. Without runs: of the first published one over each other.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    priors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the attention priors that the runs learned (.png, .svg or .pdf): over updates, or with --by"
            " the last ones of each value.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    attention: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw attention priors as matrices, and the attention paid to stored episodes (.png, .svg or .pdf),"
            " with a row for each run or value of --by.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    losses: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the losses of dynamics models on held-out episodes over updates (.png, .svg or .pdf), dotted"
            " in training, with a line for each run or value of --by: training.held_out_every.",
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
            help="Show seconds of an epoch by stage instead, and draw them (.png, .svg or .pdf): of RUN... by --by,"
            " or by preset over seeds, or of the variants of --sweep. Runs need no evaluation.",
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
        wm compare --sweep s4wm-rooms:cpu --protocol generation --strips rooms.png
        wm compare runs/rem-1 runs/rem-2 runs/iris-1 --cost epochs.png
    """
    refuse_both_forms(as_json, form)
    drawn = {
        "curves": curves,
        "profiles": profiles,
        "intervals": intervals,
        "improvement": improvement,
        "priors": priors,
        "attention": attention,
        "losses": losses,
        "strips": strips,
        "cost": cost,
    }
    pictures = {name: path for name, path in drawn.items() if path is not None}
    _check_sources(runs or (), sweep, against or (), by or (), published or (), pictures, protocol)
    columns, progress = _columns(published), Progress(quiet)
    if cost is not None:
        _compare_cost(runs or (), sweep, by or (), cost, as_json, form, progress)
        return
    from wmcli.stages.protocols import PROTOCOLS

    choice = PROTOCOLS[protocol]
    _check_protocol(choice, pictures, against or by or published)
    style = _style(over, band, choice if "curves" in pictures else None)
    if sweep is not None:
        found = _of_sweep(sweep, protocol, progress)
    else:
        found = _of_runs(runs or (), against or (), by or (), protocol, progress)
    known = _known(columns, found.scores, progress)
    _draw(found, choice, known, pictures, style, progress)
    if choice.needs == "dynamics":
        evaluations = [score.evaluation for score in found.scores]
        if choice.pools:
            from wmcli.stages.scores import differences_of_models

            for line in differences_of_models(found.scores, choice.pools(evaluations)):
                progress.warn(line)
        rows = choice.table(evaluations)
        if as_json:
            emit_json(describe_comparison(protocol, found.scores, (), rows, {}))
        else:
            answer(rows, list(rows[0]), form)
    elif sweep is not None or known:
        show_variants(_compare_variants(found, known, progress), known, found.missing, as_json, form)
    else:
        _compare_scores(found, protocol, as_json, form, progress)


class _Found(NamedTuple):
    """The scores to compare."""

    scores: Sequence[Score]
    """Of RUN... or of all runs of a sweep."""
    groups: Groups
    """The same by variant: values of settings, one of two sides, or one for all."""
    lines: Groups
    """The same by the name of their line in pictures."""
    against: Sequence[Score] = ()
    missing: Sequence[str] = ()
    """Names of runs of a sweep that are left out."""
    sweep: Sweep | None = None
    by: Sequence[str] = ()
    """Settings that make the groups."""


def _of_sweep(file: Path, protocol: str, progress: Progress) -> _Found:
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.tables import sweep_scores

    sweep = read_sweep(file)
    groups, missing = sweep_scores(sweep, protocol, progress)
    scores = [score for members in groups.values() for score in members]
    return _Found(scores, groups, groups, missing=missing, sweep=sweep)


def _of_runs(
    runs: Sequence[Path], against: Sequence[Path], by: Sequence[str], protocol: str, progress: Progress
) -> _Found:
    from wmcli.stages.scores import label_groups, read_scores

    every = read_scores([*runs, *against], protocol, progress)
    scores, others = every[: len(runs)], every[len(runs) :]
    if by:
        groups = label_groups(scores, by)
        return _Found(scores, groups, groups, by=by)
    groups = {"RUN": scores, "--against": others} if others else {"all runs": scores} if scores else {}
    return _Found(scores, groups, {str(score.run): [score] for score in scores}, others)


# -- checks, before any work ------------------------------------------------------------------------------------------


def _check_sources(
    runs: Sequence[Path],
    sweep: Path | None,
    against: Sequence[Path],
    by: Sequence[str],
    published: Sequence[str],
    pictures: Mapping[str, Path],
    protocol: str,
) -> None:
    """Refuse options that do not go with what is compared, and pictures that cannot be written."""
    two_sources = sweep is not None and (runs or against or by)
    if "cost" in pictures and (published or against or len(pictures) > 1 or protocol != "returns" or two_sources):
        raise UsageError("--cost shows seconds of an epoch alone: give RUN... with --by, or --sweep, and no more.")
    if two_sources:
        raise UsageError("--sweep names runs and groups itself: omit RUN, --against and --by.")
    if not runs and sweep is None and not published:
        raise UsageError("no runs: name some, the file of a sweep with --sweep, or published scores with --published.")
    if not runs and sweep is None:
        of_runs = [name for name in pictures if name not in OF_PUBLISHED]
        if against or by or of_runs or protocol != "returns":
            given = ", ".join(f"--{name}" for name in of_runs) or "--against, --by and --protocol"
            raise UsageError(f"{given}: for runs, and --published alone has none: name some, or a sweep.")
    if against and (by or not pictures.keys() <= OF_PUBLISHED):
        raise UsageError("--against compares two sets of runs: omit --by and pictures of single runs.")
    if "improvement" in pictures and sweep is None and not (by or against) and len(published) + bool(runs) < 2:
        raise UsageError("--improvement needs two to compare: add --by, --against or --published.")
    _check_files(pictures)


def _check_files(pictures: Mapping[str, Path]) -> None:
    """Refuse pictures that cannot be written, or that one file would have to hold."""
    from wmcli.report.files import check_target
    from wmcli.report.plots import SUFFIXES

    options: dict[Path, str] = {}
    for name, picture in pictures.items():
        try:
            check_target(picture, (".png",) if name in OF_FRAMES else SUFFIXES)
        except UsageError as error:
            raise UsageError(f"--{name}: {error}") from None
        if other := options.get(picture.resolve()):
            raise UsageError(f"--{other} and --{name} name one file, {pictures[other]}: name two.")
        options[picture.resolve()] = name


def _style(over: str, band: str, curves: Protocol | None) -> dict[str, Any]:
    """Return the options of curves of returns. Refuses them without such `curves`."""
    if over != "steps" and (curves is None or curves.needs != "controller"):  # training games have no minutes
        raise UsageError(f"--over {over} is for curves of returns: add --curves FILE.")
    if band != "bootstrap" and (curves is None or curves.needs == "dynamics"):
        raise UsageError(f"--band {band} is for curves of returns: add --curves FILE.")
    return {"over": over, "band": band}


def _columns(names: Sequence[str] | None) -> list[Column]:
    """Return the published columns of these names, of which there is none twice."""
    from wmcli.metrics.atari import column_of

    columns = [column_of(name) for name in names or ()]
    if twice := [column.name for place, column in enumerate(columns) if column in columns[:place]]:
        raise UsageError(f"--published {twice[0]} is given twice: give it once.")
    return columns


def _known(columns: Sequence[Column], scores: Sequence[Score], progress: Progress) -> Sequence[Column]:
    """Leave all columns out, with a warning, where none of our runs plays a game that has published scores."""
    from wmcli.metrics.atari import game_name

    environments = dict.fromkeys(score.environment for score in scores) if columns else {}
    if not environments or any(map(game_name, environments)):
        return columns
    progress.warn(f"no published scores of {', '.join(environments)}: --published is left out")
    return ()


def _check_protocol(protocol: Protocol, pictures: Mapping[str, Path], sides: Sequence[Any] | None) -> None:
    """Refuse `sides`, which are --against, --by or --published, and pictures that this protocol does not have."""
    if protocol.needs == "dynamics":
        if sides or not pictures.keys().isdisjoint(OF_PUBLISHED):
            pictured = "".join(f", --{name}" for name in sorted(OF_PUBLISHED & pictures.keys()))
            omitted = f"--against, --by, --published{pictured}"
            raise UsageError(f"--protocol {protocol.name} scores dynamics: omit {omitted}.")
        if "curves" in pictures and protocol.plot_curves is None:
            raise UsageError(f"--protocol {protocol.name} has no curves: omit --curves.")
    if "strips" in pictures and protocol.draw_strips is None:
        raise UsageError(
            f"--protocol {protocol.name} has no strips: add --protocol generation, recall, reward or doors."
        )


# -- pictures ---------------------------------------------------------------------------------------------------------


def _draw(
    found: _Found,
    protocol: Protocol,
    columns: Sequence[Column],
    pictures: Mapping[str, Path],
    style: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Draw the pictures that have a file."""
    from wmcli.stages.pools import pool_variants
    from wmcli.stages.score_pictures import (
        compare_priors,
        draw_curves,
        draw_improvement,
        draw_intervals,
        draw_profiles,
    )

    of_scores = {"profiles": draw_profiles, "intervals": draw_intervals, "improvement": draw_improvement}
    if not pictures.keys().isdisjoint(of_scores):
        pools = pool_variants(found.groups, columns)
        for name, draw in of_scores.items():
            if name in pictures:
                draw(pools, pictures[name], progress)
    if "priors" in pictures:
        compare_priors(found.groups, pictures["priors"], progress)
    if "attention" in pictures:
        from wmcli.stages.attention import draw_attention

        draw_attention(found.lines, pictures["attention"], progress)
    if "losses" in pictures:
        from wmcli.stages.loss_pictures import draw_losses

        draw_losses(found.lines, pictures["losses"], progress)
    if "curves" in pictures and protocol.needs != "dynamics":
        draw_curves(found.lines, pictures["curves"], progress, published=columns, **style)
    elif "curves" in pictures or "strips" in pictures:
        _draw_by_task(found, protocol, pictures)


def _draw_by_task(found: _Found, protocol: Protocol, pictures: Mapping[str, Path]) -> None:
    """Draw curves and strips of evaluations of dynamics. Of several tasks each has a file of its own."""
    from wmcli.report.plots import write_figure
    from wmcli.stages.score_pictures import picture_files

    tasks = list(dict.fromkeys(score.environment for score in found.scores))
    files = {name: picture_files(path, tasks) for name, path in pictures.items()}
    for task in tasks:
        lines = [[score for score in members if score.environment == task] for members in found.lines.values()]
        if "curves" in pictures and protocol.plot_curves:
            alike = [score.evaluation for members in lines for score in members]
            write_figure(files["curves"][task], protocol.plot_curves(alike))
        if "strips" in pictures and protocol.draw_strips:  # a model a row, of a variant the first run
            protocol.draw_strips([members[0].evaluation for members in lines if members], files["strips"][task])


# -- tables -----------------------------------------------------------------------------------------------------------


def _compare_variants(found: _Found, columns: Sequence[Column], progress: Progress) -> list[dict[str, Any]]:
    """Return the rows of our variants, and of published ones."""
    from wmcli.stages.scores import differences
    from wmcli.stages.variants import compare_variants
    from wmcli.sweeps.tables import sweep_records

    if found.sweep is not None:
        return compare_variants(found.groups, sweep_records(found.sweep), progress, columns or None)
    for line in differences(list(found.groups.values()), found.by):
        progress.warn(line)
    return compare_variants(found.groups, {}, progress, columns)


def _compare_scores(found: _Found, protocol: str, as_json: bool, form: Form | None, progress: Progress) -> None:
    """Show runs with their statistics, or a row for each value of some settings."""
    from wmcli.stages.aggregate import aggregate, compare_settings

    if found.by:
        rows, statistics = compare_settings(found.scores, found.by, progress), {}
    else:
        statistics = aggregate(found.scores, found.against, progress)
        rows = statistics.pop("rows")
    if as_json:
        emit_json(describe_comparison(protocol, found.scores, found.against, rows, statistics))
    elif chosen(form) in EXACT:
        answer(rows, list(rows[0]), form)
    elif found.by:
        show_groups(rows, found.by, form)
    else:
        show_statistics(rows, form)


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
    from wmcli.stages.cost import COLUMNS, STAGES, epoch_costs, group_runs
    from wmcli.sweeps.plan import read_sweep
    from wmcli.sweeps.tables import begun_runs

    variants = group_runs(runs, by) if sweep is None else begun_runs(read_sweep(sweep), progress)
    rows = epoch_costs(variants, progress)
    draw_epochs(rows, "variant", STAGES, picture)
    if as_json:
        emit_json(rows)
    elif chosen(form) in EXACT:
        answer(rows, COLUMNS, form)
    else:
        table = epoch_table(rows, "variant")
        answer(table, list(dict.fromkeys(key for row in table for key in row)), form)
