"""Published Atari-100k scores, and human-normalized scores.

The numbers are in `atari100k.json` beside this file, with the paper, the data and the caveats of each column. Human and
random scores are those of the Atari-100k literature (30-minute human condition).
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

DEFAULT_KINDS = ("reference", "system")
"""Kinds of columns that stand beside a score without being named."""


class Column(NamedTuple):
    """The origin of one column of published scores."""

    name: str
    kind: str
    """"reference" (random, human), "system", "ablation", or "copy": a system as the paper of another one prints it."""
    paper: str
    data: str
    """Public place of the numbers."""
    scores: str
    """The meaning of one number: a run, or a mean of runs."""
    caveat: str
    """Why the scores may not be comparable with ours, or empty."""


class Row(NamedTuple):
    """One row of a game's table. Scores are returns."""

    name: str
    score: float
    """Mean over runs."""
    low: float
    """Lowest run."""
    high: float
    """Highest run."""
    runs: int
    """Number of published values, 1 if only a mean was."""
    human_normalized: float
    caveat: str


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("wmcli.metrics").joinpath("atari100k.json").read_text(encoding="utf-8"))


@functools.cache
def _spellings() -> dict[str, str]:
    return {game.lower(): game for game in games()}


def games() -> list[str]:
    """Return the 26 games of Atari-100k, in alphabetical order."""
    return list(_data()["scores"]["random"])


def columns(kind: str | None = None) -> list[Column]:
    """Return all published columns, or those of one kind (see `Column`)."""
    every = [Column(name, **about) for name, about in _data()["columns"].items()]
    return [column for column in every if kind is None or column.kind == kind]


def column_of(name: str) -> Column:
    """Return the published column of a name.

    Raises:
        UsageError: There is no such column.
    """
    about = _data()["columns"]
    if name not in about:
        raise UsageError(f"no published scores called '{name}'; {did_you_mean(name, about)}")
    return Column(name, **about[name])


def has_runs(column: str) -> bool:
    """Return whether the scores of single runs are published, not only a mean of each game."""
    return any(len(runs) > 1 for runs in _data()["scores"][column_of(column).name].values())


def game_name(environment: str) -> str | None:
    """Return the Atari-100k game of an environment id, or None if it is none of the 26.

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
    """Return the published scores of a column on a game, one per run or one mean; empty if there are none.

    Args:
        game: Name, or id of the environment.
        column: Name of the column.

    Raises:
        UsageError: There is no such column.
    """
    scores, name = _data()["scores"][column_of(column).name], game_name(game)
    return list(scores.get(name, ())) if name else []


def reference(game: str, column: str) -> float | None:
    """Return the mean of `reference_runs`, or None if there are none."""
    runs = reference_runs(game, column)
    return float(np.mean(runs)) if runs else None


def human_normalized(game: str, score: float) -> float | None:
    """Return (score - random) / (human - random), or None if the game is not of Atari-100k."""
    random, human = reference(game, "random"), reference(game, "human")
    if random is None or human is None:
        return None
    return (score - random) / (human - random)


def normalized_runs(column: str) -> dict[str, np.ndarray]:
    """Return the human-normalized scores of a column, game -> (runs,), as `wmcli.metrics.statistics` takes them."""
    table = {game: reference_runs(game, column) for game in games()}
    return {game: np.array([human_normalized(game, run) for run in runs]) for game, runs in table.items() if runs}


def game_table(game: str, ours: Sequence[float] = (), *, name: str = "this run") -> list[Row] | None:
    """Return the scores of one game of random play, people and systems, or None if it is none of the 26.

    Args:
        game: Name, or id of the environment.
        ours: Scores of our runs, for a first row; may be empty.
        name: Of that row.
    """
    if game_name(game) is None:
        return None
    rows = [_row(name, game, ours, "")] if len(ours) else []
    for column in columns():
        runs = reference_runs(game, column.name)
        if runs and column.kind in DEFAULT_KINDS:
            rows.append(_row(column.name, game, runs, column.caveat))
    return rows


def references(environment: str, random_mean: float | None) -> list[dict[str, Any]]:
    """Return the published scores of an environment, or else the measured score of random play, None if it was not.

    Returns:
        Rows of name, score, lowest and highest run (None of a single value), runs, human_normalized and caveat.
    """
    table = game_table(environment)
    if table is None:
        return [] if random_mean is None else [{"name": "random", "score": random_mean}]
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
