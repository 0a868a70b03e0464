"""The run directory: versioned, immutable, verified artifacts, and the work that makes them. Imports no torch."""

from wmcli.artifacts.health import check, examine, needed, needed_elsewhere
from wmcli.artifacts.job import Job, Work
from wmcli.artifacts.lineage import Tree, lineage
from wmcli.artifacts.manifest import (
    KEY_METRICS,
    KINDS,
    MAKERS,
    Artifact,
    InputRef,
    Kind,
    film_of,
    make_command,
    open_artifact,
)
from wmcli.artifacts.removable import find_removable
from wmcli.artifacts.store import Run

__all__ = [
    "KEY_METRICS",
    "KINDS",
    "MAKERS",
    "Artifact",
    "InputRef",
    "Job",
    "Kind",
    "Run",
    "Tree",
    "Work",
    "check",
    "examine",
    "film_of",
    "lineage",
    "make_command",
    "needed",
    "needed_elsewhere",
    "open_artifact",
    "find_removable",
]
