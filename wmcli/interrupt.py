"""Signals: the first one to stop requests a checkpoint, the second one ends the process at once.

They are SIGINT, SIGTERM, and SIGUSR1 and SIGUSR2, with which SLURM warns of a time limit. One that follows within
`ECHO` seconds counts as the same: a scheduler signals every process of a job, and a parent may pass it on.

If no checkpoint is reached within `PATIENCE` seconds, for example in a very long update, the process ends without one,
as after a kill.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from wmcli.errors import Stopped

PATIENCE = 8.0
"""Seconds; schedulers follow up with SIGKILL, some of them after ten."""
ECHO = 0.7
"""Seconds."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


class StopRequest:
    """True once the user or the scheduler asked this process to stop."""

    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0  # by the monotonic clock

    def __bool__(self) -> bool:
        return self.requested


_current: StopRequest | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch the signals to stop for the length of the block; blocks inside it share its request.

    Outside the main thread signals cannot be caught: no-op there.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield StopRequest() if _current is None else _current
        return
    request = _current = StopRequest()
    deadline = threading.Timer(PATIENCE, _leave)
    deadline.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        if not request.requested:
            request.requested, request.since = True, time.monotonic()
            deadline.start()
        elif time.monotonic() - request.since > ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    previous = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield request
    finally:
        deadline.cancel()
        _current = None
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave() -> None:
    """End this process from another thread, whatever the first one is busy with."""
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR.encode())
    os.write(2, b"wm: stopped without a new checkpoint; the same command resumes from the last one.\n")
    os._exit(Stopped.exit_code)
