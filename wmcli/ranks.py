"""Ranks: the processes of data-parallel training, which `torchrun` starts.

All ranks hold the same weights, sample the same batches and draw the same random numbers. Inside `sharing_rows` each
computes on its own rows of a batch. Of random numbers drawn for all rows it takes its own. What depends on a whole
batch, such as a number of valid elements or the statistics of a norm, comes from the rows of all ranks. Gradients are
averaged before they are clipped. So losses and weights are those of one process with the whole batch, up to rounding.
Whatever is no row is equal on all ranks, and the first rank writes for all of them.

The loss on a rank is its part of the loss of the whole batch times the number of ranks. The loss of the whole batch is
therefore the mean over ranks, and so are its gradient and its metrics.

Without `start` there is one rank, and every function here returns its argument as it is.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wmcli.errors import MachineError, UsageError, WmError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun` tells its processes."""
PATIENCE = timedelta(days=7)  # of a rank that waits, for example while the first one collects

_rank, _size, _local = 0, 1, 0
_is_alone = False  # the first rank works for all
_is_sharing = False


# -- the ranks --------------------------------------------------------------------------------------------------------


def is_launched() -> bool:
    """Return whether `torchrun` started this process as one of several."""
    return all(name in os.environ for name in VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def start() -> None:
    """Join the other processes of `torchrun`. The first rank alone writes to stdout from here on."""
    global _rank, _size, _local
    import torch
    import torch.distributed as dist

    _rank, _local, _size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    if _rank:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (open to the end of the process)


def stop() -> None:
    """Leave the other processes."""
    global _rank, _size, _local
    import torch.distributed as dist

    if _size > 1:
        dist.destroy_process_group()
        _rank, _size, _local = 0, 1, 0


def size() -> int:
    """Return the number of ranks."""
    return _size


def rank() -> int:
    """Return the number of this one, from 0."""
    return _rank


def local_rank() -> int:
    """Return its number on this machine: that of its GPU."""
    return _local


def is_first() -> bool:
    """Return whether this is the rank that writes and talks for all."""
    return _rank == 0


def first(function: Callable[[], T]) -> T:
    """Call `function` on the first rank alone, and return its result on all of them. It can be pickled.

    The others wait. A function inside it that needs all ranks takes the first for the only one.

    Raises:
        Exception: Whatever the function raised, on all ranks.
    """
    global _is_alone
    if _alone():
        return function()
    import torch.distributed as dist

    agree(False)  # nobody still reads what the function may change
    outcome: list[Any] = [None, None]
    if _rank == 0:
        _is_alone = True
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
        finally:
            _is_alone = False
    sent = [_portable(part) if isinstance(part, Exception) else part for part in outcome]
    _call(lambda: dist.broadcast_object_list(sent, src=0))
    if _rank:
        outcome = sent
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def agree(*flags: object) -> list[bool]:
    """Return for each flag whether it is true on any rank."""
    if _alone():
        return [bool(flag) for flag in flags]
    import torch
    import torch.distributed as dist

    anywhere = torch.tensor([bool(flag) for flag in flags], dtype=torch.int32)
    _call(lambda: dist.all_reduce(anywhere, dist.ReduceOp.MAX))
    return anywhere.bool().tolist()


# -- the rows of a batch ----------------------------------------------------------------------------------------------


@contextmanager
def sharing_rows() -> Iterator[None]:
    """Compute on the own rows of batches inside the block."""
    global _is_sharing
    _is_sharing = not _alone()
    try:
        yield
    finally:
        _is_sharing = False


def is_sharing() -> bool:
    """Return whether the rows at hand are those of one rank of several."""
    return _is_sharing


def own_count(batch: int, name: str) -> int:
    """Return the rows of a rank in a batch that the setting `name` states.

    Raises:
        UsageError: They cannot be shared out equally.
    """
    ranks = 1 if _is_alone else _size
    if batch % ranks:
        raise UsageError(
            f"{name} = {batch} rows cannot be shared out equally among {ranks} processes: start another number of them,"
            f" or --set {name}={-(-batch // ranks) * ranks}"
        )
    return batch // ranks


def all_rows(count: int) -> int:
    """Return the rows of all ranks, for `count` of this one."""
    return count * _size if _is_sharing else count


def own_rows(values: T, axis: int = 0) -> T:
    """Return the own rows of tensors or arrays with the rows of all ranks along `axis`, or of each in a tuple."""
    if not _is_sharing or values is None:
        return values
    if isinstance(values, tuple):
        parts = (own_rows(part, axis) for part in values)
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    array: Any = values
    count = array.shape[axis] // _size
    own: T = array[(slice(None),) * axis + (slice(_rank * count, (_rank + 1) * count),)]
    return own


def drawn(draw: Callable[[Sequence[int]], Tensor], shape: Sequence[int]) -> Tensor:
    """Return random numbers of a `shape` whose first axis has rows: the own ones of those drawn for all rows."""
    return own_rows(draw((all_rows(shape[0]), *shape[1:]))) if _is_sharing else draw(shape)


def gather_rows(x: Tensor) -> Tensor:
    """Return the rows (B, ...) of all ranks, in the order of the batch and without gradient."""
    if not _is_sharing:
        return x
    import torch
    import torch.distributed as dist

    own = x.detach().contiguous()
    own = own.view(torch.uint8) if x.dtype == torch.bool else own  # gloo has no flags
    every = [torch.empty_like(own) for _ in range(_size)]
    _call(lambda: dist.all_gather(every, own))
    return torch.cat(every).view(x.dtype)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows (N,), numbered over all ranks, of x (B, ...), without gradient."""
    if not _is_sharing:
        return x[rows]
    own = rows - _rank * len(x)
    is_own = (own >= 0) & (own < len(x))
    return total(x[own.clamp(0, len(x) - 1)] * is_own.view(-1, *[1] * (x.ndim - 1)))


def total(x: Tensor) -> Tensor:
    """Return the sum over ranks, without gradient."""
    if not _is_sharing:
        return x
    import torch.distributed as dist

    x = x.detach().clone()
    _call(lambda: dist.all_reduce(x))
    return x


def mean(x: Tensor) -> Tensor:
    """Return the mean over ranks. Its gradient is the mean over ranks, too."""
    if not _is_sharing:
        return x
    averaged: Tensor = _mean_with_gradient().apply(x)
    return averaged


@cache
def _mean_with_gradient() -> Any:
    """Return the mean over ranks as an autograd function."""
    import torch

    def average(x: Tensor) -> Tensor:
        return total(x) / _size

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return average(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return average(gradient)

    return Mean


def per_rank(count: Tensor, least: float = 0.0) -> Tensor:
    """Return the number of counted elements of all ranks, `least` at least, divided by the number of ranks.

    A sum over own elements divided by this is the own part of the mean over all of them.
    """
    if not _is_sharing:
        return count.clamp(min=least) if least else count
    return total(count).clamp(min=least) / _size


# -- gradients and metrics --------------------------------------------------------------------------------------------


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace the gradients of parameters by their means over ranks, all in one message for each number type."""
    if not _is_sharing:
        return
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_type.values():
        flat = _flatten_dense_tensors(gradients)
        _call(partial(dist.all_reduce, flat))
        flat /= _size
        torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))


def average_metrics(values: Tensor) -> Tensor:
    """Return the means of float32 values over ranks. Means of equal values are these values to the bit."""
    if _alone():
        return values
    import torch.distributed as dist

    wide = values.double()
    _call(lambda: dist.all_reduce(wide))
    return (wide / _size).to(values.dtype)


def _alone() -> bool:
    return _size == 1 or _is_alone


def _call(collective: Callable[[], T]) -> T:
    """Call a function of `torch.distributed`."""
    try:
        return collective()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rpartition("] ")[2]
        raise MachineError(
            f"rank {_rank} lost the others ({reason}); the same command resumes from the last checkpoint."
        ) from error


def _portable(error: Exception) -> Exception:
    """Return an exception that can be pickled: itself if it can."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kind = WmError if isinstance(error, WmError) else RuntimeError
        return kind(f"{type(error).__name__}: {error}")
    return error
