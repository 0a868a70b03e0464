"""One writer a folder, by an operating-system lock that dies with its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wmcli.errors import BusyError, MachineError

LOCK = ".lock"
HOLDER = ".holder"  # beside the lock: who holds it, for the message only. After a crash it names a dead process.


@contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of `folder`, without waiting for it. `what` is what the message says is being written.

    A child made by fork shares the lock and keeps it should this process die first.

    Raises BusyError if another process has it, MachineError on a file system without locks.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(
            f"{what} is being written by {_holder(folder)}; wait until it is done, or choose another --run."
        ) from None
    except NotImplementedError:
        raise MachineError(f"{folder}: this file system has no locks; put the run on another disk.") from None
    holder = folder / HOLDER
    try:
        with suppress(OSError):  # a full disk must not keep anybody from holding the lock
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
