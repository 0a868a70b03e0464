"""Section 2: returns over steps and over time, and the training of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from wmcli.errors import UsageError
from wmcli.progress import some
from wmcli.report.document import Block, Fold, Row, Section, Text
from wmcli.report.plots import compared_curves
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.report.blocks import count, drawing, table, task
from wmcli.stages.report.runs import ReportedRun
from wmcli.stages.report.study import Study
from wmcli.stages.score_pictures import Over, plot_lines

SHOWN_GAMES, MOST_GAMES = 2, 6
"""Environments whose curves are shown at once, and those that have curves."""

OVER: Mapping[Over, str] = {"steps": "environment steps", "minutes": "minutes of work"}
"""Horizontal axes, in words."""


def curves(study: Study) -> Section | None:
    """Return the curves, or None where nothing was logged."""
    returns, training = list(_returns(study)), _training(study)
    is_all = len(study.runs) == 1 and not any(isinstance(block, Row) for block in returns)
    if training:
        of = f", of {len(study.detailed)} of {len(study.runs)} runs" if len(study.detailed) < len(study.runs) else ""
        returns += training if is_all else [Fold(f"Losses and other metrics of each stage{of}", training)]
    return Section("curves", "Learning", tuple(returns)) if returns else None


def _returns(study: Study) -> Iterator[Block]:
    """Yield the returns of each environment over steps and over minutes, and their numbers."""
    scored = {name: [each for each in members if study.log(each).points] for name, members in study.variants.items()}
    environments = list(dict.fromkeys(each.environment for members in scored.values() for each in members))
    drawn = [_curves(study, scored, place, name) for place, name in enumerate(environments[:MOST_GAMES])]
    yield from drawn[:SHOWN_GAMES]
    if folded := drawn[SHOWN_GAMES:]:
        yield Fold(f"Curves of {count(len(folded), 'more environment')}", tuple(folded))
    if left := environments[MOST_GAMES:]:
        yield Text(
            f"Curves of {count(len(left), 'environment')} are left out, and in the table alone:"
            f" {some(list(map(task, left)))}."
        )
    rows = [
        {"variant": name, "run": each.name, "environment": task(each.environment)} | point._asdict()
        for name, members in scored.items()
        for each in members
        for point in study.log(each).points
    ]
    if rows:
        yield Fold("Numbers of all evaluations", (table("returns-over-training", rows),))


def _curves(study: Study, scored: Mapping[str, Sequence[ReportedRun]], place: int, environment: str) -> Block:
    """Return the curves of one environment side by side, over steps and over minutes."""
    runs = {name: [each for each in members if each.environment == environment] for name, members in scored.items()}
    runs = {name: members for name, members in runs.items() if members}
    groups = {name: [each.scores[PROTOCOL] for each in members] for name, members in runs.items()}
    points = {name: [study.log(each).points for each in members] for name, members in runs.items()}
    where, drawings = task(environment), []
    if all(len(each) < 2 for members in points.values() for each in members):
        return Text(f"{where}: each run was evaluated once, so its return has no curve.")
    for over, words in OVER.items():
        try:
            figure = plot_lines(groups, points, over)
        except UsageError as error:
            return Text(f"{where}: no curves: {error}", "warning")
        alt = f"Mean return in {where} over {words}, a line for each variant."
        drawings.append(drawing(figure, f"returns-{over}-{place}", alt, f"{where}, over {words}"))
    return Row(tuple(drawings))


def _training(study: Study) -> tuple[Block, ...]:
    """Return the metrics of each stage over updates, a line for each run that is shown in detail."""
    shown = {study.label(each): study.log(each).curves for each in study.detailed}
    figures = []
    for place, stage in enumerate(dict.fromkeys(stage for found in shown.values() for stage in found)):
        lines = {name: found[stage] for name, found in shown.items() if stage in found}
        alt = f"Losses and other metrics of {stage} over updates" + (
            ", a line for each run." if len(shown) > 1 else "."
        )
        figures.append(drawing(compared_curves(lines, title=stage), f"training-{place}", alt))
    return tuple(figures)
