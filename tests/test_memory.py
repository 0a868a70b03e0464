"""The memory of a process is its own, and not that of the process that started it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from wmcli import memory
from wmcli.memory import PROC, free_memory, machine_memory, peak_of, peak_resident, resident

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


def test_a_container_has_what_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert not machine_memory().is_limited  # nothing is told: neither Linux nor a container
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 6000 kB\n")
    assert machine_memory() == (6_144_000, 8_192_000, False)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    assert not machine_memory().is_limited
    (tmp_path / "memory.max").write_text("4000000\n")
    assert machine_memory() == (1_000_000, 4_000_000, True) and free_memory() == 1_000_000
