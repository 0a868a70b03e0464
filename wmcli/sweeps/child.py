"""The first moment of a run's process: tie it to the process that started it, then become `wm`.

It is a program of its own because code between fork and exec is unsafe where the parent has threads, as Ray's workers
have. The tie survives exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from wmcli.errors import Stopped

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def become_wm(parent: int, arguments: list[str]) -> None:
    """Replace this process by `wm` with these arguments. On Linux it gets SIGTERM when `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the line above
            sys.exit(Stopped.exit_code)
    os.execv(sys.executable, [sys.executable, "-m", "wmcli", *arguments])


if __name__ == "__main__":
    become_wm(int(sys.argv[1]), sys.argv[2:])
