"""What torch has for CUDA, put on the pretended device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pretended_cuda import graphs
from pretended_cuda.device import DEVICE, TOTAL_MEMORY
from pretended_cuda.tensors import CudaTensor, PretendMode, carry_marks, map_tensors, tensors, unwrap


def install(library: ctypes.CDLL) -> None:
    """Pretend from here on, in this process and all its threads."""
    DEVICE.library = library
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the CPU and copied
    for name, value in _functions().items():
        setattr(torch.cuda, name, value)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.backends.cuda.is_built = lambda: True
    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        importlib.import_module(module)._foreach_supported_types.append(CudaTensor)
    nn.Module._apply = _apply  # type: ignore[method-assign]
    _profile_the_host_alone()
    _launch_on_the_host()
    _pretend_in_every_thread()


# -- torch.cuda -------------------------------------------------------------------------------------------------------


class Stream:
    """All streams are one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream = torch.device("cuda", 0), 0

    def synchronize(self) -> None:
        DEVICE.wait("synchronize")

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def wait_stream(self, _: Stream) -> None:
        pass

    def wait_event(self, _: Event) -> None:
        pass


class Event:
    """A moment on the one stream, whose work is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, _: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        DEVICE.wait("synchronize with an event")

    def query(self) -> bool:
        return True

    def wait(self, _: Stream | None = None) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._time - self._time)


def _functions() -> dict[str, Any]:
    stream = Stream()
    functions: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "pretended",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="pretended",
            major=9,
            minor=0,
            total_memory=TOTAL_MEMORY,
            multi_processor_count=132,
            L2_cache_size=50 << 20,
        ),
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: DEVICE.wait("synchronize"),
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: ("default", "warn", "error").index(DEVICE.warns),
        # Streams and graphs
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": graphs.CUDAGraph,
        "graph": graphs.graph,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: DEVICE.recording is not None,
        # Memory
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - DEVICE.allocated, TOTAL_MEMORY),
        "memory_allocated": lambda device=None: DEVICE.allocated,
        "memory_reserved": lambda device=None: DEVICE.peak,
        "max_memory_allocated": lambda device=None: DEVICE.peak,
        "max_memory_reserved": lambda device=None: DEVICE.peak,
        "reset_peak_memory_stats": _reset_peak,
        # Random numbers
        "get_rng_state": _random_state,
        "set_rng_state": _set_random_state,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
    }
    return functions


def _set_sync_debug_mode(mode: str | int) -> None:
    DEVICE.warns = mode if isinstance(mode, str) else ("default", "warn", "error")[mode]


def _reset_peak(device: Any = None) -> None:
    DEVICE.peak = DEVICE.allocated


def _random_state(device: Any = "cuda") -> Tensor:
    _check_not_recording()
    return DEVICE.random_state.clone()


def _set_random_state(state: Tensor, device: Any = "cuda") -> None:
    _check_not_recording()
    DEVICE.random_state = state.clone()


def _seed(seed: int) -> None:
    _check_not_recording()
    DEVICE.random_state = torch.Generator().manual_seed((int(seed) + 1) % 2**63).get_state()  # others than the CPU's


def _check_not_recording() -> None:
    if DEVICE.recording is not None:
        DEVICE.refuse("Cannot access the state of the CUDA generator during CUDA graph capture")


# -- modules, kernels, profiles and threads ---------------------------------------------------------------------------


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Move or convert a module in place, as `nn.Module._apply` does: its parameters stay the same objects."""
    for child in module.children() if recurse else ():
        child._apply(change)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = change(parameter)
            gradient = None if parameter.grad is None else change(parameter.grad)
        if changed is parameter:
            continue
        parameter.grad = None
        if isinstance(changed, CudaTensor) == isinstance(parameter, CudaTensor):
            parameter.data = changed
        else:
            made = carry_marks(parameter, nn.Parameter(changed, parameter.requires_grad))
            torch.utils.swap_tensors(parameter, made)
        parameter.grad = gradient
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def _launch_on_the_host() -> None:
    """Let Triton's interpreter have the tensors of the CPU, and record its launches."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    call = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        for operand in tensors((args, kwargs)):
            if not isinstance(operand, CudaTensor):
                DEVICE.refuse("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        args, kwargs = map_tensors((args, kwargs), unwrap)
        with _disable_current_modes():
            if DEVICE.recording is None:
                call(self, *args, **kwargs)
                return
            DEVICE.recording.touch(tensors((args, kwargs)))
            call(self, *args, **kwargs)
            DEVICE.recording.add_launch(lambda *given, **named: call(self, *given, **named), args, kwargs)

    GridExecutor.__call__ = launch


def _profile_the_host_alone() -> None:
    profile = torch.profiler.profile

    def on_the_host(*, activities: Any = None, **kwargs: Any) -> Any:
        return profile(activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)

    torch.profiler.profile = on_the_host  # type: ignore[misc, assignment]


def _pretend_in_every_thread() -> None:
    """Enter the mode here and at the start of every thread, as modes belong to threads."""
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def pretending(self: threading.Thread) -> None:
        with PretendMode():
            begin(self)

    threading.Thread._bootstrap_inner = pretending  # type: ignore[attr-defined]
    PretendMode().__enter__()
