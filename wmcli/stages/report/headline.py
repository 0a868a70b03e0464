"""Section 1: what came out, beside published scores, and what makes the two comparable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wmcli.assemble import parameter_counts
from wmcli.config import preset_header
from wmcli.errors import UsageError, WmError
from wmcli.metrics import atari
from wmcli.progress import duration, some
from wmcli.report.document import Block, Facts, Fold, Section, Text, Tile, Tiles
from wmcli.report.tables import short
from wmcli.spaces import Spaces
from wmcli.stages.protocols import PROTOCOLS
from wmcli.stages.report.blocks import count, drawing, span, table, task
from wmcli.stages.report.runs import ReportedRun
from wmcli.stages.report.study import Study
from wmcli.stages.scores import NORMALIZED, RETURN, differences, differences_of_models
from wmcli.stages.variants import AGGREGATES, games_table, with_interval

MOST_TILES = 4  # of scores
MOST_COUNTED = 6  # variants whose parameters are counted
NARROW = 4  # games with a column each; of more, each has a row
ATARI_STEPS = 100_000
_UNITS = {NORMALIZED: "interquartile mean, human-normalized", RETURN: "interquartile mean return"}
_NO_SCORES = {
    *("task", "model", "with", "backbone", "run", "environment"),
    *("parameters", "updates", "runs", "episodes", "batch", "tokens", "ms per step", "peak MB"),
}
"""Columns of the protocols' tables that say what was scored."""
TITLES = {
    "training": "Training games",
    "gridworld": "Grid world",
    "held-out": "Held-out episodes",
    "generation": "Generation",
    "recall": "Recall",
    "reward": "Reward",
    "doors": "Doors",
    "probe": "Probe",
}


def headline(study: Study) -> Section:
    """Return tiles, scores beside published ones, and what makes them comparable."""
    blocks: list[Block] = []
    if study.left_out:
        blocks.append(
            Text(f"Left out, {count(len(study.left_out), 'run')}:\n\n" + "\n\n".join(study.left_out), "warning")
        )
    blocks += [Tiles(tuple(_tiles(study))), *_scores(study)]
    for protocol in study.protocols:
        blocks += _protocol(study, protocol)
    if facts := list(_comparability(study)):
        blocks.append(Facts(tuple(facts)))
    if sources := _sources(study):
        blocks.append(Fold("Published scores: papers and data", (Facts(sources),)))
    if lines := [*study.notes.lines, *_differences(study)]:
        blocks.append(Text("\n\n".join(dict.fromkeys(lines)), "note"))
    return Section("headline", "Results", tuple(blocks))


# -- tiles ------------------------------------------------------------------------------------------------------------


def _tiles(study: Study) -> Iterator[Tile]:
    yield from (list(_score_tiles(study)) or list(_protocol_tiles(study)))[:MOST_TILES]
    steps = [score.metrics["total_steps"] for members in study.scores.values() for score in members]
    steps = steps or [each.about["steps"] for each in study.runs if each.about["steps"]]
    if steps:
        yield Tile("Environment steps", span(steps), "decisions of a run")
    seconds = [study.seconds(each) for each in study.runs]
    yield Tile("Work", duration(float(np.mean(seconds))), "of a run, on average" if len(seconds) > 1 else "")
    yield from _parameter_tile(study)
    if len(study.runs) > 1:
        games = f", {count(len(study.environments), 'environment')}" if len(study.environments) > 1 else ""
        yield Tile("Runs", f"{len(study.runs)}", count(len(study.variants), "variant") + games)


def _protocol_tiles(study: Study) -> Iterator[Tile]:
    """Yield the first numbers of each protocol's table, of the first row."""
    for name in study.protocols:
        try:
            rows = PROTOCOLS[name].table(study.of_protocol(name))
        except (WmError, KeyError):  # `_protocol` says so
            continue
        cells = [(key, cell) for key, cell in rows[0].items() if key not in _NO_SCORES and not key.startswith("paper")]
        model = rows[0].get("model", rows[0].get("backbone", rows[0].get("run", "")))
        for key, cell in cells[:2]:
            yield Tile(f"{TITLES[name]}: {key}", short(cell), str(model) if len(rows) > 1 else "")


