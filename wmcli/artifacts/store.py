"""The run directory: `<run>/run.toml`, `<run>/metrics.jsonl`, and `<run>/<kind>/v0007/` for every published version.

Readers need no lock, because a version appears by one rename. A `Run` has no cache: every method looks at the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wmcli.artifacts.failpoint import failpoint
from wmcli.artifacts.files import DRAFT, disk_errors, make_folder, sync_folder, write_durable
from wmcli.artifacts.job import WORK, Job
from wmcli.artifacts.lock import LOCK, exclusive
from wmcli.artifacts.manifest import (
    KINDS,
    MANIFEST,
    PICTURES,
    PRUNED,
    VERSION_NAME,
    Artifact,
    finite,
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
    read_toml,
    to_toml,
    upgrade,
    upgrade_override,
)
from wmcli.errors import ArtifactError, UsageError

LATEST = "latest"
BEST = "best"
BINDING = "run.toml"
USED_BY = "used-by.txt"
"""File in a run with a line `digest folder` for each of its artifacts that another run uses as an input."""


class Run:
    """A run directory. Make one with `Run.open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Absolute."""
        self.metrics = path / "metrics.jsonl"
        """One JSON object a line, written by `log`."""

    @classmethod
    def open(cls, path: Path | str, *, create: bool) -> Run:
        """Open a run directory.

        Args:
            path: The directory.
            create: Create it if it is missing, and require write permission.

        Raises:
            ArtifactError: It is missing and `create` is False.
            UsageError: A file has its name, or it cannot be written to.
            MachineError: The disk is full.
        """
        path = Path(path)
        place = path.absolute()  # not resolved: messages show the path that the user wrote
        if place.exists() and not place.is_dir():
            raise UsageError(f"--run {path}: is a file; name a folder.")
        if not create:
            if not place.exists():
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
            UsageError: The file is damaged, or a later version wrote it.
        """
        path = self.path / BINDING
        where = shown(path)
        try:
            if path.stat().st_size > MAX_TOML_BYTES:
                raise UsageError(f"{where}: larger than {MAX_TOML_BYTES} bytes, the limit of a settings file.")
            values = read_toml(path.read_text(encoding="utf-8"), where)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
        if not isinstance(values.get("preset"), str) or not isinstance(values.get("settings"), dict):
            raise UsageError(f"{where}: needs a preset name and a [settings] table; repair it or use another --run.")
        changes = values.get("changes", [])
        if not isinstance(changes, list) or not all(_is_change(each) for each in changes):
            raise UsageError(f"{where}: changes: each needs an epoch and a list of settings; repair it.")
        schema = check_schema(values.get("schema", 1), where)
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
        text = "# Settings of this run. `wm run --set` changes them; --set of others counts for one command.\n\n"
        binding = read_toml(to_toml(values), BINDING)
        with disk_errors(self.path), exclusive(self.path, str(self)):
            before = self.bound()
            if before == {"changes": [], **{key: value for key, value in binding.items() if key != "schema"}}:
                return
            if before != expected:
                raise UsageError(
                    f"{self} is bound to preset {before['preset'] if before else None}; give another --run for other"
                    " settings."
                )
            write_durable(self.path / BINDING, [(text + to_toml(values)).encode()])

    def unbind(self) -> None:
        """Undo `bind` in a run without artifacts: remove run.toml, and the folders if they are empty."""
        with disk_errors(self.path), exclusive(self.path, str(self)):
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
        with disk_errors(self.metrics), self.metrics.open("a+b") as file:
            if file.tell() > 0:  # end a line that a crash cut short
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)

    def history(self) -> list[dict[str, Any]]:
        """Return all logged records, oldest first, without lines that a crash cut short."""
        if not self.metrics.exists():
            return []
        records = []
        for line in self.metrics.read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

    # -- versions -----------------------------------------------------------------------------------------------------

    def versions(self, kind: str) -> list[int]:
        """Return the numbers of all published versions, ascending, including pruned ones and links."""
        return sorted(number for number, entry in self._numbered(kind) if entry.is_symlink() or entry.is_dir())

    def next_version(self, kind: str) -> int:
        """Return the number after the highest one in use."""
        return max((number for number, _ in self._numbered(kind)), default=0) + 1

    def get(self, kind: str, version: int) -> Artifact:
        """Open a version by its number. Raises ArtifactError if it is missing or damaged."""
        folder = self.path / kind / version_name(version)
        if not folder.exists() and not folder.is_symlink():
            numbers = self.versions(kind)
            if not numbers:
                raise ArtifactError(f"no {kind} in {self}; make one with: {make_command(kind, self.path)}")
            listed = str(numbers[0]) if len(numbers) == 1 else f"{len(numbers)} versions, {numbers[0]} to {numbers[-1]}"
            raise ArtifactError(f"no {kind}@{version} in {self}, which has {listed}; see: wm artifacts --run {self}")
        artifact = open_artifact(folder)
        if (artifact.kind, artifact.version) != (kind, version):
            raise ArtifactError(f"{shown(folder)} holds {artifact.name}; versions must not be renamed, move it back.")
        return artifact

    def latest(self, kind: str) -> Artifact | None:
        """Open the version with the highest number; None without any. Raises ArtifactError if it is damaged."""
        self.point_latest(kind)
        versions = self.versions(kind)
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
            if Path(reference).exists():
                return open_artifact(reference)
        raise ArtifactError(
            f"no {kind} '{reference[:200]}': write {kind}, {kind}@7 or the path of a version; make one with:"
            f" {make_command(kind, self.path)}"
        )

    def _numbered(self, kind: str) -> list[tuple[int, os.DirEntry[str]]]:
        assert kind in KINDS, kind
        folder = self.path / kind
        if not folder.is_dir():
            return []
        with os.scandir(folder) as entries:
            matches = [(VERSION_NAME.fullmatch(entry.name), entry) for entry in entries]
        return [
            (int(match[1]), entry) for match, entry in matches if match and version_name(int(match[1])) == entry.name
        ]

    def point_latest(self, kind: str) -> None:
        """Make `<kind>/latest` a relative symlink to the newest version.

        The link is for people and Makefiles. No code reads it, and every reader corrects it. A run that is not writable
        and a file system without symlinks are no errors.
        """
        with suppress(OSError):
            # Repeated if another process published in between: whoever sets the link last has read the newest version.
            while (versions := self.versions(kind)) and _target(self.path / kind / LATEST) != version_name(
                versions[-1]
            ):
                self.point(kind, LATEST, versions[-1])

    def point(self, kind: str, name: str, version: int) -> None:
        """Make `<kind>/<name>` a relative symlink to a version, by one rename."""
        link = self.path / kind / name
        if _target(link) == version_name(version):
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
        with disk_errors(self.path), exclusive(self.path, str(self)):
            notes = self._notes()
            if note not in notes:
                write_durable(self.path / USED_BY, [f"{line}\n".encode() for line in [*notes, note]])

    def uses(self) -> list[tuple[str, Run]]:
        """Return `(digest of one of our artifacts, run that uses it)` for existing runs."""
        notes = [line.partition(" ") for line in self._notes()]
        return [(digest, Run(Path(by))) for digest, _, by in notes if by and Path(by).is_dir()]

    def _notes(self) -> list[str]:
        try:
            return (self.path / USED_BY).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def unfinished(self) -> list[Path]:
        """Return the work folders of stopped and of running jobs."""
        return sorted(folder for kind in KINDS for folder in (self.path / kind).glob(f"{WORK}*"))

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
        """Return the job that makes a `kind` from inputs by role. Its result depends on these and on `identity`."""
        assert kind in KINDS, kind
        return Job(self, kind, identity if isinstance(identity, Identity) else Identity(identity), inputs)

    def prune(self, kind: str, versions: Collection[int]) -> list[int]:
        """Remove the files of some versions, without their manifests and pictures.

        Returns the versions that were not pruned before.

        Raises:
            BusyError: Another process writes this kind.
        """
        versions = [version for version in self.versions(kind) if version in versions]
        if not versions:
            return []
        pruned = []
        with disk_errors(self.path), exclusive(self.path / kind, f"{kind} in {self}"):
            for version in versions:
                folder = self.path / kind / version_name(version)
                kept = (MANIFEST, PRUNED)
                payload = [e for e in folder.iterdir() if e.name not in kept and e.suffix not in PICTURES]
                if payload:
                    pruned.append(version)
                    # The marker first: with it, files that a crash leaves do not count as damage.
                    write_durable(folder / PRUNED, [b"Removed by wm to save space; manifest and pictures were kept.\n"])
                for entry in payload:
                    failpoint("prune-file")
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
        return pruned


def _is_change(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("epoch"), int)
        and isinstance(value.get("set"), list)
        and all(isinstance(text, str) for text in value["set"])
    )


def _target(link: Path) -> str | None:
    try:
        return str(link.readlink())
    except OSError:  # no link
        return None
