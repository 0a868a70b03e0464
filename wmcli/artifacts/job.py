"""A stage's unit of work: recognized when it was done before, resumed when it was interrupted, published whole.

What a crash can leave, and who clears it away: a work directory with its checkpoints (the same job resumes it, others
leave it alone); a work directory whose payload was published already, which is one without `payload/` (the next `done`
or `work` of that job removes it); trash and drafts of links (the next `done` or `work` of the kind); an old `latest`
(every reader mends it).
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wmcli.artifacts.failpoint import failpoint
from wmcli.artifacts.files import debris, discard, disk_errors, make_folder, regular_files, sweep, sync_folder
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
"""A number for each kind of work, to raise when the same settings give other results, as after the mend of a fault: the
work is then done again instead of found done."""

PAYLOAD = "payload"
WORK = ".work-"
"""How the name of a work folder begins."""

# What a rename onto a place that is taken says, depending on what took it.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Job:
    """One piece of work. Two jobs with the same digest make the same thing. Made by `Run.job`."""

    def __init__(self, run: Run, kind: str, identity: Identity, inputs: dict[str, Artifact]) -> None:
        self.run, self.kind, self.identity, self.inputs = run, kind, identity.values, inputs
        self._by_role = {role: artifact.digest for role, artifact in inputs.items()}
        self.folder = run.path / kind
        self.sections = identity.sections
        identity = identity.revised(REVISIONS[kind])
        digests = [self._digest(values) for values in (identity.values, *identity.earlier)]
        self._digests = frozenset(digests)
        # Work that an earlier version of wm began goes on under the digest that it had there.
        begun = (digest for digest in digests if has_checkpoint(self._work_folder(digest)))
        self.digest = next(begun, digests[0])
        """sha256 of the kind, the identity and the inputs' digests."""
        self.work_folder = self._work_folder(self.digest)
        self._found_undone = False  # what the last `done` of this object said

    def made(self, artifact: Artifact) -> bool:
        """Return whether an artifact is of this very job, under any version of wm."""
        return artifact.manifest["job"] in self._digests

    def _digest(self, values: dict[str, Any]) -> str:
        return digest_of({"kind": self.kind, "identity": values, "inputs": self._by_role})

    def _work_folder(self, digest: str) -> Path:
        return self.folder / f"{WORK}{digest[:12]}"

    def done(self) -> Artifact | None:
        """The newest version that this very job has published, None if there is none; it may be pruned.

        Versions whose manifest is damaged are passed over: they cannot be told to be this job's.
        """
        self.run.point_latest(self.kind)
        artifact = self._published()
        self._found_undone = artifact is None
        if artifact is not None:
            self._tidy()
        return artifact

    def _published(self) -> Artifact | None:
        for version in reversed(self.run.versions(self.kind)):
            with suppress(ArtifactError):
                artifact = self.run.get(self.kind, version)
                if self.made(artifact):
                    return artifact
        return None

    def otherwise(self) -> Artifact | None:
        """The newest version that another job made of the very same inputs, in `wm run`; None if there is none."""
        for version in reversed(self.run.versions(self.kind)):
            with suppress(ArtifactError):
                artifact = self.run.get(self.kind, version)
                by_role = {role: reference.digest for role, reference in artifact.inputs.items()}
                in_loop = artifact.manifest["extra"].get("epoch", "unknown") is not None
                if by_role == self._by_role and in_loop and not self.made(artifact):
                    return artifact
        return None

    @contextmanager
    def work(self, *, fresh: bool = False) -> Iterator[Work]:
        """Hold the kind's lock and the job's work directory, whose checkpoints are kept unless `fresh`.

        In the `with` block an OSError that is a limit of the machine becomes a MachineError. If the block ends without
        `publish`, checkpoints stay for the next time.

        Raises BusyError while another process writes this kind, or if one published this very job after `done` said
        that nobody had.
        """
        with disk_errors(self.folder):
            make_folder(self.folder)
            with exclusive(self.folder, f"{self.kind} in {self.run}"):
                if self._found_undone and (artifact := self._published()) is not None:
                    raise BusyError(
                        f"another process has just made {artifact.name} of the same; run the command again."
                    )
                sweep(self.folder)
                if fresh or self._was_published():
                    discard(self.work_folder)
                work = Work(self, self.work_folder, self.work_folder / PAYLOAD, has_checkpoint(self.work_folder))
                discard(work.payload)
                work.payload.mkdir(parents=True)
                failpoint("work-opened")
                try:
                    yield work
                finally:
                    with suppress(OSError):  # it must not hide what ended the block
                        if not has_checkpoint(self.work_folder):
                            discard(self.work_folder)

    def _tidy(self) -> None:
        """Remove what a crash during or right after publication left, unless somebody is at work."""
        if self._was_published() or debris(self.folder):
            with suppress(BusyError, OSError), exclusive(self.folder, str(self.folder)):
                sweep(self.folder)
                if self._was_published():
                    discard(self.work_folder)

    def _was_published(self) -> bool:
        """Whether the work directory is one whose payload was renamed away."""
        return self.work_folder.exists() and not (self.work_folder / PAYLOAD).exists()


