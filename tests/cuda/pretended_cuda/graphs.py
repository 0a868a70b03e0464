"""CUDA graphs on the pretended device.

A recording does its operations, to know the shapes, and then undoes them: memory from outside gets its values back, and
what was allocated inside is void. A replay does the same operations on the same memory.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pretended_cuda.device import DEVICE, fill_with_garbage
from pretended_cuda.tensors import map_tensors, perform, tensors


class Recording:
    """Operations on tensors of the CPU, in the order in which they were recorded."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._tape: list[Callable[[], None]] = []
        self._inside: dict[int, Tensor] = {}  # memory allocated by the recording, by the address of its storage object
        self._outside: dict[int, Tensor] = {}  # all other memory, as bytes
        self._before: dict[int, Tensor] = {}  # its values before the recording
        self._kept: dict[int, int] = {}  # references of the recording to each piece of memory
        self._random_state = DEVICE.random_state

    def takes_this_thread(self) -> bool:
        """Return whether operations of this thread are recorded: the recording one, and autograd's."""
        current = threading.current_thread()
        return current is self._thread or isinstance(current, threading._DummyThread)

    def touch(self, operands: Iterable[Tensor]) -> None:
        """Save the values of memory from outside before it is used."""
        for operand in operands:
            storage = operand.untyped_storage()
            if storage._cdata not in self._inside and storage._cdata not in self._outside:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._outside[storage._cdata], self._before[storage._cdata] = memory, memory.clone()

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that was just done."""
        for made in tensors(result):
            storage = made.untyped_storage()
            if storage._cdata not in self._outside:
                self._inside.setdefault(storage._cdata, made)
        given = {operand.untyped_storage()._cdata for operand in tensors((args, kwargs))}
        is_view = func.is_view or torch.Tag.inplace_view in func.tags
        # The conjugate, a view for torch, was made a copy.
        if is_view and all(made.untyped_storage()._cdata in given for made in tensors(result)):
            return
        # Detached, since operations such as transpose_ change the object.
        args, kwargs, result = self._keep((args, kwargs, result))
        places = list(tensors(result))

        def again() -> None:
            for place, tensor in zip(places, tensors(perform(func, args, kwargs)), strict=True):
                if place.data_ptr() != tensor.data_ptr():
                    place.copy_(tensor)

        self._tape.append(again)
        DEVICE.operations[func.overloadpacket.__name__] += 1

    def add_launch(self, launch: Callable[..., None], args: Any, kwargs: Any) -> None:
        """Record the launch of a kernel that writes into its operands."""
        args, kwargs = self._keep((args, kwargs))
        self._tape.append(lambda: launch(*args, **kwargs))
        DEVICE.operations["launch"] += 1

    def end(self) -> None:
        """Undo what was recorded."""
        DEVICE.random_state = self._random_state
        for key, memory in self._outside.items():
            memory.copy_(self._before.pop(key))
        for made in self._inside.values():
            storage = made.untyped_storage()
            size = storage.nbytes() // made.element_size()
            fill_with_garbage(torch.empty(0, dtype=made.dtype).set_(storage, 0, (size,)))

    def replay(self) -> None:
        """Do the operations again."""
        for key, memory in self._outside.items():
            storage = memory.untyped_storage()
            # The storage object here and the tensor of bytes refer to it as well.
            if torch._C._storage_Use_Count(storage._cdata) <= self._kept.get(key, 0) + 2:
                DEVICE.refuse(f"a recorded graph reads or writes {storage.nbytes()} bytes that were freed since")
        with torch.no_grad():
            for again in self._tape:
                again()

    def _keep(self, tree: Any) -> Any:
        def kept(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata
            self._kept[key] = self._kept.get(key, 0) + 1
            return tensor.detach()

        return map_tensors(tree, kept)


class CUDAGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recording: Recording | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin to record."""
        if DEVICE.recording is not None:
            DEVICE.refuse("CUDA error: the stream is capturing already")
        DEVICE.begin_recording(Recording())

    def capture_end(self) -> None:
        """End the recording."""
        self._recording = DEVICE.recording
        DEVICE.end_recording()
        assert self._recording is not None
        with _disable_current_modes():
            self._recording.end()

    def replay(self) -> None:
        """Launch the graph."""
        if self._recording is None or DEVICE.recording is not None:
            DEVICE.refuse("CUDA error: a graph is replayed that was not recorded, or while another one is recorded")
        with _disable_current_modes():
            self._recording.replay()
        DEVICE.replayed += 1

    def reset(self) -> None:
        """Forget the recording."""
        self._recording = None

    def pool(self) -> tuple[int, int]:
        """Return the identity of its memory."""
        return id(self), 0


class graph:  # noqa: N801 (the name of torch.cuda.graph)
    """Stands for torch.cuda.graph."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        self._graph.capture_begin()

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()
