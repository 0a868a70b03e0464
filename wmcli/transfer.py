"""Copies from the host to a device that never wait for the device.

A copy out of ordinary (pageable) memory waits until the device has done all earlier work. A copy out of pinned memory
is queued like any other work. Torch keeps pinned memory until the copies out of it are done, so it may be released at
once.

On some processors a matrix product rounds differently where its operands begin elsewhere in a cache line. Torch's own
memory begins at one; NumPy's and a file's need not. So what comes from there is copied, and the same values give the
same results in every process, resumed or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 64
"""Bytes. Torch's memory on the CPU begins at a multiple of it."""


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device. Where they are there already, only those not `aligned` are copied."""
    import torch

    tensor = torch.as_tensor(values)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return aligned(tensor.to(device))
    return tensor.pin_memory().to(device, non_blocking=True)


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory begins where torch begins its own on the CPU, itself if it does already."""
    return tensor if tensor.device.type != "cpu" or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def take_rows(source: Any, rows: np.ndarray, device: torch.device) -> Any:
    """Return rows (...) of a tensor (N, ...), or of each tensor of a tree, on a device.

    Args:
        source: On the device or on the host.
        rows: int64.
        device: Of the result. Rows of a tensor on the host are gathered there, in pinned memory. What is no tensor has
            a method `take` that does so.
    """
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    there = any(column.device.type == device.type for column in tree_leaves(source))
    where = to_device(rows, device) if there else None  # once for all parts

    def take(column: Any) -> Tensor:
        pinned = device.type == "cuda"
        if not isinstance(column, torch.Tensor):
            taken: Tensor = column.take(rows, pinned=pinned)
            return taken.to(device, non_blocking=pinned)
        if column.device.type == device.type:
            return column[where]
        return _gather(column, rows, pinned).to(device, non_blocking=pinned)

    return tree_map(take, source)


def _gather(source: Tensor, rows: np.ndarray, pinned: bool) -> Tensor:
    """Return rows of a tensor on the host in new memory, in parallel where torch has several threads."""
    import torch

    gathered = torch.empty(rows.size, *source.shape[1:], dtype=source.dtype, pin_memory=pinned)
    torch.index_select(source, 0, torch.from_numpy(rows.reshape(-1)), out=gathered)
    return gathered.view(*rows.shape, *source.shape[1:])
