"""Keep freed memory instead of giving it back to the operating system after each operation.

glibc takes every block of more than 32 MiB from the kernel anew and gives it back when it is freed. Each
update then pays a page fault, and the kernel's zeroing, for every 4 KiB that any operation writes: several times what
the arithmetic of an elementwise operation costs.
"""

from __future__ import annotations

import ctypes
import platform

# Names and numbers from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
GROW_BY = 256 * 1024 * 1024  # bytes


def keep_freed_memory() -> bool:
    """Tell glibc so, for the rest of this process; False where the C library is another."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # No block apart from the heap; the heap never shrinks, and grows in large steps.
    return all(
        mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, GROW_BY))
    )
