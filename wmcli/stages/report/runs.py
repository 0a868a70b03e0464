"""The runs of a report: which ones can be reported, what each of them holds, and which are alike.

Only manifests, run.toml and metrics.jsonl are read. A run that cannot be read is left out with one line that says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from wmcli.artifacts import KINDS, Artifact, Run
from wmcli.artifacts.overview import describe_run, find_runs, seconds_of_work
from wmcli.assemble import settings_of
from wmcli.config import names_kind
from wmcli.errors import ArtifactError, UsageError, WmError
from wmcli.progress import Progress
from wmcli.report.plots import along, curves_by_stage
from wmcli.settings import Settings, flatten
from wmcli.stages.binding import Binding
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.pictures import LoggedPriors, logged_priors
from wmcli.stages.protocols import PROTOCOLS
from wmcli.stages.score_pictures import Point, read_curve
from wmcli.stages.scores import NOT_LEARNING, Score, label, read_scores, setting_values

MODELS = ("tokenizer", "dynamics", "controller")
PRESET = "preset"
"""Stands beside the settings, since it names the system."""
ONLY = "all"
"""Name of the only variant where its runs have several presets."""

Curves = Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]]
"""stage -> metric -> (updates (K,), values (K,))."""


class Notes(Progress):
    """Collects warnings for the page, in place of the terminal."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def warn(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)


@dataclass(frozen=True)
class Log:
    """What metrics.jsonl says of a run."""

    seconds: float
    """Of work."""
    processes: int
    """Number of processes that worked on it; 0 if its version of wm did not log them."""
    rates: Mapping[str, float]
    """Median updates per second of each stage."""
    curves: Curves
    """Of the newest models and their ancestors, where they were asked for."""
    points: Sequence[Point]
    """Evaluations of its controllers; empty without a score."""
    priors: LoggedPriors
    """Attention priors that its dynamics model learned."""


@dataclass(eq=False)
class ReportedRun:
    """A run that can be reported."""

    name: str
    """Its path behind what all runs have in common."""
    path: Path
    run: Run
    about: Mapping[str, Any]
    """See `describe_run`."""
    binding: Binding | None
    settings: Settings
    """Of its score, or else of its newest artifact."""
    newest: Mapping[str, Artifact]
    """By kind."""
    scores: Mapping[str, Score]
    """By protocol."""
    flat: Mapping[str, Any] = field(init=False)
    """Settings and preset by key."""

    def __post_init__(self) -> None:
        self.flat = {PRESET: self.preset} | flatten(self.settings)

    @property
    def preset(self) -> str:
        if self.binding is not None:
            return self.binding.preset
        return next((str(each.manifest.get("preset") or "-") for each in self.newest.values()), "-")

    @property
    def bound(self) -> Settings:
        """Settings that it began with."""
        return self.settings if self.binding is None else self.binding.at(0)

    @property
    def score(self) -> Score | None:
        """Its score by returns."""
        return self.scores.get(PROTOCOL)

    @property
    def environment(self) -> str:
        return str(self.settings.environment.id)

    @property
    def last(self) -> Artifact:
        """Its newest artifact of the latest stage."""
        order = ("evaluation", *reversed(MODELS), "experience", "profile")
        return next(self.newest[kind] for kind in order if kind in self.newest)

    def read_log(self, progress: Progress, *, curves: bool) -> Log:
        """Read metrics.jsonl once."""
        try:
            history = [record for record in self.run.history() if _is_sound(record)]
        except WmError as error:
            progress.warn(f"the log of {self.name} cannot be read: {error}")
            history = []
        mine = along(history, set(self._jobs()))
        rates: dict[str, list[float]] = {}
        for record in mine:
            if isinstance(rate := record.get("updates_per_second"), int | float):
                rates.setdefault(str(record.get("stage")), []).append(float(rate))
        return Log(
            seconds=seconds_of_work(history, datetime.now(UTC)),
            processes=len({record["began"] for record in history if "began" in record}),
            rates={stage: median(values) for stage, values in rates.items()},
            curves=curves_by_stage(mine) if curves else {},
            points=self._points(history, progress),
            priors=logged_priors(mine),
        )

    def _points(self, history: Sequence[Mapping[str, Any]], progress: Progress) -> Sequence[Point]:
        """Return the evaluations of its controllers; none where the scored one is unknown or gone."""
        if self.score is None or "controller" not in self.score.evaluation.inputs:
            return ()
        try:
            return read_curve(self.score, history, progress)
        except ArtifactError as error:
            progress.warn(f"{self.name} has no curve of returns: {error}")
            return ()

    def _jobs(self) -> Iterator[str]:
        """Yield the digests of the jobs of the newest models and of the versions that they continue."""
        for kind in MODELS:
            artifact: Artifact | None = self.newest.get(kind)
            while artifact is not None:
                yield str(artifact.manifest["job"])
                try:
                    artifact = artifact.input("parent") if "parent" in artifact.inputs else None
                except ArtifactError:  # removed, and so are earlier ones
                    break


def _is_sound(record: Mapping[str, Any]) -> bool:
    """Return whether a record has times and names that can be read, as every line that wm wrote has."""
    if not all(isinstance(record.get(key, ""), str) for key in ("job", "stage")):
        return False
    try:
        times = [datetime.fromisoformat(record[key]) for key in ("time", "began") if key == "time" or key in record]
    except (KeyError, TypeError, ValueError):
        return False
    return all(time.tzinfo is not None for time in times)


# -- reading ----------------------------------------------------------------------------------------------------------


