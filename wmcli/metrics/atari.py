"""Published Atari-100k scores, and the human-normalized score built on them.

The numbers stand in `atari100k.json` beside this file, each column with its paper, where its data is, and its caveats.
Human and random scores are those of the Atari-100k literature (30-minute human condition).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from wmcli.config import did_you_mean
from wmcli.errors import UsageError


class Column(NamedTuple):
    """Where one column of published scores comes from."""

    name: str
    kind: str  # "reference" (random, human), "system" or "ablation"
    paper: str
    data: str  # the public place the numbers were taken from
    scores: str  # what one number is: a run, a mean of runs
    caveat: str  # why it may not compare with ours; empty if nothing is known


class Row(NamedTuple):
    """One line of a game's table."""

    name: str
    score: float  # mean over runs, raw return
    low: float  # lowest run
    high: float  # highest run
    runs: int  # how many values were published (1 where only a mean was)
    human_normalized: float
    caveat: str


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("wmcli.metrics").joinpath("atari100k.json").read_text(encoding="utf-8"))


@functools.cache
def _spellings() -> dict[str, str]:
    return {game.lower(): game for game in games()}


def games() -> list[str]:
    """The 26 games of Atari-100k, in the usual (alphabetical) order and spelling."""
    return list(_data()["scores"]["random"])


def columns(kind: str | None = None) -> list[Column]:
    """Every published column, or those of one kind: "reference", "system" or "ablation"."""
    every = [Column(name, **about) for name, about in _data()["columns"].items()]
    return [column for column in every if kind is None or column.kind == kind]


def game_name(environment: str) -> str | None:
    """The Atari-100k game behind an environment id, or None if it is none of the 26.

    `ALE/Pong-v5`, `PongNoFrameskip-v4`, `PongDeterministic-v0`, `Pong` and `pong` are all "Pong"; `ALE/MsPacman-v5` and
    `ms_pacman` are "MsPacman". An id of another namespace (`wm/Pong-v0`) is another environment.
    """
    namespace, slash, name = environment.rpartition("/")
    if slash and namespace != "ALE":
        return None
    name = re.sub(r"-v\d+$", "", name)
    name = re.sub(r"(NoFrameskip|Deterministic)$", "", name)
    return _spellings().get(name.replace("_", "").lower())


def reference_runs(game: str, column: str) -> list[float]:
    """The published scores of `column` on `game` (a name or an environment id): one per run, or one mean.

    Empty where the column has no such game. Raises UsageError for an unknown column.
    """
    scores = _data()["scores"]
    if column not in scores:
        raise UsageError(f"no published scores called '{column}'; {did_you_mean(column, scores)}")
    name = game_name(game)
    return list(scores[column].get(name, ())) if name else []


def reference(game: str, column: str) -> float | None:
    """The mean of `reference_runs`, or None where there are none."""
    runs = reference_runs(game, column)
    return float(np.mean(runs)) if runs else None


def human_normalized(game: str, score: float) -> float | None:
    """(score - random) / (human - random): 0 is a random policy, 1 the human. None if `game` is not of Atari-100k."""
    random, human = reference(game, "random"), reference(game, "human")
    if random is None or human is None:
        return None
    return (score - random) / (human - random)


def normalized_runs(column: str) -> dict[str, np.ndarray]:
    """A column's human-normalized scores, game -> (runs,): what `wmcli.metrics.statistics` takes."""
    table = {game: reference_runs(game, column) for game in games()}
    return {game: np.array([human_normalized(game, run) for run in runs]) for game, runs in table.items() if runs}


def game_table(game: str, ours: Sequence[float] = (), *, name: str = "this run") -> list[Row] | None:
    """The published numbers of one game, ours first: "the paper's number beside ours".

    `ours` holds one score per run of ours and may be empty. Ablations are left out. None if `game` is none of the 26.
    """
    if game_name(game) is None:
        return None
    rows = [_row(name, game, ours, "")] if len(ours) else []
    for column in columns():
        runs = reference_runs(game, column.name)
        if runs and column.kind != "ablation":
            rows.append(_row(column.name, game, runs, column.caveat))
    return rows


def references(environment: str, random_mean: float) -> list[dict[str, Any]]:
    """List what stands beside a score: what was published for the game, or else the random policy that was measured.

    Returns:
        Rows of name, score, lowest and highest run where several are known, number of runs, human_normalized, caveat.
    """
    table = game_table(environment)
    if table is None:
        return [{"name": "random", "score": random_mean}]
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
        for row in table
    ]


def _row(name: str, game: str, runs: Sequence[float], caveat: str) -> Row:
    score = float(np.mean(runs))
    normalized = human_normalized(game, score)
    assert normalized is not None, f"{game} has no reference scores"
    return Row(name, score, float(min(runs)), float(max(runs)), len(runs), normalized, caveat)
