"""The tables of `wm compare` for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from wmcli.cli.output import EXACT, Form, Row, answer, chosen, emit_json, filled, remark

if TYPE_CHECKING:
    from wmcli.metrics.atari import Column


def show_variants(
    rows: list[dict[str, Any]], columns: Sequence[Column], missing: Sequence[str], as_json: bool, form: Form | None
) -> None:
    """Print the tables of variants, and what there is to say of the published scores in them."""
    from wmcli.stages import variants

    if as_json:
        emit_json({"rows": rows, "missing": missing})
    elif chosen(form) in EXACT:
        answer(rows, variants.COLUMNS, form)
    else:
        aggregates, cost = (variants.variants_table(rows, table) for table in (variants.AGGREGATES, variants.COST))
        for table in filter(None, (variants.games_table(rows), aggregates, variants.pairs_table(rows), cost)):
            answer(table, list(dict.fromkeys(key for row in table for key in row)), form)
        remark(variants.notes(rows, columns), form)


def show_statistics(rows: list[dict[str, Any]], form: Form | None) -> None:
    """Print each run's score and their statistics, with a line between parts."""
    parts = [[_readable(row) for row in part] for _, part in groupby(rows, key=_part)]
    every = [row for part in parts for row in part]
    columns = filled(every, ["name", "score", "human-normalized", "environment", "episodes", "steps", "runs"])
    answer([row for part in parts for row in (*part, None)][:-1], columns, form)
    remark(
        [f"{name}: {caveat}" for name, caveat in {row["name"]: row["caveat"] for row in rows}.items() if caveat], form
    )


def show_groups(rows: list[dict[str, Any]], keys: Sequence[str], form: Form | None) -> None:
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
