"""The run directory: `<run>/run.toml`, `<run>/metrics.jsonl`, and `<run>/<kind>/v0007/` for every published version.

Readers need no lock, since a version appears whole by one rename. A `Run` remembers nothing: each question is answered
from the disk.
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
"""In a run: a line `digest folder` for each of its artifacts that another run was made from."""


class Run:
    """A run directory. Make one with `Run.open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Absolute."""
        self.metrics = path / "metrics.jsonl"
        """One JSON object a line, written by `log`."""

    @classmethod
    def open(cls, path: Path | str, *, create: bool) -> Run:
        """Open a run directory, making it first if `create`.

        Raises ArtifactError if it is missing and not to be made, UsageError if a file is in the way or it cannot be
        written to (with `create`; reading needs no write permission), MachineError if the disk is full.
        """
        path = Path(path)
        place = path.absolute()  # keeps symlinks, so that messages show what the user wrote
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
                raise UsageError(f"--run {path}: a file is in the way; name another folder.") from None
            except (PermissionError, FileNotFoundError) as error:  # some file systems have no place for new folders
                raise UsageError(f"--run {path}: {error.strerror}; name another folder.") from None
        if not os.access(place, os.W_OK | os.X_OK):
            raise UsageError(f"--run {path}: cannot be written to; name another folder.")
        return cls(place)

    def __str__(self) -> str:
        return shown(self.path)

    # -- settings and metrics -----------------------------------------------------------------------------------------

    def bound(self) -> dict[str, Any] | None:
        """Read `{"preset": name, "settings": {...}, "changes": [...]}` from run.toml; None without one.

        Each change is `{"epoch": n, "set": ["section.key=value", ...]}`: settings of `wm run` from that epoch on. What
        an earlier version of wm wrote comes back as this version writes it.

        Raises UsageError if the file is damaged, or written by a later version.
        """
        path = self.path / BINDING
        where = shown(path)
        try:
            if path.stat().st_size > MAX_TOML_BYTES:
                raise UsageError(f"{where}: larger than {MAX_TOML_BYTES} bytes, so it is no settings file.")
            values = read_toml(path.read_text(encoding="utf-8"), where)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
        if not isinstance(values.get("preset"), str) or not isinstance(values.get("settings"), dict):
            raise UsageError(f"{where}: needs a preset name and a [settings] table; mend it or use another --run.")
        changes = values.get("changes", [])
        if not isinstance(changes, list) or not all(_is_change(each) for each in changes):
            raise UsageError(f"{where}: changes: each needs an epoch and a list of settings; mend it.")
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
        known: Mapping[str, Any] | None = None,
    ) -> None:
        """Write run.toml durably. Bound to the same already: nothing happens.

        Args:
            preset: Name, or path of a file.
            settings: All plain values.
            changes: See `bound`.
            preset_digest: Of the settings that a preset file stated.
            known: What `bound` gave when the command began, which may be replaced.

        Raises UsageError if it is bound to something else by now, BusyError while another process binds it.
        """
        values: dict[str, Any] = {"schema": SCHEMA, "preset": preset, "settings": settings}
        if preset_digest is not None:
            values["preset_digest"] = preset_digest
        if changes:
            values["changes"] = [dict(each) for each in changes]
        text = "# What `wm run` does here. Other commands read it too; their --set changes a value for one command.\n\n"
        wanted = read_toml(to_toml(values), BINDING)
        with disk_errors(self.path), exclusive(self.path, str(self)):
            before = self.bound()
            if before == {"changes": [], **{key: value for key, value in wanted.items() if key != "schema"}}:
                return
            if before != known:
                raise UsageError(
                    f"{self} is bound to preset {before['preset'] if before else None}; give another --run for other"
                    " settings."
                )
            write_durable(self.path / BINDING, (text + to_toml(values)).encode())

    def unbind(self) -> None:
        """Take back `bind` of a run in which nothing was made: remove run.toml, and the folders if they are empty."""
        with disk_errors(self.path), exclusive(self.path, str(self)):
            if self.unfinished() or any(self.versions(kind) for kind in KINDS):
                return
            (self.path / BINDING).unlink(missing_ok=True)
        for folder in [*(self.path / kind for kind in KINDS), self.path]:
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl. NaN and infinity become null, which is what JSON has for them."""
        line = canonical_json(finite(record)).encode() + b"\n"
        with disk_errors(self.metrics), self.metrics.open("a+b") as file:
            if file.tell() > 0:  # end what a crash left half-written
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)

    def history(self) -> list[dict[str, Any]]:
        """All that was logged, oldest first, without lines that a crash cut short."""
        if not self.metrics.exists():
            return []
        records = []
        for line in self.metrics.read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

    # -- versions -----------------------------------------------------------------------------------------------------

    def versions(self, kind: str) -> list[int]:
        """Numbers of the published versions, ascending, with pruned ones and those that a link stands for."""
        return sorted(number for number, folder in self._numbered(kind) if folder.is_dir() or folder.is_symlink())

    def next_version(self, kind: str) -> int:
        """One more than any number in use, whatever uses it."""
        return max((number for number, _ in self._numbered(kind)), default=0) + 1

    def get(self, kind: str, version: int) -> Artifact:
        """A version by its number. Raises ArtifactError if it is missing or damaged."""
        folder = self.path / kind / version_name(version)
        if not folder.exists() and not folder.is_symlink():
            known = self.versions(kind)
            if not known:
                raise ArtifactError(f"no {kind} in {self}; make one with: {make_command(kind, self.path)}")
            listed = str(known[0]) if len(known) == 1 else f"{len(known)} versions, {known[0]} to {known[-1]}"
            raise ArtifactError(f"no {kind}@{version} in {self}, which has {listed}; see: wm artifacts --run {self}")
        artifact = open_artifact(folder)
        if (artifact.kind, artifact.version) != (kind, version):
            raise ArtifactError(f"{shown(folder)} holds {artifact.name}; versions must not be renamed, move it back.")
        return artifact

    def latest(self, kind: str) -> Artifact | None:
        """The version with the highest number, None if there is none. Raises ArtifactError if that one is damaged."""
        self.point_latest(kind)
        versions = self.versions(kind)
        return self.get(kind, versions[-1]) if versions else None

    def resolve(self, reference: str, kind: str) -> Artifact:
        """The artifact that `reference` means: `kind`, `kind@7`, `7`, `controller@best`, or the path of a version or of
        its manifest.

        Raises ArtifactError, ending in the command that makes one, if it is missing, damaged or not of this `kind`.
        """
        if reference == f"{kind}@{BEST}":
            reference = str(self.path / kind / BEST)
        match = re.fullmatch(rf"({'|'.join(KINDS)})(?:@(?:latest|([0-9]{{1,9}})))?|([0-9]{{1,9}})", reference)
        if match is None:
            artifact = self._at_path(reference, kind)
            name = reference
        else:
            name = match[1] or kind
            number = match[2] or match[3]
            if name != kind:
                raise ArtifactError(f"'{reference}' means a {name}, but a {kind} is needed here.")
            found = self.get(kind, int(number)) if number else self.latest(kind)
            if found is None:
                raise ArtifactError(f"no {kind} in {self}; make one with: {make_command(kind, self.path)}")
            artifact = found
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

    def _numbered(self, kind: str) -> list[tuple[int, Path]]:
        assert kind in KINDS, kind
        folder = self.path / kind
        if not folder.is_dir():
            return []
        matches = [(VERSION_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir()]
        return [
            (int(match[1]), entry) for match, entry in matches if match and version_name(int(match[1])) == entry.name
        ]

    def point_latest(self, kind: str) -> None:
        """Make `<kind>/latest` a relative symlink to the newest version.

        The link is for people and Makefiles: nothing here reads it, and every reader mends it. So a run that cannot be
        written to, or a file system without symlinks, is no error.
        """
        with suppress(OSError):
            # Again if somebody published in between: whoever sets the link last has looked after that publication.
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
        """Write down that the run at `by` is made from one of our artifacts, so that it is not pruned.

        Raises MachineError if that cannot be written, BusyError while another process writes it.
        """
        note = f"{digest} {by.resolve()}"
        with disk_errors(self.path), exclusive(self.path, str(self)):
            known = self._notes()
            if note not in known:
                write_durable(self.path / USED_BY, "".join(f"{line}\n" for line in [*known, note]).encode())

    def uses(self) -> list[tuple[str, Run]]:
        """Return `(digest of an artifact of ours, other run made from it)`, of runs that are still there."""
        notes = [line.partition(" ") for line in self._notes()]
        return [(digest, Run(Path(by))) for digest, _, by in notes if by and Path(by).is_dir()]

    def _notes(self) -> list[str]:
        try:
            return (self.path / USED_BY).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def unfinished(self) -> list[Path]:
        """The work folders of jobs that were stopped, and of those at work."""
        return sorted(folder for kind in KINDS for folder in (self.path / kind).glob(f"{WORK}*"))

    def artifacts(self, kind: str) -> list[Artifact]:
        """The versions of a kind that can be read and whose files are kept, ascending."""
        found = []
        for version in self.versions(kind):
            if not (self.path / kind / version_name(version) / PRUNED).exists():
                with suppress(ArtifactError):
                    found.append(self.get(kind, version))
        return found

    # -- work ---------------------------------------------------------------------------------------------------------

    def job(self, kind: str, identity: Identity | Mapping[str, Any], inputs: dict[str, Artifact]) -> Job:
        """Return the work that makes a `kind` of `inputs` (by role); `identity` is all else its result depends on."""
        assert kind in KINDS, kind
        return Job(self, kind, identity if isinstance(identity, Identity) else Identity(identity), inputs)

    def prune(self, kind: str, doomed: Collection[int]) -> list[int]:
        """Remove the files of some versions; their manifests stay. Returns the versions pruned now.

        Raises BusyError while another process writes this kind.
        """
        doomed = [version for version in self.versions(kind) if version in doomed]
        if not doomed:
            return []
        pruned = []
        with disk_errors(self.path), exclusive(self.path / kind, f"{kind} in {self}"):
            for version in doomed:
                folder = self.path / kind / version_name(version)
                payload = [entry for entry in folder.iterdir() if entry.name not in (MANIFEST, PRUNED)]
                if payload:
                    pruned.append(version)
                    # The marker first: with it, files that a crash leaves are seen as rest, not as damage.
                    write_durable(folder / PRUNED, b"Files removed by wm to save space; the manifest was kept.\n")
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
    except OSError:  # none yet, or something else of that name
        return None
