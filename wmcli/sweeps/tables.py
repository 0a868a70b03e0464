"""The results of a sweep by variant, which is what varies besides environment and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wmcli.artifacts.store import BINDING
from wmcli.errors import ArtifactError
from wmcli.metrics.atari import Column
from wmcli.progress import Progress
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.scores import Score, read_scores
from wmcli.stages.variants import compare_variants
from wmcli.sweeps.attempt import read_record
from wmcli.sweeps.plan import Sweep


class Comparison(NamedTuple):
    """Results of a sweep."""

    scores: dict[str, list[Score]]
    """Of each variant, in the order of the file."""
    rows: list[dict[str, Any]]
    """See `compare_variants`."""
    missing: list[str]
    """Names of runs without an evaluation."""


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


def compare_sweep(sweep: Sweep, progress: Progress, published: Sequence[Column] | None = None) -> Comparison:
    """Compare the variants of a sweep by the runs that are evaluated.

    Args:
        sweep: The sweep.
        progress: Gets a warning for an interim evaluation, and for aggregates that are left out.
        published: See `compare_variants`.

    Raises:
        UsageError: Runs have different rules of play.
        ArtifactError: No run is evaluated.
    """
    scores: dict[str, list[Score]] = {run.variant: [] for run in sweep.runs}
    missing = []
    for run in sweep.runs:
        try:
            scores[run.variant] += read_scores([run.folder], PROTOCOL, progress)
        except ArtifactError:
            missing.append(run.name)
    scores = {variant: members for variant, members in scores.items() if members}
    if not scores:
        raise ArtifactError(f"no run of {sweep.file} is evaluated yet; see: wm sweep status {sweep.file}")
    records = {run.folder: read_record(run, sweep.records) or {} for run in sweep.runs}
    # The first attempt at a run has no seconds before it ends.
    records = {folder: record | {"seconds": record.get("seconds") or None} for folder, record in records.items()}
    return Comparison(scores, compare_variants(scores, records, progress, published), missing)
