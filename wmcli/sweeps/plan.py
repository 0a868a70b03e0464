"""The runs of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class PlannedRun(NamedTuple):
    """One run of a sweep."""

    name: str
    """Path below the sweep's folder, such as `Catch-v0/mamba2/seed-1`."""
    folder: Path
    """Its run directory, absolute."""
    arguments: tuple[str, ...]
    """What follows `wm` on its command line."""
