"""What the runs below a folder have come to, and how two of them differ: from manifests and run.toml alone.

Nothing here writes, takes a lock that somebody wants, or opens a payload, so it may be asked at any time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wmcli.artifacts.job import has_checkpoint
from wmcli.artifacts.lock import HOLDER, LOCK
from wmcli.artifacts.manifest import KINDS, MANIFEST, VERSION_NAME, Artifact, open_artifact
from wmcli.artifacts.store import BINDING, Run
from wmcli.config import flat
from wmcli.errors import ArtifactError, UsageError, WmError

SCORE = "returns"  # the protocol of evaluations that are scores of episodes
COLUMNS = (
    *("name", "status", "preset", "environment", "seed", "epoch", "epochs"),
    *("score", "stderr", "episodes", "evaluation", "steps", "bytes", "active", "problem"),
)
"""What `describe_run` tells of a run; None where it is not known."""

# -- the runs below a folder ------------------------------------------------------------------------------------------


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield every run directory at or below `folder`, sorted, not looking for others inside one.

    Hidden folders are left out. A link to a folder is followed once.

    Raises ArtifactError if there is no such folder.
    """
    if not folder.is_dir():
        raise ArtifactError(f"no folder {folder}; start a run with: wm run quickstart --run {folder / 'quickstart'}")
    seen: set[tuple[int, int]] = set()
    pending = [folder]
    while pending:
        here = pending.pop()
        try:
            status = here.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            names = {entry.name: entry for entry in os.scandir(here)}
        except OSError:  # no permission, or gone meanwhile: it holds no run that could be read
            continue
        if BINDING in names or any(kind in names and _has_versions(here / kind) for kind in KINDS):
            yield here
        else:
            below = sorted(name for name, entry in names.items() if name[0] != "." and entry.is_dir())
            pending += [here / name for name in reversed(below)]


def _has_versions(folder: Path) -> bool:
    return folder.is_dir() and any(VERSION_NAME.fullmatch(entry.name) for entry in folder.iterdir())


def describe_run(path: Path) -> dict[str, Any]:
    """Describe a run in plain values: what it is, how far it came, its newest score.

    `status` is running (a process writes in it), interrupted (a checkpoint waits to be taken up), finished (the last
    epoch's evaluation is the newest thing in it), idle, or damaged, and then `problem` says what cannot be read. Times
    are ISO 8601 in UTC, sizes bytes on disk.
    """
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"name": str(path), "status": "idle"}
    run = Run.open(path, create=False)
    newest: dict[str, Artifact] = {}
    try:
        if bound := run.bound():
            settings = bound["settings"]
            row |= {
                "preset": bound["preset"],
                "environment": _at(settings, "environment", "id"),
                "seed": settings.get("seed"),
                "epochs": _at(settings, "run", "epochs"),
            }
    except WmError as error:
        row["problem"] = str(error)
    for kind in KINDS:
        try:
            if versions := run.versions(kind):
                newest[kind] = run.get(kind, versions[-1])
        except ArtifactError as error:
            row["problem"] = row["problem"] or str(error)
    try:
        row |= _progress(run, newest)
    except (ArtifactError, KeyError, TypeError, ValueError) as error:  # a manifest of an unknown shape
        row["problem"] = row["problem"] or f"{path}: cannot be understood: {error!r}"
    row["bytes"], changed = _disk_usage(path)
    row["active"] = datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds")
    if any(_held(folder) for folder in (path, *(path / kind for kind in KINDS))):
        row["status"] = "running"
    elif row["problem"]:
        row["status"] = "damaged"
    elif any(map(has_checkpoint, run.unfinished())):
        row["status"] = "interrupted"
    elif _finished(newest, row["epochs"]):
        row["status"] = "finished"
    return row


def _progress(run: Run, newest: Mapping[str, Artifact]) -> dict[str, Any]:
    """The epoch, where artifacts say it, environment steps, and the newest score."""
    row: dict[str, Any] = {"epoch": max(filter(None, map(_epoch, newest.values())), default=None)}
    if "experience" in newest:
        row["steps"] = newest["experience"].metrics.get("total_steps")
    scored = newest.get("evaluation")
    if scored is not None and scored.metrics.get("protocol") != SCORE:  # there may be several, each of its protocol
        every = (run.get("evaluation", version) for version in reversed(run.versions("evaluation")))
        scored = next((each for each in every if each.metrics.get("protocol") == SCORE), None)
    if scored is not None:
        row |= {"score": scored.metrics["mean"], "stderr": scored.metrics["stderr"]}
        row |= {"episodes": scored.metrics["episodes"], "evaluation": scored.name}
    return row


