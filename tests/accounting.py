"""Memory of an update by accounting: it runs on fake tensors, which have shapes and no numbers.

    python tests/accounting.py s4wm-3d training.frames_at_once=0

Kernels in torch, bfloat16 and the norms' forms of a CPU: a GPU may differ by some per cent.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wmcli.assemble import build_tokenizer, build_world_model
from wmcli.settings import resolve
from wmcli.spaces import Spaces
from wmcli.trainers.dynamics import world_model_update
from wmcli.training.device import Machine
from wmcli.training.optim import optimizer_for
from wmcli.world_models.base import Batch


class Memory(NamedTuple):
    """Bytes of one update."""

    weights: int
    """Parameters. Their gradients take as much."""
    moments: int
    """State of the optimizer."""
    peak: int
    """The most that is alive at once: weights, gradients, moments, batch, activations and what operations need."""


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype != torch.bool  # 1 for AdamW's step; nothing is to be drawn again
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def dynamics_update(preset: str, *overrides: str) -> Memory:
    """Account for an update of a preset's world model that learns from whole frames."""
    settings = resolve(preset, overrides)
    spaces = Spaces.of_images(settings.environment.size, 6)
    machine = Machine(torch.device("cpu"), "bfloat16", 1)
    with FakeTensorMode(allow_non_fake_inputs=True), Alive() as alive:
        inside = build_tokenizer(settings, spaces) if settings.dynamics.trains_tokenizer else None
        model = build_world_model(settings, inside, spaces).train()
        shape, size = (settings.dynamics.batch, model.segment), settings.environment.size
        flag = torch.zeros(shape, dtype=torch.bool)
        batch = Batch(
            inputs=torch.zeros(*shape, size, size, 3, dtype=torch.uint8),
            action=torch.zeros(shape, dtype=torch.int64),
            reward=torch.zeros(shape),
            terminated=flag,
            truncated=flag,
            is_first=flag,
            valid=~flag,
        )
        optimizer = optimizer_for(settings.dynamics, model.parameter_groups())
        world_model_update(machine, model, optimizer, settings.dynamics.clip)(batch)
        moments = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        # The moments are made after the backward pass of the first update, and are there in that of every later one.
        held = sum(each.nbytes for each in moments)
        return Memory(sum(p.nbytes for p in model.parameters()), held, alive.peak + held)


if __name__ == "__main__":
    used = dynamics_update(*sys.argv[1:])
    print(", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in used._asdict().items()))
