"""Failpoints: places where a test can kill this process, to test recovery.

The environment variable `WM_FAILPOINT=name:n` ends the process with SIGKILL at the n-th call of `failpoint("name")`.
n is 1 by default. Without the variable a failpoint costs a microsecond.
"""

from __future__ import annotations

import os
import signal

_reached: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Kill this process if `WM_FAILPOINT` names this place."""
    target = os.environ.get("WM_FAILPOINT")
    if target is None:
        return
    where, _, count = target.partition(":")
    if where != name:
        return
    _reached[name] = _reached.get(name, 0) + 1
    if _reached[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