def find_all(paths: Sequence[Path]) -> list[Path]:
    """Return every run at or below some paths, each once, in their order.

    Raises:
        ArtifactError: A path is missing.
        UsageError: There is no run at or below a path.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        here = list(find_runs(path))
        if not here:
            raise UsageError(f"{path}: no runs in it; list runs with: wm runs {path.parent}")
        for run in here:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(paths: Sequence[Path], notes: Notes, progress: Progress) -> tuple[list[ReportedRun], list[str]]:
    """Read the runs that can be reported.

    Args:
        paths: Run directories.
        notes: Gets the warnings about their scores.
        progress: Shows a bar.

    Returns:
        The runs, and a line for each that is left out.

    Raises:
        UsageError: Two runs are one, by the same path, a link or a copy.
    """
    runs: list[ReportedRun] = []
    left_out: list[str] = []
    names = short_names(paths)
    with progress.bar("report: runs", len(paths), "runs") as bar:
        for path, name in zip(paths, names, strict=True):
            try:
                runs.append(_read_run(path, name, notes))
            except WmError as error:
                left_out.append(f"{name}: {error}")
            except (KeyError, TypeError, ValueError, OSError, RecursionError) as error:  # a manifest of another form
                left_out.append(f"{name}: cannot be read: {type(error).__name__}: {error}")
            bar.advance()
    _refuse_copies(runs)
    return runs, left_out


def _read_run(path: Path, name: str, notes: Notes) -> ReportedRun:
    run, about = Run.open(path, create=False), describe_run(path)
    if about["problem"]:
        raise ArtifactError(str(about["problem"]))
    newest: dict[str, Artifact] = {
        kind: run.get(kind, versions[-1]) for kind in KINDS if (versions := run.versions(kind))
    }
    if not newest:
        raise ArtifactError("has no artifacts yet; see: wm runs")
    if about["status"] == "running":
        notes.warn(f"{name} is in progress: its numbers are those so far.")
    protocols = set()
    for version in run.versions("evaluation"):
        with suppress(ArtifactError):  # `read_scores` knows which ones matter
            protocols.add(run.get("evaluation", version).metrics["protocol"])
    scores = {each: read_scores([path], each, notes)[0] for each in PROTOCOLS if each in protocols}
    bound = run.bound()
    binding = None if bound is None else Binding(bound["preset"], bound["settings"], tuple(bound["changes"]))
    scored = next(iter(scores.values())).evaluation if scores else None
    models = [newest[kind] for kind in ("controller", "dynamics", "tokenizer") if kind in newest]
    if scored is not None:
        settings = settings_of(scored)
    elif binding is not None:
        settings = binding.at()
    else:
        settings = settings_of(models[0] if models else newest[next(iter(newest))])
    return ReportedRun(name, path, run, about, binding, settings, newest, scores)


def _refuse_copies(runs: Sequence[ReportedRun]) -> None:
    owners: dict[str, Path] = {}
    for each in runs:
        digest = each.last.digest
        if digest in owners:
            raise UsageError(
                f"{owners[digest]} and {each.path} hold the very same {each.last.name}, which would count twice: leave"
                " one out."
            )
        owners[digest] = each.path


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the paths behind the folder that all of them lie in."""
    places = [path.absolute() for path in paths]
    if len(places) == 1:
        return [places[0].name]
    common = Path(os.path.commonpath(places))
    return [str(place.relative_to(common)) if place != common else place.name for place in places]


# -- variants ---------------------------------------------------------------------------------------------------------


def group(runs: Sequence[ReportedRun], by: Sequence[str]) -> dict[str, list[ReportedRun]]:
    """Group runs into variants, in the order of their first runs.

    Args:
        runs: At least one.
        by: Settings (`section.key`) that make the variants; empty derives them (see `telling_keys`).

    Raises:
        UsageError: No run has a key of `by`.
    """
    tables = [each.flat for each in runs]
    keys = list(by) or telling_keys(tables)
    if not keys:
        presets = {each.preset for each in runs}
        return {presets.pop() if len(presets) == 1 else ONLY: list(runs)}
    variants: dict[str, list[ReportedRun]] = {}
    for each, values in zip(runs, setting_values(tables, keys), strict=True):
        variants.setdefault(label(keys, values), []).append(each)
    return variants


def telling_keys(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return few settings whose values tell apart all runs that differ in more than seed and environment.

    The keys are chosen greedily: each is the one that parts most groups, of equal ones the preset, then kinds of
    sections, then the first. Settings of the environment count where runs of one environment differ.

    Args:
        tables: Flat settings of each run, with its preset.
    """
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if _may_tell(key, tables)]
    columns = {key: [str(table.get(key, "-")) for table in tables] for key in keys}
    columns = {key: values for key, values in columns.items() if len(set(values)) > 1}
    keys = sorted(columns, key=lambda key: (key != PRESET, not names_kind(key)))  # stable
    whole = len(set(zip(*columns.values(), strict=True))) if columns else 1

    def parts(chosen: Sequence[str]) -> int:
        return len(set(zip(*(columns[key] for key in chosen), strict=True))) if chosen else 1

    chosen: list[str] = []
    while parts(chosen) < whole:
        chosen.append(max(keys, key=lambda key: parts([*chosen, key])))  # the first of equals
    return chosen


def _may_tell(key: str, tables: Sequence[Mapping[str, Any]]) -> bool:
    if key == PRESET:
        return True
    if key.startswith((*NOT_LEARNING, "alternatives.")):
        return False
    if not key.startswith("environment."):
        return True
    values: dict[str, set[str]] = {}
    for table in tables:
        values.setdefault(str(table["environment.id"]), set()).add(str(table.get(key, "-")))
    return any(len(each) > 1 for each in values.values())
