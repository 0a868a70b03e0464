"""A function of tensors as one CUDA graph: recorded at its first call, then replayed with a single launch.

A rollout launches hundreds of small kernels, step after step; replayed, it costs the host as good as nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

R = TypeVar("R")

WARM_UPS = 2  # calls before the recording: kernels are compiled and libraries loaded in them, which none may contain


class Recorded(Generic[R]):
    """`function` of trees of tensors on one CUDA device, without gradient. A place in a tree may be empty (None).

    What it gives stays where it is and is overwritten by the next call: use it up before. Arguments have the shapes and
    types of the first call. The function must do the same operations at every call, whatever the values: it draws no
    random numbers, waits for nothing and brings nothing from the host. Weights that it reads are read anew at every
    call, in the place where they were at the first. It enters autocast itself, so that what that converts is converted
    anew as well.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self._function = function
        self._inputs: list[Tensor] = []
        self._form: tuple[pytree.TreeSpec, list[bool]] | None = None  # and which leaves are None
        self._result: R
        self._replay: Callable[[], None]

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> R:
        leaves, tree = pytree.tree_flatten(arguments)
        given = [leaf for leaf in leaves if leaf is not None]
        form = (tree, [leaf is None for leaf in leaves])
        if self._form is None:
            self._form, self._inputs = form, [tensor.clone() for tensor in given]
            places = iter(self._inputs)
            mine = pytree.tree_unflatten([None if leaf is None else next(places) for leaf in leaves], tree)
            self._result, self._replay = capture(lambda: self._function(*mine))
        assert form == self._form, "another tree of arguments than at the first call"
        for place, tensor in zip(self._inputs, given, strict=True):
            assert place.shape == tensor.shape and place.dtype == tensor.dtype, "other tensors than at the first call"
        torch._foreach_copy_(self._inputs, given)
        self._replay()
        return self._result


def capture(run: Callable[[], R]) -> tuple[R, Callable[[], None]]:
    """Record what `run` does on the current CUDA device: where its result lies, and what computes it anew."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay
