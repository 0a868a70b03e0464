"""Section 3: several runs: aggregates, performance profiles, and which variant is better."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from wmcli.errors import UsageError
from wmcli.metrics import statistics
from wmcli.progress import some
from wmcli.report.document import Block, Section, Text
from wmcli.report.plots import improvement
from wmcli.stages.pools import improvements, pool_variants, share_environments
from wmcli.stages.report.blocks import drawing, table, task
from wmcli.stages.report.study import Study
from wmcli.stages.score_pictures import STATISTICS, plot_intervals, plot_profiles
from wmcli.stages.variants import AGGREGATES, PROBABILITY, variants_table, with_interval

MOST_COMPARED = 6
"""Variants that are compared in pairs."""


def several(study: Study) -> Section | None:
    """Return the statistics of several runs, or None of one run."""
    if len(study.runs) < 2:
        return None
    blocks = [*_aggregates(study), *_profiles(study), *_improvement(study), _runs(study)]
    return Section("runs", "All runs", tuple(blocks))


def _aggregates(study: Study) -> Iterator[Block]:
    rows = [row for row in study.rows if row["table"] == AGGREGATES]
    if not any(row["variant"] in study.scores for row in rows):
        if study.apart:
            yield Text(f"No statistics over all runs: {study.apart}")
        elif study.scores:
            yield Text(
                "No statistics over environments: returns of different environments have no common unit without"
                " published scores of people and of random play, and variants need environments in common."
            )
        return
    figure = plot_intervals([row for row in rows if row["variant"] in study.scores], len(study.environments))
    yield drawing(figure, "aggregates", "Statistics over all runs of each variant, with their intervals.")
    readable = [
        {STATISTICS.get(key, key): value for key, value in row.items() if key != "unit"}
        for row in variants_table(rows, AGGREGATES)
    ]
    ours = frozenset(place for place, row in enumerate(readable) if row["variant"] in study.scores)
    yield table("aggregates", readable, _unit(rows[0]["unit"]), exact=rows, ours=ours)


def _unit(unit: str) -> str:
    return (
        f"Unit: {unit}. Intervals of 95 % are by stratified bootstrap over runs (`wm compare`); published systems stand"
        " beside without."
    )


def _profiles(study: Study) -> Iterator[Block]:
    if study.apart or sum(map(len, study.scores.values())) < 2:
        return
    try:
        figure = plot_profiles(share_environments(pool_variants(study.scores, ()), study.notes))
    except UsageError as error:
        yield Text(f"No performance profiles: {error}")
        return
    caption = "Performance profiles: the share of runs above each score, with 95 % intervals."
    yield drawing(figure, "profiles", "Share of runs above each score, a line for each variant.", caption)


def _improvement(study: Study) -> Iterator[Block]:
    """Yield how probably a run of one variant beats one of another, for all pairs."""
    over_first = {
        row["variant"]: statistics.Estimate(row["value"], row["low"], row["high"])
        for row in study.rows
        if row["unit"] == PROBABILITY and row["value"] is not None
    }
    if not over_first:
        return
    pools = share_environments(pool_variants(study.scores, ()), study.notes)
    (first, *others) = list(pools)[:MOST_COMPARED]
    pairs = {(other, first): over_first[other] for other in others}
    later = [(other, one) for one, other in combinations(others, 2)]
    pairs |= improvements(pools, later, np.random.default_rng(0))
    exact = [{"variant": one, "over": other} | estimate._asdict() for (one, other), estimate in pairs.items()]
    rows = [
        {"variant": row["variant"], "over": row["over"], "probability of improvement": with_interval(row)}
        for row in (each | {"unit": PROBABILITY} for each in exact)
    ]
    caption = "Probability that a run of one variant scores more than a run of the other, ties counting half."
    yield drawing(improvement(pairs), "improvement", "Probability of improvement of pairs of variants.", caption)
    yield table("improvement", rows, exact=exact)
    if left := list(pools)[MOST_COMPARED:]:
        yield Text(f"Only the first {MOST_COMPARED} variants are compared in pairs; left out: {some(left)}.")


def _runs(study: Study) -> Block:
    rows, exact = [], []
    for variant, members in study.variants.items():
        for each in members:
            about, score = each.about, each.score
            rows.append(
                {
                    "run": each.name,
                    "variant": variant if len(study.variants) > 1 else None,
                    "environment": task(each.environment),
                    "seed": each.settings.seed,
                    "status": about["status"],
                    "score": None if score is None else score.metrics["mean"],
                    "standard error": None if score is None else score.metrics["stderr"],
                    "episodes": None if score is None else score.metrics["episodes"],
                    "steps": about["steps"],
                    "hours": study.seconds(each) / 3600,
                }
            )
            exact.append(
                rows[-1] | {key: about[key] for key in ("preset", "evaluation", "bytes")} | {"path": str(each.path)}
            )
    return table("runs", rows, "Every run. Scores are mean returns of its final evaluation.", exact=exact)
