"""Copies from the host to a device that never wait for the device.

A copy out of ordinary (pageable) memory waits until the device has done all earlier work. A copy out of pinned memory
is queued like any other work. Torch keeps pinned memory until the copies out of it are done, so it may be released at
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device. On the CPU, and where they are there already, they are not copied."""
    import torch

    tensor = torch.as_tensor(values)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
