"""Overview of runs and differences between two of them, from manifests and run.toml only.

Nothing here writes, opens a payload, or holds a lock that another process waits for.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wmcli.artifacts.job import has_checkpoint
from wmcli.artifacts.lock import HOLDER, LOCK
from wmcli.artifacts.manifest import KINDS, MANIFEST, VERSION_NAME, Artifact, open_artifact
from wmcli.artifacts.store import BINDING, Run, records_in
from wmcli.config import flat, lay_over, nested, parse_override
from wmcli.errors import ArtifactError, UsageError, WmError
from wmcli.reading import damage, open_file

SCORE = "returns"  # protocol of the evaluations that give a run its score
COLUMNS = (
    *("name", "status", "preset", "environment", "seed", "epoch", "epochs"),
    *("score", "stderr", "episodes", "evaluation", "steps", "bytes", "active", "problem"),
)
"""Keys of `describe_run`. Unknown values are None."""
TAIL_BYTES = 1 << 14  # of metrics.jsonl: some of its last lines

# -- the runs below a folder ------------------------------------------------------------------------------------------


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield every run directory at or below `folder`, sorted. Runs inside runs and hidden folders are skipped.

    Raises:
        ArtifactError: There is no such folder.
    """
    if not folder.is_dir():
        raise ArtifactError(f"no folder {folder}; start a run with: wm run quickstart --run {folder / 'quickstart'}")
    visited: set[tuple[int, int]] = set()
    pending = [folder]
    while pending:
        here = pending.pop()
        try:
            status = here.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            names = {entry.name: entry for entry in os.scandir(here)}
        except OSError:  # no permission, or removed meanwhile
            continue
        if BINDING in names or any(kind in names and _has_versions(here / kind) for kind in KINDS):
            yield here
        else:
            below = sorted(name for name, entry in names.items() if name[0] != "." and entry.is_dir())
            pending += [here / name for name in reversed(below)]


def _has_versions(folder: Path) -> bool:
    return folder.is_dir() and any(VERSION_NAME.fullmatch(entry.name) for entry in folder.iterdir())


