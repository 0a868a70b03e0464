"""Memory that a process holds, and that of the machine.

Linux tells in /proc. `resource.getrusage` knows the peak on other systems too, but on Linux a process begins there with
the peak of its parent.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
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


class Memory(NamedTuple):
    """Memory in bytes."""

    free: int
    total: int
    is_limited: bool
    """Whether it is what a container may have, which is less than the machine has."""


def machine_memory() -> Memory:
    """Return the memory of this machine, or of the container that this process is in."""
    total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):  # not Linux
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", (PROC / "meminfo").read_text(), re.MULTILINE))
        total, free = (int(sizes.get(name, 0)) * 1024 or total for name in ("MemTotal", "MemAvailable"))
    with suppress(OSError, ValueError):  # no such group, or "max"
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        if limit < total:
            return Memory(max(0, min(free, limit - used)), limit, is_limited=True)
    return Memory(free, total, is_limited=False)


def free_memory() -> int:
    """Return the memory that may still be taken, in bytes: that of the machine, or what this process is allowed."""
    free, (allowed, _) = machine_memory().free, resource.getrlimit(resource.RLIMIT_AS)
    return free if allowed == resource.RLIM_INFINITY else min(free, allowed)


def _status(process: int | str, name: str) -> int:
    file = PROC / str(process) / "status"
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"{file} has no {name}: the process has ended")
