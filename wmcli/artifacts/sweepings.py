"""What a run holds that nobody needs: work that was stopped and not taken up, weights of models long replaced."""

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
"""Kinds of which old versions take space; of experience nothing is old, and evaluations are small."""


@dataclass(frozen=True)
class Sweeping:
    """Something that can be removed."""

    name: str
    what: str
    size: int
    """Bytes that become free."""
    written: str
    """When it was last written to: an ISO time, UTC."""
    remove: Callable[[], object]


def sweepings(run: Run) -> list[Sweeping]:
    """List what may be removed from a run.

    That is the work of jobs that were stopped, unless somebody is at it, and the weights of models that are neither the
    newest version of their kind nor the best controller, and that neither these nor another run needs.
    """
    found = [
        Sweeping(
            f"{folder.parent.name}/{folder.name}",
            "the checkpoint of work that was stopped",
            *_traces(folder),
            partial(_discard, run, folder),
        )
        for folder in run.unfinished()
        if _is_idle(folder.parent)
    ]
    kept = [artifact for kind in MODELS for artifact in run.artifacts(kind)[-1:]]
    kept += needed_elsewhere(run)
    with suppress(ArtifactError):
        kept.append(run.resolve(f"controller@{BEST}", "controller"))
    wanted = {artifact.digest for artifact in needed(kept)}
    for kind in MODELS:
        for artifact in run.artifacts(kind):
            if artifact.digest not in wanted:
                remove = partial(run.prune, kind, {artifact.version})
                what = "weights that nothing refers to; the manifest stays"
                found.append(Sweeping(artifact.name, what, *_traces(artifact.path), remove))
    return found


def _is_idle(folder: Path) -> bool:
    """Whether nobody is at work on this kind."""
    try:
        with exclusive(folder, str(folder)):
            return True
    except BusyError:
        return False


def _discard(run: Run, folder: Path) -> None:
    with disk_errors(folder), exclusive(folder.parent, f"{folder.parent.name} in {run}"):
        discard(folder)


def _traces(folder: Path) -> tuple[int, str]:
    """Bytes below a folder, without its manifest, and the last time that one of its files was written."""
    stats = [file.stat() for file in folder.rglob("*") if file.is_file() and file.name not in (MANIFEST, PRUNED)]
    last = max((each.st_mtime for each in stats), default=folder.stat().st_mtime)
    return sum(each.st_size for each in stats), datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds")
