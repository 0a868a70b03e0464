"""With CUDA every test of Triton's kernels runs there: `pytest -m gpu tests/kernels` selects them all."""

from __future__ import annotations

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    if torch.cuda.is_available() and hasattr(getattr(item, "module", None), "DEVICE"):
        item.add_marker(pytest.mark.gpu)
