"""Limits of time in tests."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes more time of the processor, or ten times as much on the wall: the machine may be busy.

    Garbage collection leaves out what earlier tests made: going through it takes most of the time of a block that makes
    many objects.
    """
    gc.freeze()
    began, wall = time.process_time(), time.monotonic()
    try:
        yield
        spent, waited = time.process_time() - began, time.monotonic() - wall
    finally:
        gc.unfreeze()
    assert spent < seconds and waited < 10 * seconds, f"{spent:.2f} s of the processor in {waited:.2f} s"
