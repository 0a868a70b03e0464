"""Memory that was freed is there again without the kernel's help."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from wmcli.training.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
x = torch.zeros(12 << 20)  # 48 MiB
for _ in range(30):  # until the heap has been everywhere
    x + 1
before = faults()
for _ in range(10):
    x + 1
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told")
@pytest.mark.slow
def test_large_blocks_are_used_again() -> None:
    def faults(what: str) -> int:
        return int(subprocess.run([sys.executable, "-c", SCRIPT, what], check=True, capture_output=True).stdout)

    assert faults("not") > 5000  # else this test proves nothing
    assert faults("keep") < 500


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from wmcli.training.allocator import keep_freed_memory

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
