"""Files and folders that survive a crash: written under another name, synchronized to disk, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from wmcli.artifacts.failpoint import failpoint
from wmcli.errors import ArtifactError, MachineError, WmError

TRASH = ".trash-"  # prefix of a folder that is being removed
DRAFT = ".draft-"  # prefix of a link before its rename
PARTIAL = ".partial"  # suffix of a file before its rename
SEAL_BYTES = hashlib.sha256().digest_size
READ_AT_ONCE = 1 << 20  # bytes

_REMEDY = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on file sizes",
    errno.EIO: "check the disk",
    errno.EROFS: "make it writable or choose another --run",
    errno.EACCES: "correct the permissions",
    errno.EPERM: "correct the permissions",
    errno.EMFILE: "raise the limit on open files",
    errno.ENFILE: "close other programs",
}


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn an OSError of the machine (full disk, quota, I/O, permissions) into a MachineError. Others pass.

    Args:
        where: Path for the message if the OSError has none, or only the name of a file in a folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDY:
            raise
        named = error.filename if isinstance(error.filename, str) and os.sep in error.filename else where
        raise MachineError(
            f"{named}: {error.strerror}; published artifacts are intact."
            f" {_REMEDY[error.errno].capitalize()}, then run the same command again."
        ) from error


def sync_folder(folder: Path) -> None:
    """Synchronize a folder's entries to disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents durably."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def write_durable(
    path: Path, data: Iterable[bytes | memoryview], *, sealed: bool = False, before: Path | None = None
) -> str:
    """Write a file atomically and durably: after a crash it has the old bytes or the new ones.

    Args:
        path: The file.
        data: Its content in parts, which must not change meanwhile.
        sealed: Append the content's sha256, as `SEAL_BYTES` bytes, for `is_whole`.
        before: The file to keep the old bytes in. A crash may leave them there alone.

    Returns:
        The content's sha256. Another thread computes it while this one writes.
    """
    draft = path.with_name(f".{path.name}{PARTIAL}")
    sha256 = hashlib.sha256()
    try:
        draft.unlink(missing_ok=True)  # of a crash, or a link that somebody put there
        with draft.open("xb") as file, ThreadPoolExecutor(1) as hashing:
            for part in data:
                hashing.submit(sha256.update, part)
                file.write(part)
            if sealed:
                file.write(hashing.submit(sha256.digest).result())
            file.flush()
            os.fsync(file.fileno())
    except (OSError, WmError):
        draft.unlink(missing_ok=True)  # frees its space on a full disk
        raise
    failpoint("write-synced")
    if before is not None and path.exists():
        path.replace(before)
        failpoint("write-kept")
    draft.replace(path)
    sync_folder(path.parent)
    return sha256.hexdigest()


def is_whole(path: Path) -> bool:
    """Return whether a file ends with the sha256 of what stands before, as `write_durable` sealed it."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - SEAL_BYTES
        while left > 0:
            part = file.read(min(left, READ_AT_ONCE))
            sha256.update(part)
            left -= len(part)
        return file.read() == sha256.digest()


def discard(folder: Path) -> None:
    """Remove a folder. A crash leaves no partial folder under its name, only trash for `sweep`."""
    if not folder.exists():
        return
    trash = folder.with_name(f"{TRASH}{uuid.uuid4().hex}")
    folder.rename(trash)
    failpoint("discard-renamed")
    shutil.rmtree(trash)


def debris(folder: Path) -> list[Path]:
    """Return trash and drafts in a folder, which crashed processes left. Running ones have them for a moment."""
    return [*folder.glob(f"{TRASH}*"), *folder.glob(f"{DRAFT}*")]


def sweep(folder: Path) -> None:
    """Remove the debris of a folder. The caller holds its lock."""
    for each in debris(folder):
        if each.is_symlink():
            each.unlink(missing_ok=True)
        else:
            shutil.rmtree(each, ignore_errors=True)


def regular_files(folder: Path, name: str) -> dict[str, int]:
    """Return `{relative path: size in bytes}` of all files in a folder, including hidden ones, sorted.

    Args:
        folder: The folder.
        name: Its name in messages.

    Raises:
        ArtifactError: It holds anything except files and folders, for example a link.
    """
    sizes = {}
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                relative = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(relative + "/")
                elif entry.is_file(follow_symlinks=False):
                    sizes[relative] = entry.stat(follow_symlinks=False).st_size
                else:
                    fault = "a symlink" if entry.is_symlink() else "no regular file"
                    raise ArtifactError(f"{name}: {relative!r} is {fault}; artifacts hold plain files only.")
    return dict(sorted(sizes.items()))
