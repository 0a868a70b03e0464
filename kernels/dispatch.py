"""Choice of implementation: PyTorch or Triton.

Each operation calls `on_triton` with its operands. The choice holds for the whole process. It is "auto" unless `use` or
`using` sets it: Triton for tensors on a CUDA device, PyTorch for all others. Triton's kernels compute in float32, so
float64 operands, as in tests, always run in PyTorch.

Triton compiles for GPUs only. On a CPU its kernels run in its interpreter if TRITON_INTERPRET=1 was set before this
module was imported. That is slow, but exact enough to test every kernel without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS: not installed
    triton = tl = None

Implementation = Literal["auto", "torch", "triton"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_chosen: Implementation = "auto"


def jit(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit`; without Triton return the function unchanged, since nothing calls it then."""
    return function if triton is None else triton.jit(function)


def unavailable(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on `device`, or None if they can."""
    if triton is None:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return f"triton compiles for GPUs, not for {device.type} (TRITON_INTERPRET=1 runs its interpreter, for tests)"
    return None


def use(implementation: Implementation) -> None:
    """Choose the implementation for the whole process; check `unavailable` first."""
    global _chosen
    _chosen = implementation


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Choose the implementation within a `with` block."""
    before = _chosen
    use(implementation)
    try:
        yield
    finally:
        use(before)


def on_triton(*operands: Tensor) -> bool:
    """Return whether an operation on these operands runs in Triton."""
    if _chosen == "torch" or triton is None or any(operand.dtype == torch.float64 for operand in operands):
        return False
    return _chosen == "triton" or operands[0].is_cuda
