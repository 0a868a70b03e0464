"""Modes that refuse operations, on any device, that would hold up a GPU; and what stands in for a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wmcli.training import graph

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


class NoWaiting(TorchDispatchMode):
    """Refuses every operation whose result the host would have to wait for."""

    forbidden: ClassVar[set[str]] = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.forbidden, name
        masks = args[1] if name == "index" else ()
        assert not any(mask is not None and str(mask.dtype) == "torch.bool" for mask in masks), "indexed by a mask"
        return func(*args, **(kwargs or {}))


class Replayable(NoWaiting):
    """Refuses as well what a CUDA graph cannot hold: random numbers, and tensors made of the host's data."""

    forbidden: ClassVar[set[str]] = NoWaiting.forbidden | {
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("uniform_", "normal_", "random_", "bernoulli", "bernoulli_", "exponential_", "multinomial", "native_dropout"),
        "lift_fresh",  # torch.tensor and the like
    }


def record_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recordings stand in for CUDA graphs on any device: to replay is to run again and to put the results where the
    first ones lie."""

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        results: list[Any] = []

        def replay() -> Any:
            new = run()
            if not results:
                results.append(new)
            with torch.no_grad():
                for place, tensor in zip(tree_leaves(results[0]), tree_leaves(new), strict=True):
                    if tensor is not None and place is not tensor:
                        place.copy_(tensor)
            return results[0]

        return replay

    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(graph, "warm_up", lambda run: run())
