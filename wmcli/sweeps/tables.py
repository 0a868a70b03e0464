"""The results of a sweep by variant, which is what varies besides environment and seed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wmcli.artifacts import Run
from wmcli.artifacts.store import BINDING
from wmcli.errors import ArtifactError
from wmcli.progress import Progress
from wmcli.settings import flatten, resolve
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.scores import NOT_LEARNING, NoEvaluationError, Score, read_scores
from wmcli.sweeps.attempt import DONE, read_record
from wmcli.sweeps.plan import PlannedRun, Sweep

_NAMED = 5  # runs in a line
_NO_RESULT = tuple(key for key in NOT_LEARNING if key.startswith(("training.", "run.")))
"""Settings of how to compute and what to keep. They change no result."""


def begun_runs(sweep: Sweep, progress: Progress) -> dict[str, list[Path]]:
    """Return the folders of the runs of each variant that have begun, in the order of the file.

    Args:
        sweep: The sweep.
        progress: Gets a warning for the runs that have not, and for runs of other settings, which are left out.

    Raises:
        ArtifactError: None has.
    """
    folders: dict[str, list[Path]] = {}
    waiting, others = [], _Others(sweep)
    for run in sweep.runs:
        bound = Run.open(run.folder, create=False).bound() if (run.folder / BINDING).exists() else None
        if bound is None:
            waiting.append(run.name)
        elif not others.has(run, bound["settings"]):
            folders.setdefault(run.variant, []).append(run.folder)
    others.tell(progress, left=bool(folders))
    if not folders:
        raise ArtifactError(f"no run of {sweep.file} has begun yet; see: wm sweep status {sweep.file}")
    if waiting:
        progress.warn(f"{len(waiting)} runs have not begun yet: {_first(waiting)}")
    return folders


def changed_runs(sweep: Sweep) -> dict[Path, list[str]]:
    """Return the settings in which runs that have begun differ from what the file has now, by folder, where any do."""
    begun = ((run, Run.open(run.folder, create=False).bound()) for run in sweep.runs if (run.folder / BINDING).exists())
    changed = {
        run.folder: _changed_keys(run, read_record(run, sweep.records), bound["settings"])
        for run, bound in begun
        if bound
    }
    return {folder: keys for folder, keys in changed.items() if keys}


def sweep_scores(sweep: Sweep, protocol: str, progress: Progress) -> tuple[dict[str, list[Score]], list[str]]:
    """Find the evaluation of each run of a sweep under a protocol.

    Args:
        sweep: The sweep.
        protocol: Name of the protocol.
        progress: Gets a warning for interim evaluations, for runs without one, and for runs of other settings.

    Returns:
        Scores by variant, in the order of the file, and the names of runs that are left out: those without such an
        evaluation, and those that were made with other settings than the file has now.

    Raises:
        ArtifactError: No run has one, or a damaged one may be a run's newest.
    """
    scores: dict[str, list[Score]] = {run.variant: [] for run in sweep.runs}
    missing, others = [], _Others(sweep)
    for run in sweep.runs:
        try:
            (score,) = read_scores([run.folder], protocol, progress) if run.folder.exists() else [None]
        except NoEvaluationError:
            score = None
        if score is None:
            missing.append(run.name)
        elif not others.has(run, score.evaluation.settings):
            scores[run.variant].append(score)
    scores = {variant: members for variant, members in scores.items() if members}
    others.tell(progress, left=bool(scores))
    if not scores:
        what = "is evaluated yet" if protocol == PROTOCOL else f"has an evaluation of --protocol {protocol}"
        raise ArtifactError(f"no run of {sweep.file} {what}; see: wm sweep status {sweep.file}")
    if missing:
        progress.warn(f"{len(missing)} runs have no evaluation of --protocol {protocol} yet: {_first(missing)}")
    return scores, [run.name for run in sweep.runs if run.name in {*missing, *others.names}]


def sweep_records(sweep: Sweep) -> dict[Path, dict[str, Any]]:
    """Return what a sweep recorded of each run, by its folder. The first attempt at a run has no seconds yet.

    Records of other settings are left out.
    """
    found = ((run, read_record(run, sweep.records)) for run in sweep.runs)
    records = {run.folder: record if record is not None and _is_of(run, record) else {} for run, record in found}
    return {folder: record | {"seconds": record.get("seconds") or None} for folder, record in records.items()}


# -- runs of other settings -------------------------------------------------------------------------------------------


class _Others:
    """The runs of a sweep that were made with other settings than its file has now."""

    def __init__(self, sweep: Sweep) -> None:
        self.names: list[str] = []
        self._sweep = sweep
        self._keys: dict[str, None] = {}

    def has(self, run: PlannedRun, made: Mapping[str, Any]) -> bool:
        """Return whether a run is one of them, from the settings that its result was made with."""
        keys = _changed_keys(run, read_record(run, self._sweep.records), made)
        if keys:
            self.names.append(run.name)
            self._keys |= dict.fromkeys(keys)
        return bool(keys)

    def tell(self, progress: Progress, *, left: bool) -> None:
        """Warn that these runs are left out.

        Raises:
            ArtifactError: There are some, and no others are left.
        """
        if not self.names:
            return
        file = self._sweep.file
        line = (
            f"{len(self.names)} runs were made with other settings than {file} has now, and are left out:"
            f" {_first(self.names)} ({_first([*self._keys])}); to keep both set another folder in the file, to run them"
            f" again: wm sweep {shlex.quote(str(file))}"
        )
        if not left:
            raise ArtifactError(line)
        progress.warn(line)


def _changed_keys(run: PlannedRun, record: Mapping[str, Any] | None, made: Mapping[str, Any]) -> list[str]:
    """Return the settings of a run in the file that differ from those that its result was made with.

    A run that was done with these settings is not asked, wherever its folder was then. One without a record was started
    without `wm sweep`; what its preset says may since have changed with the version of wm. Any other may have begun
    anew, and has its old result until it makes a new one.
    """
    if record is not None and record["state"] == DONE and _is_of(run, record):
        return []
    settings = resolve(run.preset, run.overrides)
    then, now = flatten(made), flatten(settings)
    asked = list(now) if record is not None else [text.partition("=")[0] for text in run.overrides]
    without = (*settings.incidental_keys, *_NO_RESULT)
    return [key for key in asked if key in then and then[key] != now.get(key) and not key.startswith(without)]


def _is_of(run: PlannedRun, record: Mapping[str, Any]) -> bool:
    """Return whether a record is of the preset and overrides of a run, wherever its folder was then."""
    before = run._replace(arguments=tuple(record["arguments"]))
    return (Path(before.preset).name, before.overrides) == (Path(run.preset).name, run.overrides)


def _first(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
