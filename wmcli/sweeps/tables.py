"""The results of a sweep by variant, which is what varies besides environment and seed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wmcli.artifacts import Run
from wmcli.artifacts.store import BINDING
from wmcli.errors import ArtifactError, UsageError, WmError
from wmcli.progress import Progress, some
from wmcli.settings import flatten, resolve
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.scores import NOT_LEARNING, NoEvaluationError, Score, read_scores
from wmcli.sweeps.attempt import FAILED, read_record
from wmcli.sweeps.plan import PlannedRun, Sweep

_NO_RESULT = ("evaluation.", *(key for key in NOT_LEARNING if key.startswith(("training.", "run."))))
"""Settings of how to score, to compute and what to keep. Scores of unlike evaluations are told apart by a warning."""


def begun_runs(sweep: Sweep, progress: Progress) -> dict[str, list[Path]]:
    """Return the folders of the runs of each variant that have begun, in the order of the file.

    Args:
        sweep: The sweep.
        progress: Gets a warning for the runs that have not, and for runs of other settings, which are left out.

    Raises:
        ArtifactError: None has.
    """
    changed = changed_runs(sweep)
    folders: dict[str, list[Path]] = {}
    waiting, others = [], {}
    for run in sweep.runs:
        if not (run.folder / BINDING).exists():
            waiting.append(run.name)
        elif run.folder in changed:
            others[run.name] = changed[run.folder]
        else:
            folders.setdefault(run.variant, []).append(run.folder)
    _tell_others(sweep, others, progress, left=bool(folders))
    if not folders:
        raise ArtifactError(f"no run of {sweep.file} has begun yet; see: wm sweep status {sweep.file}")
    if waiting:
        progress.warn(f"not begun yet: {some(waiting)}")
    return folders


def changed_runs(sweep: Sweep) -> dict[Path, list[str]]:
    """Return the settings in which runs that have begun differ from what the file has now, by folder, where any do.

    What cannot be read of a run is left to those who read the run.
    """
    changed = {}
    for run in sweep.runs:
        with suppress(WmError):
            bound = Run.open(run.folder, create=False).bound()
            if bound and (keys := _changed_keys(run, read_record(run, sweep.records), bound["settings"])):
                changed[run.folder] = keys
    return changed


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
    missing: list[str] = []
    others: dict[str, list[str]] = {}
    for run in sweep.runs:
        try:
            (score,) = read_scores([run.folder], protocol, progress) if run.folder.exists() else [None]
        except NoEvaluationError:
            score = None
        if score is None:
            missing.append(run.name)
        elif keys := _changed_keys(run, read_record(run, sweep.records), score.evaluation.settings):
            others[run.name] = keys
        else:
            scores[run.variant].append(score)
    scores = {variant: members for variant, members in scores.items() if members}
    _tell_others(sweep, others, progress, left=bool(scores))
    if not scores:
        what = "is evaluated yet" if protocol == PROTOCOL else f"has an evaluation of --protocol {protocol}"
        raise ArtifactError(f"no run of {sweep.file} {what}; see: wm sweep status {sweep.file}")
    if missing:
        progress.warn(f"{len(missing)} runs have no evaluation of --protocol {protocol} yet: {some(missing)}")
    left_out = {*missing, *others}
    return scores, [run.name for run in sweep.runs if run.name in left_out]


def sweep_records(sweep: Sweep) -> dict[Path, dict[str, Any]]:
    """Return what a sweep recorded of each run, by its folder. The first attempt at a run has no seconds yet.

    Records of other settings are left out.
    """
    found = ((run, read_record(run, sweep.records)) for run in sweep.runs)
    records = {run.folder: record if record is not None and _is_of(run, record) else {} for run, record in found}
    return {folder: record | {"seconds": record.get("seconds") or None} for folder, record in records.items()}


# -- runs of other settings -------------------------------------------------------------------------------------------


def _tell_others(sweep: Sweep, others: Mapping[str, Sequence[str]], progress: Progress, *, left: bool) -> None:
    """Warn that runs are left out, with the settings in which they differ.

    Raises:
        ArtifactError: There are some, and no others are left.
    """
    if not others:
        return
    keys = dict.fromkeys(key for each in others.values() for key in each)
    line = (
        f"left out, made with other settings than {sweep.file} has now: {some([*others])} ({some([*keys])}); to"
        " keep both set another folder in the file; to make them again remove their folders, then: wm sweep"
        f" {shlex.quote(str(sweep.file))}"
    )
    if not left:
        raise ArtifactError(line)
    progress.warn(line)


def _changed_keys(run: PlannedRun, record: Mapping[str, Any] | None, made: Mapping[str, Any]) -> list[str]:
    """Return the settings of a run in the file that differ from those that its result was made with.

    Asked are those that the file sets, or set when the run was started. What only the preset says may have changed
    with the version of wm. With another preset, and where the newest attempt failed, all are asked: that attempt may
    have been refused, and the result be an earlier one.
    """
    try:
        settings = resolve(run.preset, run.overrides)
    except UsageError as error:
        raise UsageError(f"{run.name}: {error}") from None
    then, now = flatten(made), flatten(settings)
    before = run if record is None else run._replace(arguments=tuple(record["arguments"]))
    if _preset_name(before) != _preset_name(run) or (record is not None and record["state"] == FAILED):
        asked = list(now)
    else:
        asked = list(dict.fromkeys(text.partition("=")[0] for text in (*run.overrides, *before.overrides)))
    without = (*settings.incidental_keys, *_NO_RESULT)
    return [key for key in asked if key in then and then[key] != now.get(key) and not key.startswith(without)]


def _is_of(run: PlannedRun, record: Mapping[str, Any]) -> bool:
    """Return whether a record is of a run with these settings, wherever its folder was then."""
    before = run._replace(arguments=tuple(record["arguments"]))
    overrides = [{text for text in each.overrides if not text.startswith(_NO_RESULT)} for each in (before, run)]
    return _preset_name(before) == _preset_name(run) and overrides[0] == overrides[1]


def _preset_name(run: PlannedRun) -> str:
    return Path(run.preset).name
