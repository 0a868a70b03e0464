"""Memory allocation that keeps freed memory in the process instead of returning it to the operating system.

By default glibc requests every block of more than 32 MiB from the kernel and returns it when it is freed. Each update
then pays a page fault, and the kernel's zeroing, for every 4 KiB that any operation writes. That is several times the
arithmetic of an elementwise operation.
"""

from __future__ import annotations

import ctypes
import platform

# Names and numbers from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
GROW_BY = 256 * 1024 * 1024  # bytes


def keep_freed_memory() -> bool:
    """Configure glibc for the rest of this process; return False with any other C library."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # All blocks come from the heap, which never shrinks and grows in large steps.
    return all(
        mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, GROW_BY))
    )
