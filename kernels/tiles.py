"""Choose the tile of a kernel, where no single one serves all GPUs and shapes.

A kernel offers a few tiles, of which the first is the default. `tune` times them all and stores the fastest of each
shape beside Triton's cache, from where every later process takes it. It runs only when asked to, since another tile
adds in another order: a run that resumes after tuning is not bit-equal to one that was never interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from wmcli.errors import UsageError
from wmcli.kernels.dispatch import triton

Tile = dict[str, int]
"""Sizes, `num_warps` and `num_stages`, as keyword arguments of a launch."""

_index: int | None = None
_asked: dict[str, Sequence[Tile]] = {}


def choose(kernel: str, device: torch.device, shape: Sequence[object], tiles: Sequence[Tile]) -> Tile:
    """Return the tile for a launch: the stored one if there is one, else the first.

    Args:
        kernel: The name of the kernel.
        device: Of its operands.
        shape: Everything that the time of the launch depends on.
        tiles: All that the kernel offers for the shape.

    Raises:
        UsageError: The file of stored tiles is damaged.
    """
    if _index is not None:
        return tiles[min(_index, len(tiles) - 1)]
    if device.type != "cuda" or len(tiles) == 1:
        return tiles[0]
    key = " ".join(map(str, (torch.cuda.get_device_name(device), kernel, *shape)))
    _asked[key] = tiles
    return next((tile for tile in tiles if tile == _stored().get(key)), tiles[0])


@contextmanager
def using(index: int) -> Iterator[None]:
    """Launch every kernel with its tile of that index, or its last one, within a `with` block."""
    global _index
    before, _index = _index, index
    try:
        yield
    finally:
        _index = before


def tune(call: Callable[[], object], time: Callable[[Callable[[], object]], float] | None = None) -> dict[str, Tile]:
    """Time each tile of every kernel that `call` launches, store the fastest, and return them.

    What is stored already is not timed again; remove the file (`path`) for that.

    Args:
        call: Launches the kernels, forward and backward.
        time: From a function to its seconds; None measures on the GPU.
    """
    _asked.clear()
    call()
    stored, chosen = _stored(), {}
    for key, tiles in dict(_asked).items():
        if key in stored:
            continue
        seconds = []
        for tile in tiles:
            stored[key] = tile
            try:
                seconds.append((time or _seconds)(call))
            except triton.runtime.errors.OutOfResources:
                seconds.append(float("inf"))
        chosen[key] = stored[key] = tiles[seconds.index(min(seconds))]
    path().parent.mkdir(parents=True, exist_ok=True)
    draft = path().with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(stored, indent=1, sort_keys=True), encoding="utf-8")
    draft.replace(path())
    return chosen


def path() -> Path:
    """Return the file of stored tiles."""
    return Path(triton.knobs.cache.dir) / "wm-tiles.json"


@cache
def _stored() -> dict[str, Any]:
    if not path().exists():
        return {}
    try:
        return dict(json.loads(path().read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UsageError(f"{path()}: stored tiles of kernels are damaged; remove the file.") from None


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of ten calls, after two others."""
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[2:])
