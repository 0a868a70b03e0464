"""Upgrade of a run that an earlier version of wm made.

Only run.toml is written anew, with the settings that this version reads from it. Everything else stays as it is and is
read through migrations: an artifact is named by the digest of its manifest, which other artifacts and other runs refer
to, and a checkpoint by the job of the version that began it.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from typing import Literal, NamedTuple

from wmcli.artifacts.files import disk_errors
from wmcli.artifacts.job import has_checkpoint
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.manifest import KINDS
from wmcli.artifacts.overview import locked_folders
from wmcli.artifacts.store import BINDING, Run
from wmcli.config import MAX_TOML_BYTES, SCHEMA, read_toml
from wmcli.errors import ArtifactError, LaterVersionError, UsageError
from wmcli.reading import read_file


class Part(NamedTuple):
    """What an upgrade does with a part of a run."""

    part: str
    """A file, or a kind of artifact."""
    number: int
    """Of files, versions or checkpoints."""
    schema: int | None
    """Of its settings; None where they have none of their own."""
    newest: int | None
    """Schema that this version writes."""
    action: Literal["rewrite", "keep"]
    reason: str


def plan_upgrade(run: Run) -> list[Part]:
    """Return what an upgrade of a run rewrites and what it keeps. Nothing is written.

    Raises:
        UsageError: A later version of wm wrote a part of it, or run.toml is damaged.
        ArtifactError: It is no run.
    """
    parts = []
    if run.bound() is not None:  # raises UsageError if a later version wrote it
        schema = _schema_of_binding(run)
        action: Literal["rewrite", "keep"] = "rewrite" if schema < SCHEMA else "keep"
        reason = "the same settings under today's names" if schema < SCHEMA else "up to date"
        parts.append(Part(BINDING, 1, schema, SCHEMA, action, reason))
    for kind in KINDS:
        parts += _versions(run, kind)
    if checkpoints := [folder for folder in run.unfinished() if has_checkpoint(folder)]:
        reason = "the command that was stopped resumes them"
        parts.append(Part("checkpoints", len(checkpoints), None, None, "keep", reason))
    if not parts:
        raise ArtifactError(f"{run} has no {BINDING} and no artifacts, so it is no run; list runs with: wm runs")
    return parts


def upgrade_run(run: Run) -> list[Part]:
    """Upgrade a run in place. Killed at any point it is as before or upgraded.

    Returns:
        The parts as they were before, see `plan_upgrade`.

    Raises:
        UsageError: See `plan_upgrade`.
        BusyError: A process works on the run.
        MachineError: The disk fails.
    """
    parts = plan_upgrade(run)
    if not is_outdated(parts):
        return parts
    if not os.access(run.path, os.W_OK | os.X_OK):
        raise UsageError(f"{run}: the folder is not writable; upgrade a copy of it.")
    with ExitStack() as held, disk_errors(run.path):
        # All of them: an earlier version that is at work reads run.toml again before it publishes.
        for folder in locked_folders(run.path):
            if folder.is_dir():
                held.enter_context(exclusive(folder, str(run)))
        bound = {key: value for key, value in (run.bound() or {}).items() if key != "changes" or value}
        run.write_binding({"schema": SCHEMA, **bound})
    return parts


def is_outdated(parts: list[Part]) -> bool:
    """Return whether an upgrade writes anything."""
    return any(part.action == "rewrite" for part in parts)


def _schema_of_binding(run: Run) -> int:
    schema: int = read_toml(read_file(run.path / BINDING, MAX_TOML_BYTES).decode(), BINDING).get("schema", 1)
    return schema


def _versions(run: Run, kind: str) -> list[Part]:
    """Return the versions of a kind by the schema of their settings."""
    schemas: Counter[int] = Counter()
    unreadable = 0
    for version in run.versions(kind):
        try:
            schemas[run.get(kind, version).manifest.get("settings_schema", 1)] += 1
        except LaterVersionError as error:
            raise UsageError(str(error)) from None
        except ArtifactError:
            unreadable += 1
    parts = [
        Part(kind, count, schema, SCHEMA, "keep", "immutable: digests refer to it; read as it is")
        for schema, count in sorted(schemas.items())
    ]
    if unreadable:
        parts.append(Part(kind, unreadable, None, SCHEMA, "keep", f"cannot be read; see: wm verify --run {run}"))
    return parts
