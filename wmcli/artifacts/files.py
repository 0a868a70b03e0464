"""Files and folders that survive a crash: written beside their place, forced to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wmcli.artifacts.failpoint import failpoint
from wmcli.errors import ArtifactError, MachineError

TRASH = ".trash-"  # a folder on its way out
DRAFT = ".draft-"  # a link on its way to its place

_REMEDY = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on file sizes",
    errno.EIO: "check the disk",
    errno.EROFS: "make it writable or choose another --run",
    errno.EACCES: "mend the permissions",
    errno.EPERM: "mend the permissions",
    errno.EMFILE: "raise the limit on open files",
    errno.ENFILE: "close other programs",
}


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn an OSError that is a limit of the machine (full disk, quota, I/O, permissions) into a one-line MachineError.

    `where` is named when the OSError names no file. Any other OSError passes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDY:
            raise
        raise MachineError(
            f"{error.filename or where}: {error.strerror}; what was published before is intact."
            f" {_REMEDY[error.errno].capitalize()}, then run the same command again."
        ) from error


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk: without it a rename can be lost in a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each durably. One that exists is left alone."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def write_durable(path: Path, data: bytes) -> None:
    """Write a file atomically and durably: after a crash it holds the old bytes or the new ones."""
    draft = path.with_name(f".{path.name}.partial")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        draft.unlink(missing_ok=True)  # on a full disk its bytes are needed
        raise
    failpoint("write-synced")
    draft.replace(path)
    sync_folder(path.parent)


def discard(folder: Path) -> None:
    """Remove a folder so that a crash half-way leaves no half folder under its name, only trash that `sweep` finds."""
    if not folder.exists():
        return
    trash = folder.with_name(f"{TRASH}{uuid.uuid4().hex}")
    folder.rename(trash)
    failpoint("discard-renamed")
    shutil.rmtree(trash)


def debris(folder: Path) -> list[Path]:
    """What processes that crashed half-way left in a folder (and, for a moment, what live ones do)."""
    return [*folder.glob(f"{TRASH}*"), *folder.glob(f"{DRAFT}*")]


def sweep(folder: Path) -> None:
    """Remove the debris. Call it while holding the folder's lock."""
    for each in debris(folder):
        if each.is_symlink():
            each.unlink(missing_ok=True)
        else:
            shutil.rmtree(each, ignore_errors=True)


def regular_files(folder: Path, name: str) -> dict[str, int]:
    """`{relative path: size in bytes}` of everything in a folder, hidden files included, in sorted order.

    Raises ArtifactError, which calls the folder `name`, for anything but files and folders: a link could lead anywhere.
    """
    found = {}
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                relative = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(relative + "/")
                elif entry.is_file(follow_symlinks=False):
                    found[relative] = entry.stat(follow_symlinks=False).st_size
                else:
                    what = "a symlink" if entry.is_symlink() else "no regular file"
                    raise ArtifactError(f"{name}: {relative!r} is {what}; artifacts hold plain files only.")
    return dict(sorted(found.items()))
