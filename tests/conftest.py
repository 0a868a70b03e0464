"""Test workers side by side share the cores: one thread each (set before torch is imported), or they wait in turn.

Without a GPU, Triton's kernels run in its interpreter (set before the kernels are imported).
"""

from __future__ import annotations

import os
import random
from collections import defaultdict

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

SAMPLE = 6
"""Cases of a test marked `matrix` that are not slow. The sample of a test is always the same."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but a sample of each large matrix as slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, matrix in cases.items():
        rest = max(0, len(matrix) - SAMPLE)
        for item in random.Random(name).sample(matrix, rest):
            item.add_marker(pytest.mark.slow)
