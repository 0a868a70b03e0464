"""Workers that run side by side share the cores: one thread each, before torch is imported, or they wait for each other."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