def has_checkpoint(folder: Path) -> bool:
    """Whether a work directory holds anything of use: not the payload, not a file that was being written."""
    if not folder.is_dir():
        return False
    return any(entry.name != PAYLOAD and not entry.name.endswith(".partial") for entry in folder.iterdir())


@dataclass(frozen=True)
class Work:
    """The work directory of a job, while this process holds it."""

    job: Job
    path: Path
    """Put checkpoint files here, each written atomically; nothing in it is published."""
    payload: Path
    """Put the files to publish here. Empty at the start, also when work is resumed."""
    resumed: bool
    """Whether checkpoint files of an earlier process are here."""

    def publish(
        self,
        *,
        settings: dict[str, Any],
        metrics: dict[str, Any],
        environment: dict[str, Any] | None,
        machine: dict[str, Any],
        extra: dict[str, Any] | None = None,
    ) -> Artifact:
        """Turn the payload into the next version, atomically and durably, and remove the work directory.

        When it returns, the version survives a power cut; until its rename nobody sees anything of it.

        Raises DivergedError if a metric is not finite, MachineError if the disk fails; then nothing is published.
        """
        job, run = self.job, self.job.run
        for name, value in metrics.items():
            if finite(value) != value:
                raise DivergedError(f"{job.kind}: metric {name} is not finite, so nothing was published.")
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
            body["files"] = _seal(self.payload)
            failpoint("publish-sealed")
            target = self._claim(body)
            failpoint("publish-renamed")
            sync_folder(self.path)
            sync_folder(job.folder)
            failpoint("publish-durable")
            run.point_latest(job.kind)
            failpoint("publish-linked")
            discard(self.path)
            failpoint("publish-done")
        return open_artifact(target)

    def _claim(self, body: dict[str, Any]) -> Path:
        """Rename the payload to the first free version. Onto one that exists a rename fails: nobody is overwritten."""
        while True:
            version = self.job.run.next_version(self.job.kind)
            write_manifest(self.payload, {**body, "version": version})
            failpoint("publish-manifest")
            target = self.job.folder / version_name(version)
            try:
                self.payload.rename(target)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
            else:
                return target


def _seal(payload: Path) -> list[dict[str, Any]]:
    """Force every file and folder to the disk; returns the manifest's list of files."""
    files = []
    sizes = regular_files(payload, "the payload")
    assert not {MANIFEST, PRUNED} & sizes.keys(), "names that artifacts use themselves"
    for name, size in sizes.items():
        with (payload / name).open("rb") as file:
            files.append({"path": name, "size": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()})
            os.fsync(file.fileno())
        failpoint("publish-file")
    for folder, _, _ in os.walk(payload, topdown=False):
        sync_folder(Path(folder))
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
