"""Removable parts of a run: checkpoints of stopped work, and weights of models that nothing uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from wmcli.artifacts.files import discard, disk_errors
from wmcli.artifacts.health import needed, needed_elsewhere
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.manifest import MANIFEST, PRUNED
from wmcli.artifacts.store import BEST, Run
from wmcli.errors import ArtifactError, BusyError

MODELS = ("tokenizer", "dynamics", "controller")
"""Kinds whose old versions can be removed. Experience never ages, and evaluations are small."""


@dataclass(frozen=True)
class Removable:
    """A part of a run that can be removed."""

    name: str
    description: str
    size: int
    """Bytes on disk."""
    written: str
    """Time of the last change: ISO 8601, UTC."""
    remove: Callable[[], object]


def find_removable(run: Run) -> list[Removable]:
    """Return the removable parts of a run.

    These are the checkpoints of stopped jobs, and the weights of old models. Models stay if they are the newest version
    of their kind or the best controller, or if one of these or another run needs them.
    """
    removable = [
        Removable(
            f"{folder.parent.name}/{folder.name}",
            "checkpoint of stopped work",
            *_size_and_time(folder),
            partial(_discard, run, folder),
        )
        for folder in run.unfinished()
        if _is_idle(folder.parent)
    ]
    in_use = [artifact for kind in MODELS for artifact in run.artifacts(kind)[-1:]]
    in_use += needed_elsewhere(run)
    with suppress(ArtifactError):
        in_use.append(run.resolve(f"controller@{BEST}", "controller"))
    digests = {artifact.digest for artifact in needed(in_use)}
    for kind in MODELS:
        for artifact in run.artifacts(kind):
            if artifact.digest not in digests:
                remove = partial(run.prune, kind, {artifact.version})
                description = "unused weights; manifest and pictures stay"
                removable.append(Removable(artifact.name, description, *_size_and_time(artifact.path), remove))
    return removable


def _is_idle(folder: Path) -> bool:
    """Return whether no process works on this kind."""
    try:
        with exclusive(folder, str(folder)):
            return True
    except BusyError:
        return False


def _discard(run: Run, folder: Path) -> None:
    with disk_errors(folder), exclusive(folder.parent, f"{folder.parent.name} in {run}"):
        discard(folder)


def _size_and_time(folder: Path) -> tuple[int, str]:
    """Return the bytes in a folder without its manifest, and the time of the last change."""
    stats = [file.stat() for file in folder.rglob("*") if file.is_file() and file.name not in (MANIFEST, PRUNED)]
    last = max((each.st_mtime for each in stats), default=folder.stat().st_mtime)
    return sum(each.st_size for each in stats), datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds")
