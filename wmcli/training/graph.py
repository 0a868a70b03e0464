"""A function of tensors as one CUDA graph: recorded at its first call, then replayed with a single launch.

A rollout launches hundreds of small kernels, step after step. A replay costs the host almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

R = TypeVar("R")

WARM_UPS = 2  # calls before the recording, which must not contain compilation and loading of libraries


class RecordedFunction(Generic[R]):
    """`function` of trees of tensors on one CUDA device, without gradient. Leaves of a tree may be None.

    The result is overwritten by the next call. Arguments have the shapes and types of the first call. The function must
    do the same operations at every call, whatever the values. It draws no random numbers, waits for nothing and copies
    nothing from the host. Weights are read at every call, from their storage at the first call. The function enters
    autocast itself, so that conversions are also repeated.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self._function = function
        self._inputs: list[Tensor] = []
        self._form: tuple[pytree.TreeSpec, list[bool]] | None = None  # with flags of the leaves that are None
        self._result: R
        self._replay: Callable[[], None]

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> R:
        leaves, tree = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if leaf is not None]
        form = (tree, [leaf is None for leaf in leaves])
        if self._form is None:
            self._form, self._inputs = form, [tensor.clone() for tensor in tensors]
            places = iter(self._inputs)
            stored = pytree.tree_unflatten([None if leaf is None else next(places) for leaf in leaves], tree)
            self._result, self._replay = capture(lambda: self._function(*stored))
        assert form == self._form, "another tree of arguments than at the first call"
        for place, tensor in zip(self._inputs, tensors, strict=True):
            assert place.shape == tensor.shape and place.dtype == tensor.dtype, "other tensors than at the first call"
        torch._foreach_copy_(self._inputs, tensors)
        self._replay()
        return self._result


def capture(run: Callable[[], R]) -> tuple[R, Callable[[], None]]:
    """Record `run` on the current CUDA device: return its result and a function that recomputes it in place."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay
