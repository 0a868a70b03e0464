"""What `wm compare --sweep` does, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from wmcli.metrics.atari import Column
from wmcli.progress import Progress
from wmcli.stages.evaluate import PROTOCOL
from wmcli.stages.scores import Score
from wmcli.stages.variants import compare_variants
from wmcli.sweeps.plan import Sweep
from wmcli.sweeps.tables import sweep_records, sweep_scores


class Comparison(NamedTuple):
    scores: dict[str, list[Score]]
    rows: list[dict[str, Any]]
    missing: list[str]


def compare_sweep(sweep: Sweep, progress: Progress, published: Sequence[Column] | None = None) -> Comparison:
    scores, missing = sweep_scores(sweep, PROTOCOL, progress)
    return Comparison(scores, compare_variants(scores, sweep_records(sweep), progress, published), missing)
