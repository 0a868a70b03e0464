"""Removable parts of a run: checkpoints of stopped work, weights that nothing uses, and what killed processes left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from wmcli.artifacts.files import PARTIAL, debris, discard, disk_errors
from wmcli.artifacts.filesystem import PROBE
from wmcli.artifacts.health import needed, needed_elsewhere
from wmcli.artifacts.job import has_checkpoint
from wmcli.artifacts.lock import HOLDER, exclusive
from wmcli.artifacts.manifest import KINDS, MANIFEST, PRUNED, open_artifact
from wmcli.artifacts.overview import is_locked, locked_folders
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

    These are what killed processes left, the checkpoints of stopped jobs, and the weights of old models. Models stay if
    they are the newest version of their kind, the best controller, or the controller of an exported folder, or if one
    of these or another run needs them. All models stay while a process works on the run, since it may read any, and
    where a manifest is damaged, since it is unknown what its version needs.

    Raises:
        MachineError: The run cannot be read.
    """
    removable = leftovers(run)
    for folder in filter(lambda each: _is_idle(each.parent), run.unfinished()):
        name = f"{folder.parent.name}/{folder.name}"
        without = "remains of stopped work, without a checkpoint"
        what = "checkpoint of stopped work" if has_checkpoint(folder) else without
        removable += _described(folder, name, what, partial(_discard, run, folder))
    if not any(map(is_locked, locked_folders(run.path))) and not _has_damaged_manifest(run):
        removable += _unused_models(run)
    return removable


def _has_damaged_manifest(run: Run) -> bool:
    try:
        for kind in KINDS:
            for version in run.versions(kind):
                run.get(kind, version)
    except ArtifactError:
        return True
    return False


def _unused_models(run: Run) -> list[Removable]:
    in_use = [artifact for kind in MODELS for artifact in run.artifacts(kind)[-1:]]
    in_use += needed_elsewhere(run)
    with suppress(ArtifactError):
        in_use.append(run.resolve(f"controller@{BEST}", "controller"))
    with suppress(ArtifactError):
        in_use.append(open_artifact(run.path))  # of a folder that `wm export controller` wrote
    digests = {artifact.digest for artifact in needed(in_use)}
    found = []
    unused = (each for kind in reversed(MODELS) for each in run.artifacts(kind) if each.digest not in digests)
    for each in unused:  # what needs others comes before them
        what = "unused weights; manifest and pictures stay"
        found += _described(each.path, each.name, what, partial(run.prune, each.kind, {each.version}))
    return found


def leftovers(run: Run) -> list[Removable]:
    """Return what killed processes left in folders that nobody writes in: drafts, trash, partial files, notes."""
    found = []
    for folder in filter(Path.is_dir, locked_folders(run.path)):
        remains = [*debris(folder), *folder.glob(f".*{PARTIAL}"), *folder.glob(f"{PROBE}*"), *folder.glob(HOLDER)]
        if remains and not is_locked(folder):
            for each in sorted(remains):
                name, what = str(each.relative_to(run.path)), "left by a killed process"
                found += _described(each, name, what, partial(_remove, run, each))
    return found


def _is_idle(folder: Path) -> bool:
    """Return whether no process works on this kind."""
    try:
        with exclusive(folder, str(folder)):
            return True
    except BusyError:
        return False


def _remove(run: Run, path: Path) -> None:
    with disk_errors(path), exclusive(path.parent, str(run)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)  # taking the lock removes the old note


def _discard(run: Run, folder: Path) -> None:
    with disk_errors(folder), exclusive(folder.parent, f"{folder.parent.name} in {run}"):
        discard(folder)


def _described(path: Path, name: str, description: str, remove: Callable[[], object]) -> list[Removable]:
    """Return a file, or a folder without its manifest, as a removable part; nothing if it vanishes meanwhile."""
    try:
        files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
        stats = [file.lstat() for file in files if not file.is_dir() and file.name not in (MANIFEST, PRUNED)]
        last = max((each.st_mtime for each in stats), default=path.lstat().st_mtime)
    except FileNotFoundError:
        return []
    written = datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds")
    return [Removable(name, description, sum(each.st_size for each in stats), written, remove)]
