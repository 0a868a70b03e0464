"""One writer per folder, by a lock of the operating system that ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from wmcli.errors import ArtifactError, BusyError, MachineError, WmError
from wmcli.reading import read_file

LOCK = ".lock"
HOLDER = ".holder"  # beside the lock: process number and machine of its holder, for messages. Stale after a crash.
MAX_HOLDER_BYTES = 300
GLANCE = 0.2
"""Seconds that every command waits: others take the lock for a moment to see whether a run is at work."""
BRIEF = 10.0
"""Seconds to wait for a lock that is held only to write a small file."""
POLL = 0.05

_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Holder(NamedTuple):
    """The process that holds a lock."""

    process: int
    host: str

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine, where its number means something."""
        return self.host == socket.gethostname()


@contextmanager
def exclusive(
    folder: Path, name: str, *, seconds: float = GLANCE, waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock of a folder. A forked child shares it and keeps it after this process.

    Args:
        folder: The folder.
        name: Its name in messages.
        seconds: How long to wait for another process that has the lock.
        waiting: Wait for as long as it takes instead, and call this with the name of the holder over and over. It ends
            the wait by an exception.

    Raises:
        BusyError: Another process has the lock.
        MachineError: The file system has no locks.
        ArtifactError: The lock's file is a link.
    """
    deadline = time.monotonic() + seconds
    while (held := _take(folder)) is None:
        if waiting is not None:
            waiting(describe_holder(folder))
        elif time.monotonic() > deadline:
            holding = describe_holder(folder)
            raise BusyError(f"{name} is being written by {holding}; wait for it, or choose another --run.")
        time.sleep(POLL)
    holder = folder / HOLDER
    try:
        with suppress(OSError):  # a full disk does not prevent locking
            holder.unlink(missing_ok=True)  # it may be a link
            _write_new(holder, f"{os.getpid()} {socket.gethostname()}")
        yield
    finally:
        with suppress(OSError):
            holder.unlink(missing_ok=True)
        with suppress(OSError):  # the lock ends with the process
            fcntl.flock(held, fcntl.LOCK_UN)
        os.close(held)


def _take(folder: Path) -> int | None:
    """Return the descriptor of the locked file; None if another process has it, or has just removed it."""
    try:
        held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ArtifactError(f"{folder / LOCK}: is a symlink, and wm writes nothing through it; remove it.") from None
    taken = False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Without a file under this name, or with another one, the lock is worth nothing: others lock the new file.
        with suppress(FileNotFoundError):
            taken = os.path.samestat(os.fstat(held), (folder / LOCK).stat())
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise MachineError(
                f"{folder}: this file system has no locks ({error.strerror}), so two processes could write at once: put"
                " the run on another disk with --run, or mount this one with locks."
            ) from None
        if error.errno not in _TAKEN:
            raise
    finally:
        if not taken:
            os.close(held)
    return held if taken else None


def _write_new(path: Path, text: str) -> None:
    """Write a file that does not exist, never through a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def read_holder(folder: Path) -> Holder | None:
    """Return who noted that it holds the lock of a folder, None without a note."""
    with suppress(OSError, ValueError, WmError):
        process, _, host = read_file(folder / HOLDER, MAX_HOLDER_BYTES).decode().partition(" ")
        return Holder(int(process), host or socket.gethostname())
    return None


def describe_holder(folder: Path) -> str:
    """Return who holds the lock of a folder, for messages."""
    holder = read_holder(folder)
    if holder is None:
        return "another process"
    return f"process {holder.process}" + ("" if holder.is_here else f" on {holder.host}")
