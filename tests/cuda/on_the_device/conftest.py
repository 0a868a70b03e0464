"""Tests on the pretended device. They run with `-p pretended_cuda.plugin`, in processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pretended_cuda.device import DEVICE

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "stages")]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Begin to count at every test, and leave torch as it was."""
    threads = torch.get_num_threads()
    DEVICE.waits.clear()
    DEVICE.errors.clear()
    DEVICE.operations.clear()
    DEVICE.recorded = DEVICE.replayed = 0
    yield
    assert DEVICE.recording is None
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def neither_plots_nor_fsync() -> Iterator[None]:
    """Plots are drawn on the host, and take half of the time; tests kill processes, not the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr("wmcli.stages.evaluate._write_plots", lambda *_: None)
        patch.setattr("wmcli.stages.train.write_figure", lambda *_: None)
        yield
