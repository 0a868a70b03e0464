"""Test workers side by side share the cores: one thread each (set before torch is imported), or they wait in turn."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
