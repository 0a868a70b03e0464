"""One writer per folder, by a lock of the operating system that ends with its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wmcli.errors import BusyError, MachineError

LOCK = ".lock"
HOLDER = ".holder"  # beside the lock: process number of its holder, for messages. Stale after a crash.


@contextmanager
def exclusive(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a folder, without waiting for it. A forked child shares it and keeps it after this process.

    Args:
        folder: The folder.
        name: Its name in messages.

    Raises:
        BusyError: Another process has the lock.
        MachineError: The file system has no locks.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(
            f"{name} is being written by {_holder(folder)}; wait for it, or choose another --run."
        ) from None
    except NotImplementedError:
        raise MachineError(f"{folder}: this file system has no locks; put the run on another disk.") from None
    holder = folder / HOLDER
    try:
        with suppress(OSError):  # a full disk does not prevent locking
            holder.write_text(str(os.getpid()))
        yield
    finally:
        with suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    with suppress(OSError, ValueError):
        return f"process {int((folder / HOLDER).read_text()[:20])}"
    return "another process"
