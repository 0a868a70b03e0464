"""Writing a finished file: whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from wmcli.errors import MachineError, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a hidden sibling of `path` with the same suffix, then rename it to `path`.

    Raises UsageError where the folder is missing or not writable, MachineError where the disk is full or failing.
    """
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}; create it first.")
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(draft)
        draft.replace(path)
    except OSError as error:
        kind = MachineError if error.errno in _FULL else UsageError
        raise kind(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
