"""`wm compare --cost`: seconds of an epoch by stage, from what finished runs have logged.

A stage takes the seconds from what its process did before it to its own last record. What was done before ends with its
last record, or where it has none (scripted episodes, measures) when it was published. So saving at a stage's end counts
to the next one. Evaluations are left out, and so is collecting beside the training (`run.overlap`).

An epoch counts for the stages that it has, and only where one process did the stage from its beginning: what a process
begins with counts in the run's first process alone, since it may be the rest of a stage. A run's seconds of a stage are
the median over its epochs. So a first epoch that compiles or plays at random, and a pause, move nothing.

Source: figures 1 and 10 of REM (Cohen et al. 2024, arXiv 2402.05643).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from wmcli.artifacts import KINDS, Run
from wmcli.artifacts.overview import moment
from wmcli.config import canonical_json, flat
from wmcli.errors import ArtifactError, UsageError
from wmcli.progress import Progress
from wmcli.report.cost import EPOCH
from wmcli.stages.loop import COLLECT, DYNAMICS, IMAGINE, TOKENIZER
from wmcli.stages.profile_cells import quartiles
from wmcli.stages.scores import label, setting_values

STAGES = (COLLECT, TOKENIZER, DYNAMICS, IMAGINE)
SETTINGS_ASIDE = ("seed", "environment.id")
"""Runs that differ in these alone are one variant."""
COLUMNS = ("variant", "stage", "seconds", "seconds_25", "seconds_75", "lowest_run", "highest_run", "epochs", "runs")
"""Keys of the rows."""


def stage_seconds(
    records: Iterable[Mapping[str, Any]], silent: Sequence[datetime] = ()
) -> dict[tuple[int, str], float]:
    """Return the seconds of each stage of each epoch that counts, by epoch and stage.

    Args:
        records: Of a metrics.jsonl, oldest first. Those without `began`, of older versions, tell no beginning.
        silent: When work without records was published, ascending.
    """
    by_process: dict[datetime, list[tuple[datetime, Any, Any]]] = {}
    for record in records:
        began, time = moment(record.get("began")), moment(record.get("time"))
        if began is not None and time is not None:
            by_process.setdefault(began, []).append((time, record.get("epoch"), record.get("stage")))
    spent: dict[tuple[int, str], float] = {}
    resumed = set()
    for place, (began, own) in enumerate(sorted(by_process.items())):
        if _is_beside(began, own, by_process):
            continue
        seconds: dict[tuple[int, str], float] = {}
        before = began
        for time, epoch, stage in own:
            if isinstance(epoch, int) and stage in STAGES:
                start = max([before, *silent[: bisect_right(silent, time)][-1:]])
                seconds[epoch, stage] = seconds.get((epoch, stage), 0.0) + (time - start).total_seconds()
            before = time
        if place:
            resumed.add(own[0][1:])
        spent |= seconds  # of work that was repeated the last counts
    return {key: value for key, value in spent.items() if key not in resumed}


def _is_beside(
    began: datetime,
    own: Sequence[tuple[datetime, Any, Any]],
    by_process: Mapping[datetime, Sequence[tuple[datetime, Any, Any]]],
) -> bool:
    """Return whether a process only collected, beside another that was at work."""
    if any(stage != COLLECT for _, _, stage in own):
        return False
    return any(other < began <= theirs[-1][0] for other, theirs in by_process.items())


def epoch_costs(variants: Mapping[str, Sequence[Path]], progress: Progress) -> list[dict[str, Any]]:
    """Return the seconds of an epoch by variant and stage.

    Args:
        variants: Run directories of each variant.
        progress: Gets a warning for each run without an epoch that counts, which is left out.

    Returns:
        Rows with the keys of COLUMNS, for each stage and for `EPOCH`, which is their sum. `seconds` is the mean over
        runs of each run's median epoch. `seconds_25` and `seconds_75` are quartiles over all epochs that count. Those
        of `EPOCH` are over the epochs with the run's last stage, with the median for stages that they lack.
        `lowest_run` and `highest_run` are those of the runs; None for one run.

    Raises:
        ArtifactError: No run has an epoch that counts.
    """
    rows = []
    for variant, folders in variants.items():
        runs = [epochs for folder in folders if (epochs := _epochs(folder, progress))]
        if not runs:
            continue
        stages = [stage for stage in STAGES if any(stage in run for run in runs)]
        about = {"variant": variant, "runs": len(runs)}
        for stage in stages:
            having = [run[stage] for run in runs if stage in run]
            medians = [statistics.median(epochs.values()) for epochs in having]
            rows.append(about | {"stage": stage} | _row(medians, [s for epochs in having for s in epochs.values()]))
        middle = [{stage: statistics.median(epochs.values()) for stage, epochs in run.items()} for run in runs]
        whole = [
            sum(run[stage].get(epoch, usual[stage]) for stage in run)
            for run, usual in zip(runs, middle, strict=True)
            for epoch in run[max(run, key=STAGES.index)]
        ]
        rows.append(about | {"stage": EPOCH} | _row([sum(usual.values()) for usual in middle], whole))
    if not rows:
        raise ArtifactError(f"no run has logged a whole epoch of wm run yet, of {', '.join(variants) or 'none'}.")
    return [{key: row[key] for key in COLUMNS} for row in rows]


def _epochs(folder: Path, progress: Progress) -> dict[str, dict[int, float]]:
    """Return the seconds of a run by stage and epoch; nothing, with a warning, if it has none that count."""
    run: dict[str, dict[int, float]] = {}
    opened = Run.open(folder, create=False)
    records = opened.history()
    for (epoch, stage), seconds in stage_seconds(records, _silent(opened, records)).items():
        run.setdefault(stage, {})[epoch] = seconds
    if not run:
        progress.warn(f"{folder} has logged no whole epoch of wm run: left out")
    return run


def _silent(run: Run, records: Iterable[Mapping[str, Any]]) -> list[datetime]:
    """Return when the artifacts of jobs without records were published, ascending."""
    logged = {record.get("job") for record in records}
    times = []
    for kind in KINDS:
        for version in run.versions(kind):
            with suppress(ArtifactError):
                manifest = run.get(kind, version).manifest
                if manifest["job"] not in logged and (time := moment(manifest["created"])) is not None:
                    times.append(time)
    return sorted(times)


def _row(of_runs: Sequence[float], of_epochs: Sequence[float]) -> dict[str, Any]:
    several = len(of_runs) > 1
    return {
        "seconds": statistics.fmean(of_runs),
        **quartiles("seconds", of_epochs),
        "lowest_run": min(of_runs) if several else None,
        "highest_run": max(of_runs) if several else None,
        "epochs": len(of_epochs),
    }


# -- variants ---------------------------------------------------------------------------------------------------------


def group_runs(folders: Sequence[Path], keys: Sequence[str]) -> dict[str, list[Path]]:
    """Group runs into variants, by the values of some settings, or by all settings but seed and environment.

    Args:
        folders: Run directories.
        keys: `section.key` each. Without, a variant is named by its preset, or by its first run where another variant
            has the same preset.

    Raises:
        ArtifactError: A folder holds no run that is bound to settings.
        UsageError: A run has no such setting, or two are one.
    """
    settings: dict[Path, dict[str, Any]] = {}
    presets: dict[Path, str] = {}
    for folder in folders:
        if folder.resolve() in {each.resolve() for each in settings}:
            raise UsageError(f"{folder} is named twice, and would count twice: leave one out.")
        bound = Run.open(folder, create=False).bound()
        if bound is None:
            raise ArtifactError(f"{folder} is no run of wm run; list runs with: wm runs")
        settings[folder], presets[folder] = flat(bound["settings"]), bound["preset"]
    groups: dict[Any, list[Path]] = {}
    if keys:
        for folder, values in zip(settings, setting_values(list(settings.values()), keys), strict=True):
            groups.setdefault(label(keys, values), []).append(folder)
        return groups
    for folder, table in settings.items():
        rest = {key: value for key, value in table.items() if key not in SETTINGS_ASIDE}
        groups.setdefault((presets[folder], canonical_json(rest)), []).append(folder)
    named = [preset for preset, _ in groups]
    return {preset if named.count(preset) == 1 else str(members[0]): members for (preset, _), members in groups.items()}
