"""The memory of a process is its own, and not that of the process that started it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from wmcli import memory
from wmcli.memory import PROC, peak_of, peak_resident, resident

linux = pytest.mark.skipif(not PROC.exists(), reason="reads /proc")


@linux
def test_the_peak_stays_where_memory_is_given_back() -> None:
    before = resident()
    assert bytearray(b"x") * 300_000_000
    assert resident() < before + 200_000_000 and peak_resident() >= 300_000_000


@linux
def test_a_process_does_not_begin_with_the_peak_of_its_parent() -> None:
    assert bytearray(b"x") * 300_000_000
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert 0 < resident(child.pid) <= peak_resident(child.pid) < 100_000_000
    with pytest.raises(OSError):
        peak_resident(child.pid)


def test_elsewhere_the_peak_of_this_process_alone_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROC", Path("/nowhere"))
    assert peak_resident() == peak_of(resource.getrusage(resource.RUSAGE_SELF)) > 10_000_000
    with pytest.raises(OSError):
        resident()
