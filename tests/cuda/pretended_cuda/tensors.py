"""Tensors that say they are on cuda:0 and compute on the CPU, with the manners of CUDA.

The rules are those of torch 2.11 to 2.13: which operations join tensors of two devices, and which of them wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from pretended_cuda.cells import CELLS
from pretended_cuda.device import CUDA, DEVICE

# The result, or its shape, is needed on the host.
WAITING = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "histc", "_linalg_check_errors"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class CudaTensor(torch.Tensor):
    """A tensor on the pretended device. `host` has its values, and shares its memory as the tensor would."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=CUDA,
        )
        made.host = host
        _count_memory(host)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: CudaTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.host = other.host

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.host!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                made = self.detach().clone()
            made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
            memo[id(self)] = carry_marks(self, made)
        return memo[id(self)]

    def tolist(self) -> Any:
        DEVICE.wait("copy to the host")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host.")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()


class PretendMode(TorchDispatchMode):
    """Takes the operations that make tensors on the pretended device out of none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and skipping takes time at every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the device, or on the CPU if none of its tensors is or comes there."""
    name = func.overloadpacket.__name__
    operands: list[Tensor] = []
    host_args, host_kwargs = _unwrap(args, operands), _unwrap(kwargs, operands) if kwargs else kwargs
    on_device = any(type(operand) is CudaTensor for operand in operands)
    if name == "_pin_memory" or kwargs.get("pin_memory"):
        return _pinned(func, name, args, kwargs, on_device)
    if name == "is_pinned":
        return not on_device and is_pinned(args[0])
    to_device = on_device
    if kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]).type == "cuda"
        host_kwargs = host_kwargs | {"device": torch.device("cpu")}
    if not (on_device or to_device):
        return func(*args, **kwargs)

    _check_devices(name, operands, on_device)
    _check_generator(kwargs)
    _count_waits(name, args)
    late = _check_copies(name, args, kwargs, to_device) if name in COPIES else []
    recording = DEVICE.recording if DEVICE.recording is not None and DEVICE.recording.takes_this_thread() else None
    if recording is not None:
        recording.touch(operand.host for operand in operands if isinstance(operand, CudaTensor))
    result = perform(func, host_args, host_kwargs)
    if isinstance(result, Tensor) and (result.is_conj() or result.is_neg()):
        result = result.resolve_conj().resolve_neg()
    if recording is not None:
        on_host = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        recording.add(func, *map_tensors((args, kwargs | on_host), _frozen), result)
    for target in late:
        DEVICE.copy_to_host(result if target is None else target)
    if not to_device:
        return result

    known = {id(unwrap(operand)): operand for operand in operands}

    def wrap(tensor: Tensor) -> Tensor:
        return known[id(tensor)] if id(tensor) in known else CudaTensor(tensor)

    result = map_tensors(result, wrap)
    if torch.Tag.inplace_view in func.tags:
        return return_and_correct_aliasing(func, args, kwargs, result)
    return result


def perform(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation on tensors of the CPU, with the device's random numbers."""
    call = CELLS.get(func.overloadpacket.__name__, func)
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return call(*args, **kwargs)
    with DEVICE.random_numbers():
        return call(*args, **kwargs)


# -- manners ----------------------------------------------------------------------------------------------------------


def _pinned(func: Any, name: str, args: Any, kwargs: dict[str, Any], on_device: bool) -> Tensor:
    if on_device:
        DEVICE.refuse("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    result = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
    result.untyped_storage().pinned = True
    return result


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a tensor of the CPU lies in pinned memory."""
    return hasattr(tensor.untyped_storage(), "pinned")


def _check_devices(name: str, operands: list[Tensor], on_device: bool) -> None:
    """Refuse operands on two devices. Numbers of the CPU may join; copies and indices are looked at elsewhere."""
    if not on_device or name in COPIES:
        return
    for operand in operands:
        if not isinstance(operand, CudaTensor) and operand.dim() and name not in INDEXING:
            DEVICE.refuse(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
                f" ({name}, {tuple(operand.shape)})"
            )


def _check_generator(kwargs: dict[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        DEVICE.refuse(f"Expected a 'cuda' device type for generator but found '{kwargs['generator'].device.type}'")


def _count_waits(name: str, args: Any) -> None:
    if name in WAITING or (name == "repeat_interleave" and isinstance(args[0], Tensor) and len(args) == 1):
        DEVICE.wait(name)
    if name not in INDEXING:
        return
    indices = [index for index in args[1] if index is not None]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    fills = name != "index" and args[2].numel() == 1 and not isinstance(args[2], CudaTensor)
    if masks and not fills:
        DEVICE.wait(f"{name} by a mask")
    if any(not isinstance(index, CudaTensor) and index.dim() for index in indices):
        DEVICE.wait(f"{name} by indices on the host")


def _check_copies(name: str, args: Any, kwargs: dict[str, Any], to_device: bool) -> list[Tensor | None]:
    """Count the waits of copies between host and device.

    Returns:
        Targets on the host of copies that do not wait; None is the result.
    """
    pairs: list[tuple[Tensor | None, Tensor]]
    if name == "_to_copy":
        pairs, non_blocking = [(None, args[0])], kwargs.get("non_blocking")
    else:
        pairs = list(zip(args[0], args[1], strict=True)) if name == "_foreach_copy_" else [(args[0], args[1])]
        non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
    late: list[Tensor | None] = []
    for target, source in pairs:
        there = to_device if target is None else isinstance(target, CudaTensor)
        if there == isinstance(source, CudaTensor) or not source.numel():
            continue
        if DEVICE.recording is not None:
            DEVICE.wait(f"copy {'from' if there else 'to'} the host")  # which raises
        pinned = is_pinned(source) if there else target is None or is_pinned(target)
        if not (non_blocking and pinned):
            DEVICE.wait(f"copy {'from' if there else 'to'} the host")
        elif there:
            DEVICE.copy_from_host(source)
        else:
            late.append(target)
    return late


def _count_memory(host: Tensor) -> None:
    storage = host.untyped_storage()
    if not hasattr(storage, "counted"):
        storage.counted = True  # type: ignore[attr-defined]
        DEVICE.allocate(storage.nbytes())
        weakref.finalize(storage, DEVICE.allocate, -storage.nbytes()).atexit = False


# -- trees ------------------------------------------------------------------------------------------------------------


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from tensors(each)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested tuples, lists and dicts with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([map_tensors(each, change) for each in tree])
    if isinstance(tree, dict):
        return {key: map_tensors(each, change) for key, each in tree.items()}
    return tree


def _unwrap(tree: Any, operands: list[Tensor]) -> Any:
    """Return a tree with the tensors of the CPU behind those of the device, and append all its tensors to a list."""
    if isinstance(tree, Tensor):
        operands.append(tree)
        return unwrap(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([_unwrap(each, operands) for each in tree])
    if isinstance(tree, dict):
        return {key: _unwrap(each, operands) for key, each in tree.items()}
    return tree


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor of the CPU behind one of the device."""
    return tensor.host if isinstance(tensor, CudaTensor) else tensor


def _frozen(tensor: Tensor) -> Tensor:
    """Unwrap, for a recording: numbers of the CPU keep the value that they have now."""
    return tensor.host if isinstance(tensor, CudaTensor) else tensor.clone()


def carry_marks(old: Tensor, new: Tensor) -> Tensor:
    """Set the attributes that the project has put on `old` on `new` as well, and return it."""
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key != "host"})
    return new