def describe_run(
    path: Path, *, locked: bool | None = None, usage: tuple[int | None, float] | None = None
) -> dict[str, Any]:
    """Return preset, progress, newest score and size of a run as plain values, with the keys of COLUMNS.

    `status` is "running" (a process writes in it), "interrupted" (it has a checkpoint), "finished" (the newest artifact
    is the last epoch's evaluation, or `run.patience` ended it), "idle", or "damaged", with the reason in `problem`.
    Times are ISO 8601 in UTC, sizes bytes on disk.

    Args:
        path: The run.
        locked: Whether a process holds a lock of it, if the caller knows.
        usage: Its `disk_usage`, if the caller knows.
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
        except WmError as error:
            row["problem"] = row["problem"] or str(error)
    try:
        with damage(path):
            row |= _progress(run, newest)
    except WmError as error:
        row["problem"] = row["problem"] or str(error)
    row["bytes"], changed = disk_usage(path) if usage is None else usage
    row["active"] = datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds")
    if any(map(is_locked, locked_folders(path))) if locked is None else locked:
        row["status"] = "running"
    elif row["problem"]:
        row["status"] = "damaged"
    elif any(map(has_checkpoint, run.unfinished())):
        row["status"] = "interrupted"
    else:
        try:
            row["status"] = "finished" if _finished(run, newest, row["epochs"]) else "idle"
        except WmError as error:
            row |= {"status": "damaged", "problem": str(error)}
    return row


def _progress(run: Run, newest: Mapping[str, Artifact]) -> dict[str, Any]:
    """Return epoch, environment steps and the newest score, if known."""
    row: dict[str, Any] = {"epoch": max(filter(None, map(epoch_of, newest.values())), default=None)}
    if "experience" in newest:
        row["steps"] = newest["experience"].metrics.get("total_steps")
    scored = newest.get("evaluation")
    if scored is not None and scored.metrics.get("protocol") != SCORE:  # another protocol
        every = (run.get("evaluation", version) for version in reversed(run.versions("evaluation")))
        scored = next((each for each in every if each.metrics.get("protocol") == SCORE), None)
    if scored is not None:
        row |= {"score": scored.metrics["mean"], "stderr": scored.metrics["stderr"]}
        row |= {"episodes": scored.metrics["episodes"], "evaluation": scored.name}
    return row


def _finished(run: Run, newest: Mapping[str, Artifact], epochs: int | None) -> bool:
    """Return whether the newest evaluation is the last epoch's or, without epochs, newer than every model.

    `run.patience` may have made an earlier epoch the last one.
    """
    if "evaluation" not in newest:
        return False
    if (epoch := epoch_of(newest["evaluation"])) is not None:
        return epoch == epochs or last_of_patience(run) is not None
    trained = [each.manifest["created"] for kind, each in newest.items() if kind not in ("evaluation", "profile")]
    return max(trained, default="") <= newest["evaluation"].manifest["created"]


def locked_folders(run: Path) -> list[Path]:
    """Return the folders of a run whose locks its writers hold."""
    return [run, *(run / kind for kind in KINDS)]


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder.

    The holder's note exists only while the lock is held or after a crash. So the shared lock that this function takes
    for a moment keeps no other process out.
    """
    with suppress(OSError, WmError):
        if not (folder / HOLDER).exists():
            return False
    with suppress(OSError, WmError), open_file(folder / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def bytes_on_disk(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return disk_usage(folder)[0]


def disk_usage(folder: Path) -> tuple[int, float]:
    """Return the bytes of all files in a folder, and the newest time of change in seconds since 1970."""
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


def last_record(metrics: Path) -> dict[str, Any]:
    """Return the last complete line of a run's records; empty without one."""
    try:
        with open_file(metrics) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except (OSError, WmError):
        return {}
    return next(reversed(records_in(data)), {})


def seconds_left(epoch: int | None, epochs: int | None, seconds: float | None) -> float | None:
    """Estimate the time to the end of a run in its `epoch` after so many seconds of work. None if unknown."""
    if not epoch or not epochs or seconds is None:
        return None
    share = (epoch - 1) / epochs  # an epoch counts when it is over
    return seconds * (1 - share) / share if share else None


def _at(values: Mapping[str, Any], section: str, key: str) -> Any:
    inside = values.get(section)
    return inside.get(key) if isinstance(inside, Mapping) else None


# -- the end by run.patience ------------------------------------------------------------------------------------------


def stalled(means: Sequence[float], patience: int) -> int | None:
    """Return the place of the best of some means, the newest of equals, if none of the last `patience` is better.

    None if one is.
    """
    if not patience or not means:
        return None
    best = max(means)
    if len(means) - 1 - means.index(best) < patience:
        return None
    return max(place for place, mean in enumerate(means) if mean == best)


def last_of_patience(run: Run, protocol: str = SCORE) -> Artifact | None:
    """Return the newest evaluation with which `run.patience` ended a run; None if it did not, by its settings of today.

    Nothing on disk says so, since other settings may go on. So it follows the evaluations on the way as the loop does.

    Raises:
        ArtifactError: An evaluation, or the settings of the run, are damaged.
    """
    bound = run.bound()
    if bound is None or not _at(bound["settings"], "run", "patience"):
        return None
    with damage(run.path):
        return _follow_patience(run, protocol, bound)


def _follow_patience(run: Run, protocol: str, bound: Mapping[str, Any]) -> Artifact | None:
    """Return the result of `last_of_patience` by a content of run.toml, see `Run.bound`."""
    plan = bound["settings"]["run"]
    evaluations, epochs = run.artifacts("evaluation"), _epochs_of_controllers(run)
    scores = [each for each in evaluations if each.metrics["protocol"] == SCORE]
    on_the_way: dict[int, Artifact] = {}
    for each in scores:
        epoch, is_short = epoch_of(each), each.metrics["episodes"] == plan["evaluate_episodes"]
        if epoch is not None and is_short and epoch == epochs.get(each.inputs["controller"].digest):
            on_the_way[epoch] = each
    due = sorted(epoch for epoch in on_the_way if epoch < plan["epochs"] and epoch % plan["evaluate_every"] == 0)
    means = [on_the_way[epoch].metrics["mean"] for epoch in due]
    for count, epoch in enumerate(due, 1):
        best = stalled(means[:count], plan["patience"])
        if best is None:
            continue
        if protocol != SCORE:
            last = [each for each in evaluations if each.metrics["protocol"] == protocol and epoch_of(each) == epoch]
        else:
            controller = on_the_way[due[best]].inputs["controller"].digest
            episodes = _episodes(bound, epoch)
            of_best = [each for each in scores if each.inputs["controller"].digest == controller]
            last = [each for each in of_best if each.metrics["episodes"] == episodes]
        return last[-1] if last else None
    return None


def _episodes(bound: Mapping[str, Any], epoch: int) -> int:
    """Return `evaluation.episodes` of an epoch by a content of run.toml."""
    settings = bound["settings"]
    for text in (text for change in bound["changes"] if change["epoch"] <= epoch for text in change["set"]):
        settings = lay_over(settings, nested(*parse_override(text)))
    episodes: int = settings["evaluation"]["episodes"]
    return episodes


def _epochs_of_controllers(run: Run) -> dict[str, int | None]:
    """Return the epochs of the newest controller of `wm run` and of its ancestors, by digest."""
    controllers: dict[str, Artifact] = {}
    for version in run.versions("controller"):  # also those without weights
        with suppress(ArtifactError):
            controller = run.get("controller", version)
            controllers[controller.digest] = controller
    epochs: dict[str, int | None] = {}
    each = next((each for each in reversed(controllers.values()) if epoch_of(each) is not None), None)
    while each is not None:
        epochs[each.digest] = epoch_of(each)
        each = controllers.get(each.inputs["parent"].digest) if "parent" in each.inputs else None
    return epochs


def epoch_of(artifact: Artifact) -> int | None:
    """Return the epoch of `wm run` that made an artifact; None outside of it, or if it was not recorded."""
    epoch: int | None = artifact.manifest["extra"].get("epoch")
    return epoch


# -- differences -----------------------------------------------------------------------------------------------------


def differences(left: Path, right: Path) -> list[dict[str, Any]]:
    """Compare two runs by their settings, or two artifacts by their manifests.

    Args:
        left: A run directory, or a version directory such as `runs/a/dynamics/v0003`.
        right: Another one of the same sort.

    Returns:
        A row `{"part", "key", "left", "right"}` for each differing value. None is a missing key.

    Raises:
        UsageError: One is a run and the other an artifact.
        ArtifactError: A path is neither.
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
    """Return whether a path is that of an artifact, existing or not."""
    return bool(VERSION_NAME.fullmatch(path.name)) or path.name == MANIFEST or (path / MANIFEST).exists()


def _bound_parts(path: Path) -> dict[str, dict[str, Any]]:
    run = Run.open(path, create=False)
    bound = run.bound()
    if bound is None:
        raise ArtifactError(f"{path} has no {BINDING}, so it is no run; list runs with: wm runs {path}")
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


def moment(text: Any) -> datetime | None:
    """Return an ISO 8601 time with its zone; None for anything else."""
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo is not None else None


def seconds_of_work(records: Iterable[Mapping[str, Any]], until: datetime) -> float:
    """Return how long processes worked on a run up to a moment. Pauses do not count, nor records without a time.

    Args:
        records: Of its metrics.jsonl. Lines without `began`, of older versions, count as of one process.
        until: The moment.
    """
    spans: dict[datetime | None, tuple[datetime, datetime]] = {}
    for record in records:
        time = moment(record.get("time"))
        if time is not None and time <= until:
            key = moment(record.get("began"))
            began = spans[key][0] if key in spans else key or time
            spans[key] = began, time
    total, reached = 0.0, datetime.min.replace(tzinfo=UTC)
    for began, ended in sorted(spans.values()):  # of two processes at a time, one counts
        total += max(0.0, (ended - max(began, reached)).total_seconds())
        reached = max(reached, ended)
    return total
