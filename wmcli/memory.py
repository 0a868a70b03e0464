"""Memory that a process holds.

Linux tells in /proc. `resource.getrusage` knows the peak on other systems too, but on Linux a process begins there with
the peak of its parent.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

PROC = Path("/proc")
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes


def resident(process: int | str = "self") -> int:
    """Return the bytes that a process has in memory. Raises OSError if it has ended or this is not Linux."""
    return _status(process, "VmRSS")


def peak_resident(process: int | str = "self") -> int:
    """Return the most bytes that a process has had in memory.

    Raises:
        OSError: It is another process, and has ended or this is not Linux.
    """
    if process == "self" and not PROC.exists():
        return peak_of(resource.getrusage(resource.RUSAGE_SELF))
    return _status(process, "VmHWM")


def peak_of(usage: resource.struct_rusage) -> int:
    """Return the peak that `getrusage` or `wait4` tells, in bytes."""
    return usage.ru_maxrss * _RUSAGE_UNIT


def _status(process: int | str, name: str) -> int:
    file = PROC / str(process) / "status"
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"{file} has no {name}: the process has ended")
