"""Limits of time in tests."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes more time of the processor.

    The time of the processor counts and not the clock on the wall, since the machine may be busy. Garbage collection
    leaves out what earlier tests made: going through it takes most of the time of a block that makes many objects.
    """
    gc.freeze()
    began = time.process_time()
    try:
        yield
        spent = time.process_time() - began
    finally:
        gc.unfreeze()
    assert spent < seconds, f"{spent:.2f} s"
