"""Compile all kernels at the shapes of the papers' presets, for GPUs that this machine need not have."""

from __future__ import annotations

import pytest
from gpus import CAPABILITIES, compile_for_gpus

KERNELS = (
    *("attention", "causal_conv", "diagonal_scan", "lambda_returns", "linear_recurrence"),
    *("nearest", "s4", "selective_scan", "tree_search"),
)
MOST_SHARED = 100 * 1024
"""Bytes of shared memory a block: of the 164 kB of an A100 and the 100 kB of smaller GPUs."""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_registers_memory_and_precision(kernel: str, request: pytest.FixtureRequest) -> None:
    """With `--part K/3`, for one generation of GPUs."""
    part, parts = map(int, request.config.getoption("part").split("/"))
    rows = compile_for_gpus(kernel, capabilities=CAPABILITIES[part::parts])
    assert rows
    for row in rows:
        assert row["spilled"] == 0, row
        assert row["shared"] <= MOST_SHARED, row
        assert not row["narrow"], row
        assert not (row["dtype"] == "float32" and row["tf32"]), row
