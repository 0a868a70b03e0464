"""Scores of several runs: which evaluation represents each run, and which scores are comparable."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.overview import epoch_of, last_of_patience
from wmcli.assemble import settings_of
from wmcli.config import canonical_json, did_you_mean
from wmcli.errors import ArtifactError, UsageError, WmError
from wmcli.progress import Progress, some
from wmcli.settings import flatten
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.training_games import TRAINING

NORMALIZED, RETURN, GAMES = "human-normalized score", "return", "games"
"""Units of scores."""


class NoEvaluationError(ArtifactError):
    """A run has no evaluation under a protocol."""


class Score(NamedTuple):
    """The evaluation that represents a run."""

    run: Path
    """As the user wrote it."""
    evaluation: Artifact

    @property
    def metrics(self) -> dict[str, Any]:
        return self.evaluation.metrics

    @property
    def environment(self) -> str:
        return str(self.metrics["environment"])


# -- choice of evaluations --------------------------------------------------------------------------------------------


def read_scores(runs: Sequence[Path], protocol: str, progress: Progress) -> list[Score]:
    """Find the evaluation that represents each run under a protocol.

    It is the newest final one, or else the newest interim one, with a warning. Evaluations of `wm run` before its last
    epoch are interim, by the epoch in the manifest, except for the last one of a run that `run.patience` ended. Without
    an epoch an evaluation is final.

    Args:
        runs: Run directories.
        protocol: Name of the protocol.
        progress: Gets the warnings.

    Raises:
        NoEvaluationError: A run has no such evaluation.
        ArtifactError: There is no such run, or a damaged evaluation of it may be the newest.
        UsageError: Two runs are one, by the same path, a link or a copy.
    """
    scores = [Score(path, _choose_evaluation(path, protocol, progress)) for path in runs]
    paths: dict[str, Path] = {}
    for path, evaluation in scores:
        if evaluation.digest in paths:
            raise UsageError(
                f"{paths[evaluation.digest]} and {path} hold the very same {evaluation.name}, which would count twice:"
                " leave one out."
            )
        paths[evaluation.digest] = path
    return scores


def _choose_evaluation(path: Path, protocol: str, progress: Progress) -> Artifact:
    run, interim, others = Run.open(path, create=False), None, set()
    command = f"wm eval --run {shlex.quote(str(path))}" + (f" --protocol {protocol}" if protocol != PROTOCOL else "")
    for version in reversed(run.versions("evaluation")):
        try:
            evaluation = run.get("evaluation", version)
        except ArtifactError as error:
            if interim is not None:
                continue
            raise ArtifactError(
                f"the newest evaluation of {path} cannot be read ({error}); make another with: {command} --force"
            ) from None
        if evaluation.metrics["protocol"] == protocol:
            if not _is_interim(evaluation):
                return evaluation
            if interim is None:
                with suppress(WmError):  # settings that cannot be read end no run
                    if (last := last_of_patience(run, protocol)) is not None:
                        return last
            interim = interim or evaluation
        else:
            others.add(evaluation.metrics["protocol"])
    if interim is None:
        choices = f" (it has some of --protocol {', '.join(sorted(others))})" if others else ""
        raise NoEvaluationError(f"{path} has no evaluation of --protocol {protocol}{choices}; make one with: {command}")
    progress.warn(
        f"{path} has no final evaluation: taking {interim.name}, of epoch {epoch_of(interim)} of"
        f" {settings_of(interim).run.epochs}."
    )
    return interim


def _is_interim(evaluation: Artifact) -> bool:
    """Return whether `wm run` made an evaluation before its last epoch."""
    epoch = epoch_of(evaluation)
    return epoch is not None and epoch < settings_of(evaluation).run.epochs


# -- comparability ----------------------------------------------------------------------------------------------------

_NOT_COMPARED = ("id", "action_meanings", "versions")  # keys of the environment
NOT_LEARNING = (
    "seed",
    "environment.id",
    "environment.protocol",
    "environment.size",
    "environment.processes",
    "environment.step_seconds",
    "collect.test_games",
    "dynamics.pop_calls",
    "evaluation.",
    "run.keep",
    "run.evaluate_",
    "training.device",
    "training.precision",
    "training.kernels",
    "training.cuda_graph",
    "training.deterministic",
    "training.replay",
    "training.frames_at_once",
    "training.threads",
    "training.checkpoint_seconds",
    "training.log_every",
    "training.held_out_every",
    "training.log_to",
)
"""Settings in which runs of one system may differ: seeds, tasks, and settings without influence on the weights."""


def differences(groups: Sequence[Sequence[Score]], by: Sequence[str] = ()) -> list[str]:
    """List the differences between the scores of several runs, one line each.

    Over all groups: episodes, environment steps, temperature of the policy, shared settings of acting. For each
    environment: the size of frames and the rest of its manifest block.
    Within a group: other settings that learning depends on, and runs that agree even in their seed.
    Not compared: versions of packages, device, precision, the number of parallel environments in evaluation.

    Args:
        groups: The scores, in groups that are pooled.
        by: Settings (`section.key`) that make the groups, and are not listed.

    Raises:
        UsageError: See `check_same_tasks`.
    """
    scores = [score for group in groups for score in group]
    check_same_tasks(scores)
    lines = [line for _, line in _differ_in_environment(scores)]
    conditions = [(score.run, _conditions(score)) for score in scores]
    for key in dict.fromkeys(key for _, values in conditions for key in values if key not in by):
        if line := _differ(key, [(run, values[key]) for run, values in conditions if key in values]):
            lines.append(line)
    for group in groups:
        lines += _differ_in_learning(group, "; group them with: --by {}")
    return lines


def check_same_tasks(scores: Sequence[Score]) -> None:
    """Raise UsageError if the environments have different protocols, or lives and time limits of test episodes."""
    protocols = {score.evaluation.manifest["environment"]["protocol"] for score in scores}
    if len(protocols) > 1:
        raise UsageError(
            f"these runs have different protocols of play ({', '.join(sorted(protocols))}); compare runs of one."
        )
    for key, line in _differ_in_environment(scores):
        if key == "test":
            raise UsageError(f"these runs have different test episodes: {line}; compare runs with the same.")


def _differ_in_environment(scores: Sequence[Score]) -> Iterator[tuple[str, str]]:
    """Yield the differing keys of the manifests' blocks of one environment, each with its line."""
    blocks = [(score.run, score.evaluation.manifest["environment"]) for score in scores]
    for environment in dict.fromkeys(block["id"] for _, block in blocks):
        alike = [(run, block) for run, block in blocks if block["id"] == environment]
        for key in dict.fromkeys(key for _, block in alike for key in block if key not in _NOT_COMPARED):
            if line := _differ(f"{environment} {key}", [(run, block[key]) for run, block in alike if key in block]):
                yield key, line


