"""Jobs: the unit of work of a stage. A finished job is recognized, an interrupted one resumes, a result appears whole.

A crash can leave:

- a work directory with checkpoints: the same job resumes it;
- a work directory without `payload/`, which was published: the next `done` or `work` of the job removes it;
- trash and drafts of links: the next `done` or `work` of the kind removes them;
- an old `latest`: every reader corrects it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wmcli.artifacts.failpoint import failpoint
from wmcli.artifacts.files import DRAFT, TRASH, discard, disk_errors, make_folder, regular_files, sweep, sync_folder
from wmcli.artifacts.lock import exclusive
from wmcli.artifacts.manifest import (
    KINDS,
    MANIFEST,
    PRUNED,
    Artifact,
    finite,
    open_artifact,
    version_name,
    write_manifest,
)
from wmcli.config import SCHEMA, Identity
from wmcli.config import digest as digest_of
from wmcli.errors import ArtifactError, BusyError, DivergedError

if TYPE_CHECKING:
    from wmcli.artifacts.store import Run

REVISIONS: dict[str, int] = dict.fromkeys(KINDS, 1)
"""Revision of each kind of work. Raise it when equal settings give other results, for example after a bug fix: finished
jobs then run again."""

PAYLOAD = "payload"
WORK = ".work-"
"""Prefix of the names of work folders."""

SEALED_AT_ONCE = 16
"""Files that are synchronized to disk at the same time."""

# Errors of a rename onto an existing file or folder.
_EXISTS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class MadeMeanwhileError(BusyError):
    """Another process has published a job since `Job.done` did not find it."""


class Job:
    """A unit of work, made by `Run.job`. Two jobs with the same digest have the same result."""

    def __init__(self, run: Run, kind: str, identity: Identity, inputs: dict[str, Artifact]) -> None:
        self.run, self.kind, self.identity, self.inputs = run, kind, identity.values, inputs
        self._by_role = {role: artifact.digest for role, artifact in inputs.items()}
        self.folder = run.path / kind
        self.sections = identity.sections
        identity = identity.revised(REVISIONS[kind])
        digests = [self._digest(values) for values in (identity.values, *identity.earlier)]
        self._digests = frozenset(digests)
        # Work that an earlier version of wm began continues under its digest there.
        remains = run.remains(kind)
        interrupted = (
            digest
            for digest in digests
            if _work_name(digest) in remains and has_checkpoint(self.folder / _work_name(digest))
        )
        self.digest = next(interrupted, digests[0])
        """sha256 of the kind, the identity and the inputs' digests."""
        self.work_folder = self.folder / _work_name(self.digest)
        self._is_undone = False  # result of the last `done` of this object

    def made(self, artifact: Artifact) -> bool:
        """Return whether an artifact was made by this job, under any version of wm."""
        return artifact.manifest["job"] in self._digests

    def _digest(self, values: dict[str, Any]) -> str:
        return digest_of({"kind": self.kind, "identity": values, "inputs": self._by_role})

    def done(self) -> Artifact | None:
        """Return the newest version that this job published, or None. It may be pruned.

        Versions with a damaged manifest are skipped, because their job is unknown.
        """
        self.run.point_latest(self.kind)
        artifact = self.run.find(self.kind, self._digests)
        self._is_undone = artifact is None
        if artifact is not None:
            self._tidy()
        return artifact

    def otherwise(self) -> Artifact | None:
        """Return the newest version that another job of `wm run` made from the same inputs, or None."""
        for version in reversed(self.run.versions(self.kind)):
            with suppress(ArtifactError):
                artifact = self.run.get(self.kind, version)
                by_role = {role: reference.digest for role, reference in artifact.inputs.items()}
                in_loop = artifact.manifest["extra"].get("epoch", "unknown") is not None
                if by_role == self._by_role and in_loop and not self.made(artifact):
                    return artifact
        return None

    @contextmanager
    def work(self, *, fresh: bool = False, waiting: Callable[[str], None] | None = None) -> Iterator[Work]:
        """Hold the kind's lock and the job's work directory.

        In the `with` block an OSError that is a limit of the machine becomes a MachineError. Without `publish`,
        checkpoints stay for the next time.

        Args:
            fresh: Discard the checkpoints of earlier work.
            waiting: Wait while another process writes this kind, see `exclusive`.

        Raises:
            BusyError: Another process writes this kind.
            MadeMeanwhileError: Another process has published this job since the last `done`.
        """
        with disk_errors(self.folder):
            make_folder(self.folder)
            with exclusive(self.folder, f"{self.kind} in {self.run}", waiting=waiting):
                if self._is_undone and (artifact := self.run.find(self.kind, self._digests)) is not None:
                    raise MadeMeanwhileError(
                        f"another process has just published {artifact.name} of this job; run the command again."
                    )
                sweep(self.folder)
                for folder in self.folder.glob(f"{WORK}*"):
                    if not (folder / PAYLOAD).exists():  # it was published; `wm collect` never has the same job again
                        discard(folder)
                if fresh:
                    discard(self.work_folder)
                work = Work(self, self.work_folder, self.work_folder / PAYLOAD, has_checkpoint(self.work_folder))
                work.payload.mkdir(parents=True, exist_ok=True)
                _empty(work.payload)  # not removed: without it the work would count as published
                failpoint("work-opened")
                try:
                    yield work
                finally:
                    with suppress(OSError):  # it would hide the error that ended the block
                        if not has_checkpoint(self.work_folder):
                            discard(self.work_folder)

    def _tidy(self) -> None:
        """Remove the remains of a crash during publication, unless another process works on this kind."""
        remains = self.run.remains(self.kind)
        if (self.work_folder.name in remains and self._was_published()) or any(
            name.startswith((TRASH, DRAFT)) for name in remains
        ):
            with suppress(BusyError, OSError), exclusive(self.folder, str(self.folder)):
                sweep(self.folder)
                if self._was_published():
                    discard(self.work_folder)

    def _was_published(self) -> bool:
        """Return whether the payload of the work directory was published."""
        return self.work_folder.exists() and not (self.work_folder / PAYLOAD).exists()


