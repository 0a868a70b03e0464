"""Functions of tensors as CUDA graphs: recorded once, then replayed with a single launch.

A rollout or an update launches hundreds of small kernels. Launching them one by one takes longer than running them. A
replay costs the host almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

R = TypeVar("R")

WARM_UPS = 2
"""Calls before the recording, which must not contain compilation, loading of libraries and the allocation of an
optimizer's moments."""


class RecordedFunction(Generic[R]):
    """`function` of trees of tensors on one CUDA device. Leaves of a tree may be None.

    The first `WARM_UPS` calls with arguments of some shapes run the function itself. The next one records it. Every
    call does its work once, so the function may change weights and the moments of an optimizer.

    The function does the same operations at every call, whatever the values. It waits for nothing and copies nothing
    from the host. Random numbers come from the device's global generator alone, which goes on as without recording.
    Weights and other tensors that are not arguments are read and written where they lay when it was recorded. The
    function enters autocast itself, so that conversions are also repeated.

    The result of a replay is overwritten by the next one of the same shapes.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self._function = function
        self._recordings: dict[Any, _Recording[R]] = {}

    def __call__(self, *arguments: Any) -> R:
        leaves, tree = pytree.tree_flatten(arguments)
        form = tree, tuple(None if leaf is None else (leaf.shape, leaf.dtype) for leaf in leaves)
        if form not in self._recordings:
            self._recordings[form] = _Recording(self._function, leaves, tree)
        return self._recordings[form](leaves)


class _Recording(Generic[R]):
    """The function for arguments of one form."""

    def __init__(self, function: Callable[..., R], leaves: list[Tensor | None], tree: pytree.TreeSpec) -> None:
        places = [None if leaf is None else leaf.detach().clone() for leaf in leaves]
        self._inputs = [place for place in places if place is not None]
        own = {place.untyped_storage().data_ptr() for place in self._inputs}

        def run() -> R:
            result = function(*pytree.tree_unflatten(places, tree))
            # The next arguments, which may be parts of this result, replace the inputs and all views of them.
            return pytree.tree_map_only(
                Tensor, lambda each: each.clone() if each.untyped_storage().data_ptr() in own else each, result
            )

        self._run = run
        self._calls = 0
        self._replay: Callable[[], R] | None = None

    def __call__(self, leaves: list[Tensor | None]) -> R:
        given = [leaf for leaf in leaves if leaf is not None]
        if given:
            with torch.no_grad():
                torch._foreach_copy_(self._inputs, given)
        self._calls += 1
        if self._calls <= WARM_UPS:
            return warm_up(self._run)
        if self._replay is None:
            self._replay = capture(self._run)
        return self._replay()


def warm_up(run: Callable[[], R]) -> R:
    """Call `run` on the stream of later recordings, so that gradients are accumulated on it."""
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run()
    torch.cuda.current_stream().wait_stream(stream)
    return result


def capture(run: Callable[[], R]) -> Callable[[], R]:
    """Record `run` on the current CUDA device: return a function that does its work and returns its result, in the same
    place every time. The recording itself computes nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_stream(), capture_error_mode="thread_local"):
        result = run()

    def replay() -> R:
        graph.replay()
        return result

    return replay


_streams: dict[int, torch.cuda.Stream] = {}  # by device


def _stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]