def _conditions(score: Score) -> dict[str, Any]:
    """Return the conditions of a score besides environment and weights, by name."""
    settings, metrics = settings_of(score.evaluation), score.metrics
    played = {"episodes": metrics["episodes"], "environment steps": metrics.get("total_steps")}
    if metrics["protocol"] == TRAINING.name:  # as collecting plays
        return played | {f"collect.{key}": getattr(settings.collect, key) for key in ("temperature", "epsilon")}
    acting = settings.acting
    section = "controller" if acting["controller"] else "dynamics"
    values = acting[section]
    return {
        **played,
        "evaluation.temperature": settings.evaluation.temperature,
        **{f"{section}.{key}": value for key, value in values.items()},
    }


def _differ(name: str, values: Sequence[tuple[Path, Any]]) -> str | None:
    """Return `episodes differ: 3 (runs/a), 5 (runs/b, runs/c)`, or None if there is one value."""
    runs: dict[str, list[str]] = {}
    for run, value in values:
        runs.setdefault(value if isinstance(value, str) else canonical_json(value), []).append(str(run))
    if len(runs) < 2:
        return None
    return f"{name} differ: " + ", ".join(f"{value} ({some(names)})" for value, names in runs.items())


def _differ_in_learning(group: Sequence[Score], remedy: str = "", without: tuple[str, ...] = NOT_LEARNING) -> list[str]:
    """List what differs within scores that are pooled. The `remedy` takes a setting in which they differ."""
    every = [flatten(settings_of(score.evaluation)) for score in group]
    acting = {key for score in group for key in _conditions(score)}
    keys = [key for key in dict.fromkeys(key for each in every for key in each) if not key.startswith(without)]
    # Keys that only some kinds have differ with the kind.
    shared = [key for key in keys if key not in acting and all(key in each for each in every)]
    other = [key for key in shared if len({str(each[key]) for each in every}) > 1]
    lines = []
    if other:
        runs = some([str(score.run) for score in group])
        what = "runs of different settings are pooled into one number"
        lines.append(f"{what}: {some(other)} ({runs}){remedy.format(other[0])}")
    same: dict[str, list[str]] = {}
    for score, each in zip(group, every, strict=True):
        alike = {key: each[key] for key in ("seed", "environment.id", *keys) if key in each}
        same.setdefault(str(alike), []).append(str(score.run))
    lines += [
        f"{some(names)} have the same settings and the same seed, so they are no independent samples."
        for names in same.values()
        if len(names) > 1
    ]
    return lines


