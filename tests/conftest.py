"""Test workers side by side share the cores: one thread each (set before torch is imported), or they wait in turn.

Without a GPU, Triton's kernels run in its interpreter (set before the kernels are imported).
"""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