def _finished(newest: Mapping[str, Artifact], epochs: int | None) -> bool:
    """Whether the newest evaluation is the last epoch's; of a run without epochs, whether nothing was trained since."""
    if "evaluation" not in newest:
        return False
    if (epoch := _epoch(newest["evaluation"])) is not None:
        return epoch == epochs
    trained = [each.manifest["created"] for kind, each in newest.items() if kind not in ("evaluation", "profile")]
    return max(trained, default="") <= newest["evaluation"].manifest["created"]


def _epoch(artifact: Artifact) -> int | None:
    return artifact.manifest["extra"].get("epoch")


def _held(folder: Path) -> bool:
    """Whether a process holds the lock of a folder.

    The holder's note is there only while somebody holds it or after a crash; so asking for a shared lock, for an
    instant, never keeps anybody out who would have got in.
    """
    if not (folder / HOLDER).exists():
        return False
    with suppress(OSError), (folder / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def bytes_on_disk(folder: Path) -> int:
    """Add up the sizes of all files in a folder."""
    return _disk_usage(folder)[0]


def _disk_usage(folder: Path) -> tuple[int, float]:
    """Bytes of all files in a folder, and when the newest entry changed, in seconds since 1970."""
    size, changed = 0, 0.0
    pending = [str(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    changed = max(changed, status.st_mtime)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        size += status.st_size
    return size, changed


def _at(values: Mapping[str, Any], section: str, key: str) -> Any:
    inside = values.get(section)
    return inside.get(key) if isinstance(inside, Mapping) else None


# -- how two of them differ -------------------------------------------------------------------------------------------


def differences(left: Path, right: Path) -> list[dict[str, Any]]:
    """Compare two runs by the settings they are bound to, or two artifacts by all that their manifests say of them.

    Args:
        left: a run directory, or a version directory such as `runs/a/dynamics/v0003`.
        right: another of the same sort.

    Returns:
        A row `{"part", "key", "left", "right"}` for each value that differs; None where a side has no such key.

    Raises:
        UsageError: one is a run and the other an artifact.
        ArtifactError: nothing to compare is there.
    """
    if _is_version(left) != _is_version(right):
        raise UsageError(f"{left} and {right}: give two runs or two artifacts, not one of each.")
    sides = [_manifest_parts(each) if _is_version(each) else _bound_parts(each) for each in (left, right)]
    rows = []
    for part in sides[0]:
        one, other = (side[part] for side in sides)
        for key in dict.fromkeys([*one, *other]):
            if one.get(key) != other.get(key) and not key.startswith("alternatives."):
                rows.append({"part": part, "key": key, "left": one.get(key), "right": other.get(key)})
    return rows


def _is_version(path: Path) -> bool:
    """Whether a path is that of an artifact, or would be if it existed."""
    return bool(VERSION_NAME.fullmatch(path.name)) or path.name == MANIFEST or (path / MANIFEST).exists()


def _bound_parts(path: Path) -> dict[str, dict[str, Any]]:
    run = Run.open(path, create=False)
    bound = run.bound()
    if bound is None:
        raise ArtifactError(f"{path} holds no {BINDING}, so it is no run; list those there are with: wm runs {path}")
    return {"run": {"preset": bound["preset"]}, "settings": flat(bound["settings"])}


def _manifest_parts(path: Path) -> dict[str, dict[str, Any]]:
    artifact = open_artifact(path)
    inputs = {role: f"{each.name} {each.digest[:12]}" for role, each in artifact.inputs.items()}
    manifest = artifact.manifest
    return {
        "artifact": {"kind": artifact.kind, "preset": manifest.get("preset")},
        "settings": flat(artifact.settings),
        "environment": flat(manifest["environment"] or {}),
        "machine": flat(manifest["machine"]),
        "inputs": inputs,
    }
