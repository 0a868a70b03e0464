"""The results of a sweep by variant, which is what varies besides environment and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wmcli.artifacts.store import BINDING
from wmcli.errors import ArtifactError
from wmcli.progress import Progress
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.scores import Score, read_scores
from wmcli.sweeps.attempt import read_record
from wmcli.sweeps.plan import Sweep


def begun_runs(sweep: Sweep) -> dict[str, list[Path]]:
    """Return the folders of the runs of each variant that have begun, in the order of the file.

    Raises:
        ArtifactError: None has.
    """
    folders: dict[str, list[Path]] = {}
    for run in sweep.runs:
        if (run.folder / BINDING).exists():
            folders.setdefault(run.variant, []).append(run.folder)
    if not folders:
        raise ArtifactError(f"no run of {sweep.file} has begun yet; see: wm sweep status {sweep.file}")
    return folders


def sweep_scores(sweep: Sweep, protocol: str, progress: Progress) -> tuple[dict[str, list[Score]], list[str]]:
    """Find the evaluation of each run of a sweep under a protocol.

    Args:
        sweep: The sweep.
        protocol: Name of the protocol.
        progress: Gets a warning for an interim evaluation.

    Returns:
        Scores by variant, in the order of the file, and the names of runs without such an evaluation.

    Raises:
        ArtifactError: No run has one.
    """
    scores: dict[str, list[Score]] = {run.variant: [] for run in sweep.runs}
    missing = []
    for run in sweep.runs:
        try:
            scores[run.variant] += read_scores([run.folder], protocol, progress)
        except ArtifactError:
            missing.append(run.name)
    scores = {variant: members for variant, members in scores.items() if members}
    if not scores:
        what = "is evaluated yet" if protocol == PROTOCOL else f"has an evaluation of --protocol {protocol}"
        raise ArtifactError(f"no run of {sweep.file} {what}; see: wm sweep status {sweep.file}")
    return scores, missing


def sweep_records(sweep: Sweep) -> dict[Path, dict[str, Any]]:
    """Return what a sweep recorded of each run, by its folder. The first attempt at a run has no seconds yet."""
    records = {run.folder: read_record(run, sweep.records) or {} for run in sweep.runs}
    return {folder: record | {"seconds": record.get("seconds") or None} for folder, record in records.items()}