def differences_of_models(scores: Sequence[Score], rows: Sequence[Sequence[int]]) -> list[str]:
    """List the differences between scores of dynamics models of several runs, one line each.

    Over all: test episodes. Within a row of the table: other settings that learning depends on, and runs that agree
    even in their seed.

    Args:
        scores: Of one protocol.
        rows: Places of the scores that a row of the table pools, see `Protocol.pools`.
    """
    line = _differ("episodes", [(score.run, score.metrics["episodes"]) for score in scores])
    lines = [line] if line else []
    for places in rows:  # these tables have no --by
        without = (*NOT_LEARNING, "controller.", "run.")
        lines += _differ_in_learning([scores[place] for place in places], without=without)
    return lines


# -- pooling ---------------------------------------------------------------------------------------------------------


def pooled_unit(scores: Sequence[Score]) -> str:
    """Return the unit of pooled scores. Returns of different environments raise UsageError."""
    if all(score.metrics["human_normalized"] is not None for score in scores):
        return NORMALIZED
    if len({score.environment for score in scores}) > 1:
        raise UsageError(
            "returns of different environments cannot be pooled without reference scores; give runs of one environment,"
            " or a table alone with --by environment.id"
        )
    return RETURN


def pool_scores(scores: Sequence[Score], unit: str) -> dict[str, np.ndarray]:
    """Return the scores of each environment in a unit, (R,) for R runs."""
    key = "human_normalized" if unit == NORMALIZED else "mean"
    table: dict[str, list[float]] = {}
    for score in scores:
        table.setdefault(score.environment, []).append(score.metrics[key])
    return {task: np.array(values) for task, values in table.items()}


def random_mean(scores: Sequence[Score]) -> float | None:
    """Return the mean return of random play in the one environment of some scores, None if a score has none."""
    means = [score.metrics["random_mean"] for score in scores]
    return None if None in means else float(np.mean(means))


def group_scores(scores: Sequence[Score], keys: Sequence[str]) -> dict[tuple[str, ...], list[Score]]:
    """Group scores by the values of some settings, "-" where the kind of a section has no such key."""
    tables = [flatten(settings_of(score.evaluation)) for score in scores]
    groups: dict[tuple[str, ...], list[Score]] = {}
    for score, values in zip(scores, setting_values(tables, keys), strict=True):
        groups.setdefault(values, []).append(score)
    return groups


def setting_values(tables: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the values of some settings in each table of flat settings, "-" where it has no such key.

    Raises:
        UsageError: No table has a key.
    """
    for key in keys:
        if not any(key in table for table in tables):
            raise UsageError(f"--by {key}: no such setting; {did_you_mean(key, tables[0])}")
    return [tuple(str(table.get(key, "-")) for key in keys) for table in tables]


def label(keys: Sequence[str], values: Sequence[str]) -> str:
    """Return the name of a group such as `backbone.kind=gru, seed=1`."""
    return ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))


def label_groups(scores: Sequence[Score], keys: Sequence[str]) -> dict[str, list[Score]]:
    """Group scores by the values of some settings, under the names of `label`."""
    return {label(keys, values): members for values, members in group_scores(scores, keys).items()}
