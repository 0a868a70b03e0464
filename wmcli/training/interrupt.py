"""Stopping politely: the first SIGINT or SIGTERM asks for a checkpoint, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """True once the user or the scheduler asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM for the length of a stage. Outside the main thread signals cannot be caught: no-op
    there."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request.asked = True

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