def _score_tiles(study: Study) -> Iterator[Tile]:
    """Yield the score of each variant: of one environment its mean return, of several the interquartile mean."""
    games = list(study.games())
    several = len(study.scores) > 1
    if len(games) > 1:
        for row in study.rows:
            if row["table"] == AGGREGATES and row["statistic"] == "iqm" and row["variant"] in study.scores:
                yield Tile(row["variant"] if several else "All games", *_estimate(row, _UNITS[row["unit"]]))
        return
    for environment, rows in games:
        for row in rows:
            if row["variant"] not in study.scores:
                continue
            (first, *others) = study.scores[row["variant"]]
            name = row["variant"] if several else f"Mean return, {task(environment)}"
            if others:
                yield Tile(name, *_estimate(row, "return" if several else ""))
            else:
                stderr = first.metrics["stderr"]
                spread = "" if stderr is None else f"± {stderr:.2g}, standard error over "
                yield Tile(name, short(row["value"]), spread + count(first.metrics["episodes"], "episode"))


def _estimate(row: Mapping[str, Any], unit: str) -> tuple[str, str]:
    details = [unit] if unit else []
    if row["low"] is not None:
        details.append(f"95 % interval {row['low']:.3g} to {row['high']:.3g}")
    return f"{row['value']:.3g}", ", ".join([*details, count(row["runs"], "run")])


def _parameter_tile(study: Study) -> Iterator[Tile]:
    """Yield the number of parameters of the first run of each variant."""
    firsts = [members[0] for members in study.variants.values()][:MOST_COUNTED]
    counts = [found for each in firsts if (found := _parameters(each))]
    if not counts:
        return
    totals = [each["total"] for each in counts]
    models = [f"{name} {_millions(number)}" for name, number in counts[0].items() if name != "total"]
    alike = len(set(totals)) == 1
    low, high = _millions(min(totals)), _millions(max(totals))
    detail = ", ".join(models) if alike else f"of {count(len(totals), 'variant')}"
    yield Tile("Parameters", low if alike else f"{low} to {high}", detail)


def _parameters(run: ReportedRun) -> dict[str, int]:
    """Return the parameters of each model and of all, from settings alone; empty where they cannot be counted."""
    try:
        counts = parameter_counts(run.settings, Spaces.of(run.last.manifest["environment"]))
    except (WmError, KeyError, TypeError, ValueError):
        return {}
    models = {name: number for name, number in counts.items() if "." not in name}
    # A tokenizer that the dynamics model trains further counts in both.
    inside = ["dynamics", "tokenizer"] in [name.split(".") for name in counts]
    both = models.get("tokenizer", 0) if inside else 0
    return {"total": sum(models.values()) - both} | {name: number for name, number in models.items() if number}


