"""Signals: the first SIGINT or SIGTERM requests a checkpoint, the second one ends the process at once.

SIGUSR1 and SIGUSR2 request a checkpoint, too, and however many arrive end nothing. Schedulers announce the end of a job
by them, to all of its processes, and some of those pass the request on.

If no checkpoint is reached within `PATIENCE` seconds, for example in a very long update, the process ends without one,
as after a kill.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from wmcli.errors import Stopped

PATIENCE = 8.0
"""Seconds; schedulers follow up with SIGKILL, some of them after ten."""
ENDING = (signal.SIGINT, signal.SIGTERM)  # the second one ends the process
ASKING = (signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = signal.SIGUSR2  # from one process of ours to another, which the scheduler may have signaled as well
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


class StopRequest:
    """True once the user or the scheduler asked this process to stop."""

    def __init__(self) -> None:
        self.requested = False
        self.ending = False  # the next SIGINT or SIGTERM ends the process

    def __bool__(self) -> bool:
        return self.requested


_current: StopRequest | None = None


@contextmanager
def stop_requests(patience: float = PATIENCE) -> Iterator[StopRequest]:
    """Catch the signals that ask to stop for the length of the block; blocks inside it share its request.

    Outside the main thread signals cannot be caught: a block there shares that of the main thread, if there is one.

    Args:
        patience: Seconds from the request to the end of the process, in an outermost block.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield StopRequest() if _current is None else _current
        return
    request = _current = StopRequest()
    deadline = threading.Timer(patience, _leave)
    deadline.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        if number in ENDING:
            if request.ending:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            request.ending = True
        if not request.requested:
            request.requested = True
            deadline.start()

    previous = {number: signal.signal(number, handle) for number in (*ENDING, *ASKING)}
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
