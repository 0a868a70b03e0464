"""The run directory: `<run>/run.toml`, `<run>/metrics.jsonl`, and `<run>/<kind>/v0007/` for every published version.

Readers need no lock, because a version appears by one rename. Every method of a `Run` looks at the disk, since other
processes publish and remove versions meanwhile. What it remembers only saves reading the same again: the list of a
folder that has not changed since, and where a job was found, which is checked again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from wmcli.artifacts.failpoint import failpoint
from wmcli.artifacts.files import DRAFT, TRASH, disk_errors, make_folder, sync_folder, write_durable
from wmcli.artifacts.job import PAYLOAD, WORK, Job
from wmcli.artifacts.lock import BRIEF, LOCK, exclusive
from wmcli.artifacts.manifest import (
    CLOCK_TICK,
    KINDS,
    MANIFEST,
    MOST_DEPTH,
    PRUNED,
    VERSION_NAME,
    Artifact,
    finite,
    is_picture,
    make_command,
    open_artifact,
    shown,
    version_name,
)
from wmcli.config import (
    MAX_TOML_BYTES,
    SCHEMA,
    Identity,
    canonical_json,
    check_schema,
    is_deeper,
    read_toml,
    to_toml,
    upgrade,
    upgrade_override,
)
from wmcli.errors import ArtifactError, UsageError
from wmcli.reading import damage, read_errors, read_file

LATEST = "latest"
BEST = "best"
BINDING = "run.toml"
MAX_METRICS_BYTES = 1 << 28  # of metrics.jsonl: a million records
MAX_RECORD_BYTES = 1 << 20
MAX_NOTES_BYTES = 1 << 22  # of used-by.txt
USED_BY = "used-by.txt"
"""File in a run with a line `digest folder` for each of its artifacts that another run uses as an input."""


class _Listing(NamedTuple):
    """What the folder of a kind holds."""

    state: tuple[int, ...] | None
    """Of the folder; None if it can change without a change of its state."""
    versions: list[int]
    """Numbers of the published versions, ascending."""
    highest: int
    """Highest number in use."""
    remains: frozenset[str]
    """Names of work folders, trash and drafts."""


class Run:
    """A run directory. Make one with `Run.open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Absolute."""
        self.metrics = path / "metrics.jsonl"
        """One JSON object a line, written by `log`."""
        self._listings: dict[str, _Listing] = {}  # of each kind
        self._pointed: dict[str, _Listing] = {}  # of each kind: the list whose newest version `latest` is
        self._jobs: dict[str, dict[int, str]] = {}  # of each kind: by version the digest of its job
        self._found: dict[str, dict[str, int]] = {}  # of each kind: by the digest of a job its newest version

    @classmethod
    def open(cls, path: Path | str, *, create: bool) -> Run:
        """Open a run directory.

        Args:
            path: The directory.
            create: Create it if it is missing, and require write permission.

        Raises:
            ArtifactError: It is missing and `create` is False.
            UsageError: A file has its name, or it cannot be written to.
            MachineError: The disk is full, or cannot be read.
        """
        path = Path(path)
        place = path.absolute()  # not resolved: messages show the path that the user wrote
        with read_errors(path):
            exists, is_folder = place.exists(), place.is_dir()
        if exists and not is_folder:
            raise UsageError(f"--run {path}: is a file; name a folder.")
        if not create:
            if not exists:
                raise ArtifactError(f"no run at {path}; start one with: {make_command('experience', place)}")
            return cls(place)
        with disk_errors(path):
            try:
                make_folder(place)
            except (NotADirectoryError, FileExistsError):
                raise UsageError(f"--run {path}: a part of this path is a file; name another folder.") from None
            except (PermissionError, FileNotFoundError) as error:  # some file systems take no new folders
                raise UsageError(f"--run {path}: {error.strerror}; name another folder.") from None
        if not os.access(place, os.W_OK | os.X_OK):
            raise UsageError(f"--run {path}: the folder is not writable; name another one.")
        return cls(place)

    def __str__(self) -> str:
        return shown(self.path)

    # -- settings and metrics -----------------------------------------------------------------------------------------

    def bound(self) -> dict[str, Any] | None:
        """Read run.toml, in the schema of this version of wm.

        Returns:
            `{"preset": name, "settings": {...}, "changes": [...]}`, or None without a file. Each change is
            `{"epoch": n, "set": ["section.key=value", ...]}`: settings of `wm run` from that epoch on.

        Raises:
            UsageError: The file is damaged, a link or no regular file, or a later version wrote it.
            MachineError: It cannot be read.
        """
        path = self.path / BINDING
        where = shown(path)
        try:
            values = read_toml(read_file(path, MAX_TOML_BYTES).decode(), where)
        except FileNotFoundError:
            return None
        except ArtifactError as error:
            raise UsageError(str(error)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
        if not isinstance(values.get("preset"), str) or not isinstance(values.get("settings"), dict):
            raise UsageError(f"{where}: needs a preset name and a [settings] table; repair it or use another --run.")
        changes = values.get("changes", [])
        if not isinstance(changes, list) or not all(_is_change(each) for each in changes):
            raise UsageError(f"{where}: changes: each needs an epoch and a list of settings; repair it.")
        schema = check_schema(values.get("schema", 1), where)
        with damage(where):
            changes = [{**each, "set": [upgrade_override(text, schema) for text in each["set"]]} for each in changes]
            bound = {"preset": values["preset"], "settings": upgrade(values["settings"], schema), "changes": changes}
        return bound | ({"preset_digest": values["preset_digest"]} if "preset_digest" in values else {})

    def bind(
        self,
        preset: str,
        settings: dict[str, Any],
        changes: Sequence[Mapping[str, Any]] = (),
        *,
        preset_digest: str | None = None,
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        """Write run.toml durably, unless it has the same content already.

        Args:
            preset: Name, or path of a file.
            settings: All plain values.
            changes: See `bound`.
            preset_digest: Digest of the settings in a preset file.
            expected: Result of `bound` at the start of the command, which may be replaced.

        Raises:
            UsageError: run.toml has changed since `expected`.
            BusyError: Another process writes it.
        """
        values: dict[str, Any] = {"schema": SCHEMA, "preset": preset, "settings": settings}
        if preset_digest is not None:
            values["preset_digest"] = preset_digest
        if changes:
            values["changes"] = [dict(each) for each in changes]
        binding = read_toml(to_toml(values), BINDING)
        with disk_errors(self.path), exclusive(self.path, str(self), seconds=BRIEF):
            before = self.bound()
            if before == {"changes": [], **{key: value for key, value in binding.items() if key != "schema"}}:
                return
            if before != expected:
                raise UsageError(
                    f"{self} is bound to preset {before['preset'] if before else None}; give another --run for other"
                    " settings."
                )
            self.write_binding(values)

    def write_binding(self, values: Mapping[str, Any]) -> None:
        """Write run.toml durably. The caller holds the run's lock.

        Args:
            values: All that `bound` reads, and the `schema`.
        """
        text = "# Settings of this run. `wm run --set` changes them; --set of others counts for one command.\n\n"
        write_durable(self.path / BINDING, [(text + to_toml(values)).encode()])

    def unbind(self) -> None:
        """Undo `bind` in a run without artifacts: remove run.toml, and the folders if they are empty."""
        with disk_errors(self.path), exclusive(self.path, str(self), seconds=BRIEF):
            if self.unfinished() or any(self.versions(kind) for kind in KINDS):
                return
            (self.path / BINDING).unlink(missing_ok=True)
        for folder in [*(self.path / kind for kind in KINDS), self.path]:
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl. NaN and infinity, which JSON lacks, become null."""
        line = canonical_json(finite(record)).encode() + b"\n"
        with disk_errors(self.metrics), _appending(self.metrics) as file:
            if file.tell() > 0:  # end a line that a crash cut short
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)

    def history(self) -> list[dict[str, Any]]:
        """Return all logged records, oldest first, without lines that a crash cut short.

        Raises:
            ArtifactError: metrics.jsonl is a link, no regular file, or too large.
            MachineError: It cannot be read.
        """
        try:
            return records_in(read_file(self.metrics, MAX_METRICS_BYTES))
        except FileNotFoundError:
            return []

    # -- versions -----------------------------------------------------------------------------------------------------

    def versions(self, kind: str) -> list[int]:
        """Return the numbers of all published versions, ascending, including pruned ones and links."""
        return list(self._list(kind).versions)

    def next_version(self, kind: str) -> int:
        """Return the number after the highest one in use."""
        return self._list(kind).highest + 1

    def remains(self, kind: str) -> frozenset[str]:
        """Return the names of the work folders, trash and drafts of a kind, of running and of ended processes."""
        return self._list(kind).remains

    def find(self, kind: str, jobs: Collection[str]) -> Artifact | None:
        """Return the newest readable version that one of some jobs published; None without one. It may be pruned.

        Args:
            kind: Kind of the version.
            jobs: Digests of jobs.
        """
        versions = self._list(kind).versions
        while True:
            known, found = self._jobs.setdefault(kind, {}), self._found.setdefault(kind, {})
            is_new = not known
            for version in set(versions) - known.keys():
                with suppress(ArtifactError):  # its job is unknown
                    known[version] = self.get(kind, version).manifest["job"]
                    found[known[version]] = max(version, found.get(known[version], 0))
            newest = max((found[job] for job in jobs if job in found), default=None)
            if newest is not None:
                with suppress(ArtifactError):
                    artifact = self.get(kind, newest)
                    if artifact.manifest["job"] in jobs:
                        return artifact
            if is_new:
                return None
            # It may have been removed, or put in the place of another version: look at all of them again.
            self._jobs[kind], self._found[kind] = {}, {}

    def get(self, kind: str, version: int) -> Artifact:
        """Open a version by its number. Raises ArtifactError if it is missing or damaged."""
        place = f"{self.path}/{kind}/{version_name(version)}"
        try:
            artifact = open_artifact(place)
        except ArtifactError:
            folder = Path(place)
            if folder.exists() or folder.is_symlink():
                raise
            numbers = self.versions(kind)
            if not numbers:
                raise ArtifactError(f"no {kind} in {self}; make one with: {make_command(kind, self.path)}") from None
            listed = str(numbers[0]) if len(numbers) == 1 else f"{len(numbers)} versions, {numbers[0]} to {numbers[-1]}"
            raise ArtifactError(
                f"no {kind}@{version} in {self}, which has {listed}; see: wm artifacts --run {self}"
            ) from None
        if (artifact.kind, artifact.version) != (kind, version):
            where = shown(Path(place))
            raise ArtifactError(f"{where} holds {artifact.name}; versions must not be renamed, move it back.")
        return artifact

    def latest(self, kind: str) -> Artifact | None:
        """Open the version with the highest number; None without any. Raises ArtifactError if it is damaged."""
        self.point_latest(kind)
        versions = self._list(kind).versions
        return self.get(kind, versions[-1]) if versions else None

    def resolve(self, reference: str, kind: str) -> Artifact:
        """Open the artifact of a reference.

        Args:
            reference: `kind`, `kind@7`, `7`, `controller@best` or `best`, or the path of a version or of its manifest.
            kind: Kind that is needed.

        Raises:
            ArtifactError: It is missing, damaged or of another kind. The message has the command that makes one.
        """
        if kind == "controller" and reference in (BEST, f"controller@{BEST}"):
            reference = str(self.path / kind / BEST)
            if not Path(reference).exists():
                raise ArtifactError(f"no controller of {self} was evaluated yet; do so with: wm eval --run {self}")
        match = re.fullmatch(rf"({'|'.join(KINDS)})(?:@(?:latest|([0-9]{{1,9}})))?|([0-9]{{1,9}})", reference)
        if match is None:
            artifact = self._at_path(reference, kind)
            name = reference
        else:
            name = match[1] or kind
            number = match[2] or match[3]
            if name != kind:
                raise ArtifactError(f"'{reference}' means a {name}, but a {kind} is needed here.")
            version = self.get(kind, int(number)) if number else self.latest(kind)
            if version is None:
                raise ArtifactError(f"no {kind} in {self}; make one with: {make_command(kind, self.path)}")
            artifact = version
        if artifact.kind != kind:
            raise ArtifactError(f"'{name}' is a {artifact.kind}, but a {kind} is needed here.")
        return artifact

    def _at_path(self, reference: str, kind: str) -> Artifact:
        with suppress(OSError, ValueError):
            if os.path.exists(reference):  # noqa: PTH110 (a `Path` takes as long as opening one that is known)
                return open_artifact(reference)
        raise ArtifactError(
            f"no {kind} '{reference[:200]}': write {kind}, {kind}@7 or the path of a version; make one with:"
            f" {make_command(kind, self.path)}"
        )

    def _list(self, kind: str) -> _Listing:
        """List the folder of a kind, unless it is as it was the last time."""
        assert kind in KINDS, kind
        folder = f"{self.path}/{kind}"
        state, known = folder_state(folder), self._listings.get(kind)
        if known is not None and state is not None and state == known.state:
            return known
        versions, highest, remains = [], 0, []
        with read_errors(folder), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                if (match := VERSION_NAME.fullmatch(entry.name)) and version_name(int(match[1])) == entry.name:
                    highest = max(highest, int(match[1]))
                    if entry.is_symlink() or entry.is_dir():
                        versions.append(int(match[1]))
                elif entry.name.startswith((WORK, TRASH, DRAFT)):
                    remains.append(entry.name)
        # A folder that has just changed may change again under the same time stamp.
        settled = state is not None and time.time_ns() - max(state[-2:]) > CLOCK_TICK
        self._listings[kind] = listing = _Listing(
            state if settled else None, sorted(versions), highest, frozenset(remains)
        )
        return listing

    def point_latest(self, kind: str) -> None:
        """Make `<kind>/latest` a relative symlink to the newest version.

        The link is for people and Makefiles. No code reads it, and every reader corrects it. A run that is not writable
        and a file system without symlinks are no errors.
        """
        with suppress(OSError):
            # Repeated if another process published in between: whoever sets the link last has read the newest version.
            while (listing := self._list(kind)) is not self._pointed.get(kind) and listing.versions:
                newest = listing.versions[-1]
                if link_target(self.path / kind / LATEST) == version_name(newest):
                    self._pointed[kind] = listing  # the link is in the folder: it is as it was while the list is
                    break
                self.point(kind, LATEST, newest)

    def point(self, kind: str, name: str, version: int) -> None:
        """Make `<kind>/<name>` a relative symlink to a version, by one rename."""
        link = self.path / kind / name
        if link_target(link) == version_name(version):
            return
        draft = link.with_name(f"{DRAFT}{uuid.uuid4().hex}")
        draft.symlink_to(version_name(version))
        try:
            failpoint("latest-drafted")
            draft.replace(link)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(link.parent)

    # -- other runs ---------------------------------------------------------------------------------------------------

    def note_use(self, digest: str, by: Path) -> None:
        """Record that the run at `by` uses one of our artifacts as an input, so that it is not pruned.

        Raises:
            MachineError: The file cannot be written.
            BusyError: Another process writes it.
        """
        note = f"{digest} {by.resolve()}"
        with disk_errors(self.path), exclusive(self.path, str(self), seconds=BRIEF):
            notes = self._notes()
            if note not in notes:
                write_durable(self.path / USED_BY, [f"{line}\n".encode() for line in [*notes, note]])

    def uses(self) -> list[tuple[str, Run]]:
        """Return `(digest of one of our artifacts, run that uses it)`. Such a run may be missing."""
        notes = [line.partition(" ") for line in self._notes()]
        return [(digest, Run(Path(by))) for digest, _, by in notes if by]

    def missing_users(self) -> list[Run]:
        """Return the runs that use our artifacts and are not there."""
        missing = dict.fromkeys(user.path for _, user in self.uses() if not _is_folder(user.path))
        return [Run(path) for path in missing]

    def _notes(self) -> list[str]:
        try:
            return read_file(self.path / USED_BY, MAX_NOTES_BYTES).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def unfinished(self) -> list[Path]:
        """Return the work folders of stopped and of running jobs."""
        folders = (folder for kind in KINDS for folder in (self.path / kind).glob(f"{WORK}*"))
        return sorted(folder for folder in folders if not folder.is_symlink())

    def artifacts(self, kind: str) -> list[Artifact]:
        """Return the readable versions of a kind that are not pruned, ascending."""
        readable = []
        for version in self.versions(kind):
            if not (self.path / kind / version_name(version) / PRUNED).exists():
                with suppress(ArtifactError):
                    readable.append(self.get(kind, version))
        return readable

    # -- work ---------------------------------------------------------------------------------------------------------

    def job(self, kind: str, identity: Identity | Mapping[str, Any], inputs: dict[str, Artifact]) -> Job:
        """Return the job that makes a `kind` from inputs by role. Its result depends on these and on `identity`.

        Raises:
            ArtifactError: A folder that it writes to is a link: it would write outside of the run.
        """
        assert kind in KINDS, kind
        job = Job(self, kind, identity if isinstance(identity, Identity) else Identity(identity), inputs)
        for folder in (job.folder, job.work_folder, job.work_folder / PAYLOAD):
            refuse_link(folder)
        return job

    def prune(self, kind: str, versions: Collection[int]) -> list[int]:
        """Remove the files of some versions, without their manifests and pictures.

        Returns the versions that were not pruned before. Those behind links stay: the link may lead to anything.

        Raises:
            BusyError: Another process writes this kind.
        """
        refuse_link(self.path / kind)
        versions = [
            version
            for version in self.versions(kind)
            if version in versions and not (self.path / kind / version_name(version)).is_symlink()
        ]
        if not versions:
            return []
        pruned = []
        with disk_errors(self.path), exclusive(self.path / kind, f"{kind} in {self}"):
            for version in versions:
                folder = self.path / kind / version_name(version)
                kept = (MANIFEST, PRUNED)
                payload = [e for e in folder.iterdir() if e.name not in kept and not is_picture(e.name)]
                if payload:
                    pruned.append(version)
                    # The marker first: with it, files that a crash leaves do not count as damage.
                    write_durable(folder / PRUNED, [b"Removed by wm to save space; manifest and pictures were kept.\n"])
                for entry in payload:
                    failpoint("prune-file")
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink(missing_ok=True)  # a draft of the marker that a kill left has become the marker
        return pruned


def records_in(data: bytes) -> list[dict[str, Any]]:
    """Return the records in lines of metrics.jsonl, without those that are none."""
    records = []
    for line in data.splitlines():
        if len(line) <= MAX_RECORD_BYTES:
            with suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if _is_record(record)]


def _is_record(value: Any) -> bool:
    """Return whether a value is a record as wm writes them, as far as readers take for granted."""
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(key, ""), str) for key in ("job", "stage"))
        and not is_deeper(value, MOST_DEPTH)
    )


def refuse_link(path: Path) -> None:
    """Raise ArtifactError if a path that is to be written to is a link, which may lead out of the run."""
    if path.is_symlink():
        raise ArtifactError(f"{shown(path)}: is a symlink, and wm writes nothing through it; remove it.")


def _appending(path: Path) -> BinaryIO:
    """Open a file of a run to read it and to append to it. Raises ArtifactError if it is no regular file."""
    refuse_link(path)
    descriptor = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArtifactError(f"{shown(path)}: is no regular file; remove it.")
    return os.fdopen(descriptor, "a+b")


def _is_change(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("epoch"), int)
        and isinstance(value.get("set"), list)
        and all(isinstance(text, str) for text in value["set"])
    )


def _is_folder(path: Path) -> bool:
    with suppress(OSError):  # a name that is too long
        return path.is_dir()
    return False


def folder_state(folder: str) -> tuple[int, ...] | None:
    """Return numbers that change when entries of a folder come or go; None without it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # opening asks a file server, a stat may not
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def link_target(link: Path) -> str | None:
    """Return where a link leads, as it is written; None if it is no link."""
    try:
        return str(link.readlink())
    except OSError:
        return None
