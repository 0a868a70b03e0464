"""Places where a test can kill this process, to prove that a crash there is repaired.

`WM_FAILPOINT=name:n` in the environment ends the process with SIGKILL, as a power cut would, the n-th time it reaches
`failpoint("name")` (n is 1 if left out). Without the variable a failpoint costs a microsecond.
"""

from __future__ import annotations

import os
import signal

_reached: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Die here if `WM_FAILPOINT` says so."""
    wanted = os.environ.get("WM_FAILPOINT")
    if wanted is None:
        return
    where, _, count = wanted.partition(":")
    if where != name:
        return
    _reached[name] = _reached.get(name, 0) + 1
    if _reached[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
