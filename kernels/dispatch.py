"""Which implementation of an operation runs: the one in torch or the one in Triton.

Each operation asks `on_triton` with its operands. The answer follows a choice for the whole process, "auto" unless
`use` or `using` sets it: Triton for tensors on a CUDA device, torch for all others. Triton's kernels compute in
float32, so that float64 operands, which tests use, always run in torch.

Triton compiles for GPUs only. On a CPU its kernels run in its interpreter, if TRITON_INTERPRET=1 was set before this
module was imported: slow, and exact enough to test every kernel without a GPU.
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
except ImportError:  # torch for the CPU comes without it
    triton = tl = None

Implementation = Literal["auto", "torch", "triton"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_chosen: Implementation = "auto"


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`; without Triton the function as it is, which is then never called."""
    return function if triton is None else triton.jit(function)


def unavailable(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on `device`; None if they can."""
    if triton is None:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return f"triton compiles for GPUs, not for {device.type} (TRITON_INTERPRET=1 runs its interpreter, for tests)"
    return None


def use(implementation: Implementation) -> None:
    """Choose for the whole process. Whether Triton can run on a device, ask `unavailable` before."""
    global _chosen
    _chosen = implementation


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Choose for the body of a with statement."""
    before = _chosen
    use(implementation)
    try:
        yield
    finally:
        use(before)


def on_triton(*operands: Tensor) -> bool:
    """Whether an operation on these runs in Triton."""
    if _chosen == "torch" or triton is None or any(operand.dtype == torch.float64 for operand in operands):
        return False
    return _chosen == "triton" or operands[0].is_cuda