def _work_name(digest: str) -> str:
    return f"{WORK}{digest[:12]}"


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def has_checkpoint(folder: Path) -> bool:
    """Return whether a work directory has a checkpoint: any complete file beside the payload."""
    if folder.is_dir():
        with suppress(FileNotFoundError):  # another process has just published it
            return any(entry.name != PAYLOAD and not entry.name.endswith(".partial") for entry in folder.iterdir())
    return False


@dataclass(frozen=True)
class Work:
    """The work directory of a job, while this process holds it."""

    job: Job
    path: Path
    """Folder for checkpoints, each written atomically. They are not published."""
    payload: Path
    """Folder for the files to publish. Empty at the start, also of resumed work."""
    resumed: bool
    """Whether an earlier process left checkpoints."""

    def publish(
        self,
        *,
        settings: dict[str, Any],
        metrics: dict[str, Any],
        environment: dict[str, Any] | None,
        machine: dict[str, Any],
        extra: dict[str, Any] | None = None,
        sha256: Mapping[str, str] | None = None,
    ) -> Artifact:
        """Publish the payload as the next version, atomically and durably, and remove the work directory.

        The version appears by one rename. After the return it survives a power cut.

        Args:
            settings: See `Artifact`.
            metrics: All finite.
            environment: None where there is none.
            machine: Hardware and arithmetic.
            extra: More values for the manifest.
            sha256: Of files in the payload whose writer knows it. The others are read.

        Raises:
            DivergedError: A metric is not finite. Nothing is published.
            MachineError: The disk fails. Nothing is published.
        """
        job, run = self.job, self.job.run
        for name, value in metrics.items():
            if finite(value) != value:
                raise DivergedError(f"{job.kind}: metric {name} is not finite; nothing was published.")
        body: dict[str, Any] = {
            "kind": job.kind,
            "job": job.digest,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings,
            "settings_schema": SCHEMA,
            "revision": REVISIONS[job.kind],
            "environment": environment,
            "inputs": {role: _reference(artifact, run.path) for role, artifact in job.inputs.items()},
            "metrics": metrics,
            "machine": machine,
            "extra": extra or {},
        }
        if bound := run.bound():
            body["preset"] = bound["preset"]
        with disk_errors(self.path):
            failpoint("publish-start")
            body["files"] = _seal(self.payload, sha256 or {})
            failpoint("publish-sealed")
            target = self._claim(body)
            failpoint("publish-renamed")
            sync_folder(self.path)
            sync_folder(job.folder)
            failpoint("publish-durable")
            run.point_latest(job.kind)
            failpoint("publish-linked")
            with suppress(OSError):  # it is published, and the next `done` of the job removes what is left
                discard(self.path)
            failpoint("publish-done")
        artifact = open_artifact(target)
        artifact.mark_verified()
        return artifact

    def _claim(self, body: dict[str, Any]) -> Path:
        """Rename the payload to the first free version. A rename onto an existing version fails."""
        while True:
            version = self.job.run.next_version(self.job.kind)
            write_manifest(self.payload, {**body, "version": version})
            failpoint("publish-manifest")
            target = self.job.folder / version_name(version)
            try:
                self.payload.rename(target)
            except OSError as error:
                if error.errno not in _EXISTS:
                    raise
            else:
                return target


def _seal(payload: Path, sha256: Mapping[str, str]) -> list[dict[str, Any]]:
    """Synchronize every file and folder to disk. Return the manifest's list of files, with the known `sha256`.

    Many at once: a file system writes its journal once for all that wait for it.
    """
    sizes = regular_files(payload, "the payload")
    assert not {MANIFEST, PRUNED} & sizes.keys(), "reserved names"

    def seal(name: str) -> dict[str, Any]:
        with (payload / name).open("rb") as file:
            digest = sha256.get(name) or hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        return {"path": name, "size": sizes[name], "sha256": digest}

    files = []
    with ThreadPoolExecutor(SEALED_AT_ONCE) as workers:
        for entry in workers.map(seal, sizes):
            files.append(entry)
            failpoint("publish-file")
        for _ in workers.map(sync_folder, [Path(folder) for folder, _, _ in os.walk(payload)]):
            pass
    return files


def _reference(artifact: Artifact, run: Path) -> dict[str, Any]:
    here = run.resolve()
    inside = artifact.path.is_relative_to(here)
    return {
        "kind": artifact.kind,
        "version": artifact.version,
        "digest": artifact.digest,
        "path": (artifact.path.relative_to(here) if inside else artifact.path).as_posix(),
    }