def _millions(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1e5 else f"{number:,}"


# -- tables -----------------------------------------------------------------------------------------------------------


def _scores(study: Study) -> list[Block]:
    """Return our returns beside published ones."""
    if study.apart:
        return [Text(f"These scores cannot stand in one table: {study.apart}", "warning"), _each(study)]
    games = list(study.games())
    if not games:
        if study.protocols:
            return []
        return [Text(f"Nothing is scored yet: make an evaluation with `wm eval --run {study.runs[0].path}`.", "note")]
    exact = [row for _, rows in games for row in rows]
    caption = "Mean returns, with 95 % intervals over runs where there are several."
    if len(games) > NARROW:
        rows = [row | {"environment": task(row["environment"])} for row in games_table(study.rows)]
        return [table("scores", rows, caption, exact=exact)]
    cells: dict[str, dict[str, Any]] = {}
    for environment, of_game in games:
        for row in of_game:
            line = cells.setdefault(row["variant"], {"name": row["variant"]})
            line["mean return" if len(games) == 1 else task(environment)] = with_interval(row)
            if len(games) == 1:
                line |= {key.replace("_", "-"): row[key] for key in ("human_normalized", "steps")}
                line["runs"] = row["runs"] if row["variant"] in study.scores or (row["runs"] or 0) > 1 else None
    ours = frozenset(place for place, name in enumerate(cells) if name in study.scores)
    return [table("scores", list(cells.values()), caption, exact=exact, ours=ours)]


def _each(study: Study) -> Block:
    rows = [
        {"run": each.name, "environment": task(each.environment), "mean return": score.metrics["mean"]}
        | {"standard error": score.metrics["stderr"], "episodes": score.metrics["episodes"]}
        for each in study.runs
        if (score := each.score) is not None
    ]
    return table("scores", rows)


def _protocol(study: Study, name: str) -> Iterator[Block]:
    """Yield table and curves of a protocol other than returns."""
    evaluations, protocol = study.of_protocol(name), PROTOCOLS[name]
    title = TITLES.get(name, name)
    try:
        rows = protocol.table(evaluations)
    except (WmError, KeyError) as error:
        yield Text(f"{title}: no table: {error}", "warning")
        return
    exact = [{"run": str(each.run), "evaluation": each.name} | each.metrics for each in evaluations]
    yield table(f"protocol-{name}", rows, f"{title} (`wm compare --protocol {name}`).", exact=exact)
    if protocol.pools and (lines := differences_of_models(study.scores_of(name), protocol.pools(evaluations))):
        yield Text("\n\n".join(f"{title}: {line}" for line in lines), "note")
    if protocol.plot_curves is None:
        return
    for place, environment in enumerate(dict.fromkeys(each.metrics["environment"] for each in evaluations)):
        mine = [each for each in evaluations if each.metrics["environment"] == environment]
        try:
            figure = protocol.plot_curves(mine)
        except (WmError, KeyError) as error:
            yield Text(f"{title}, {task(environment)}: no curves: {error}", "warning")
            continue
        alt = f"Error curves of {task(environment)}, a line for each model."
        yield drawing(figure, f"protocol-{name}-{place}", alt, title)


# -- comparability ----------------------------------------------------------------------------------------------------


def _comparability(study: Study) -> Iterator[tuple[str, str]]:
    """Yield what the scores are, and for each published column why it may not be comparable."""
    scores = [score for members in study.scores.values() for score in members]
    if scores:
        episodes = span([score.metrics["episodes"] for score in scores])
        temperatures = sorted(
            {score.evaluation.settings.get("evaluation", {}).get("temperature") for score in scores}, key=str
        )
        stated = [f"{each:g}" for each in temperatures if each is not None]
        sampled = f", actions sampled at temperature {some(stated)}" if stated else ""
        yield "Scored", f"mean return of {episodes} whole episodes of the trained controller{sampled}"
        yield "Rules", "; ".join(dict.fromkeys(_rules(score.evaluation.manifest["environment"]) for score in scores))
        if any(atari.game_name(score.environment) for score in scores):
            steps = span([score.metrics["total_steps"] for score in scores])
            yield "Steps", f"{steps} decisions of a run; published scores are after {ATARI_STEPS:,}"
    for preset in dict.fromkeys(each.preset for each in study.runs):
        try:
            header = preset_header(preset)
        except UsageError as error:
            yield "Preset", f"{preset}: {error}"
            continue
        yield "Preset", f"{preset}: {header['about']}. Paper: {header['paper']}"
    for column in _published(study):
        if column.caveat:
            yield column.name, column.caveat
    if unpublished := [task(each) for each, _ in study.games() if atari.game_name(each) is None]:
        yield "Published", f"no scores of {some(unpublished)} are published; random is random play, measured here"


def _published(study: Study) -> list[atari.Column]:
    """Return the published columns in our tables."""
    known = [rows for environment, rows in study.games() if atari.game_name(environment) is not None]
    names = {row["variant"] for rows in known for row in rows} - study.scores.keys()
    return [column for column in atari.columns() if column.name in names]


def _sources(study: Study) -> tuple[tuple[str, str], ...]:
    """Return the paper and the data of each published column."""
    return tuple((each.name, f"{each.paper}; {each.scores} ({each.data})") for each in _published(study))


def _rules(block: Mapping[str, Any]) -> str:
    """Return the rules of test episodes as a manifest states them."""
    test = block.get("test") or {}
    parts = [f"protocol {block.get('protocol')}"]
    if "life_loss_ends_episode" in test:
        parts.append("a lost life ends the episode" if test["life_loss_ends_episode"] else "whole games")
    if (sticky := block.get("repeat_action_probability")) is not None:
        parts.append(f"sticky actions {sticky:g}" if sticky else "no sticky actions")
    if limit := test.get("time_limit"):
        parts.append(f"time limit {limit:,}" + (" emulator frames" if "life_loss_ends_episode" in test else " steps"))
    if pixels := block.get("size"):
        parts.append(f"frames of {pixels} x {pixels} pixels")
    return ", ".join(parts)


def _differences(study: Study) -> Sequence[str]:
    """Return what differs between our own scores."""
    if not study.scores or study.apart:
        return ()
    return differences(list(study.scores.values()))
