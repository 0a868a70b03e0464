"""Files that others may have written, opened for reading: regular ones, of a bounded size, never through a link.

A run folder may come from anybody, so this is known before anything is read. A named pipe would let its reader wait for
ever, a device has no end, and a link leads anywhere. A fault of the machine is no damage: it has an error of its own.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wmcli.errors import ArtifactError, MachineError, WmError

REMEDY = {
    errno.EIO: "check the disk",
    errno.EACCES: "correct the permissions",
    errno.EPERM: "correct the permissions",
    errno.ENOMEM: "free some memory",
    errno.ESTALE: "mount this file system again",
    errno.ENOTCONN: "mount this file system again",
    errno.EHOSTDOWN: "check the server of this file system",
    errno.ETIMEDOUT: "check the server of this file system",
    errno.EMFILE: "raise the limit on open files",
    errno.ENFILE: "close other programs",
}
"""What to do about a fault of the machine while it reads. Any other error is about the file."""


@contextmanager
def read_errors(where: Path | str) -> Iterator[None]:
    """Turn an OSError that is the machine's fault into a MachineError. Others pass.

    Args:
        where: Path for the message if the OSError has none.

    Raises:
        MachineError: The disk, the memory, the permissions or the connection fail. Nothing is known about the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDY:
            raise
        raise MachineError(
            f"{error.filename or where}: cannot be read: {error.strerror}. This is no damage of the run:"
            f" {REMEDY[error.errno]}, then run the same command again."
        ) from error


def open_file(path: Path, limit: int | None = None, *, links: bool = False) -> io.BufferedReader:
    """Open a regular file.

    Args:
        path: The file.
        limit: Most bytes that it may have.
        links: Follow a link: for files that a user names, not for those in a run.

    Raises:
        ArtifactError: It is a link, no regular file, or too large.
        MachineError: See `read_errors`.
        OSError: It is missing, or its path is no path.
    """
    with read_errors(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ArtifactError(f"{path}: is a symlink; put the file itself there.") from None
            if error.errno == errno.ENXIO:  # a socket
                raise _irregular(path) from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _irregular(path)
            if limit is not None and status.st_size > limit:
                raise _too_large(path, limit)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise


def read_file(path: Path, limit: int, *, links: bool = False) -> bytes:
    """Return the content of a regular file. For arguments and exceptions see `open_file`."""
    with open_file(path, limit, links=links) as file, read_errors(path):
        data = file.read(limit + 1)
    if len(data) > limit:  # it has grown
        raise _too_large(path, limit)
    return data


def _irregular(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: is no regular file; remove it.")


def _too_large(path: Path, limit: int) -> ArtifactError:
    return ArtifactError(f"{path}: larger than {limit} bytes, the most that such a file may have.")


_DAMAGE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError),
    *(RuntimeError, AssertionError, ArithmeticError, EOFError),
)


@contextmanager
def damage(where: Path | str) -> Iterator[None]:
    """Turn any error of making sense of a file's content into an ArtifactError of one line.

    Args:
        where: The file.

    Raises:
        ArtifactError: The file is damaged, or holds something else than wm writes there.
        MachineError: See `read_errors`.
    """
    try:
        with read_errors(where):
            yield
    except WmError:
        raise
    except _DAMAGE as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ArtifactError(f"{where}: damaged: {reason}; see: wm verify") from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error is Python's, CUDA's or torch's CPU allocator's for lack of memory."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
