"""Device, precision and randomness of a stage, chosen once and recorded in the stage's artifact."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn

import wmcli
from wmcli import ranks
from wmcli.errors import UsageError
from wmcli.kernels import dispatch
from wmcli.training.allocator import keep_freed_memory
from wmcli.training.graph import RecordedFunction
from wmcli.training.settings import TrainingSettings

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")

Metrics = dict[str, torch.Tensor]
"""Scalars of an update, on the device."""


@dataclass(frozen=True)
class Machine:
    """The hardware and arithmetic of a stage: `device`, `precision` and `kernels` with "auto" resolved."""

    device: torch.device
    precision: str
    threads: int
    kernels: Literal["torch", "triton"] = "torch"
    cuda_graph: bool = False
    ranks: int = 1
    """Processes that train together."""

    @classmethod
    def choose(cls, settings: TrainingSettings) -> Machine:
        """Choose the machine that the settings describe.

        This sets kernels, the use of memory and, on a GPU, float32 without TF32 and determinism for the whole process.
        There is no silent fallback.

        Raises:
            UsageError: The requested device or kernels are not available.
        """
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = _device(settings.device)
        precision = settings.precision
        if precision == "auto":
            precision = "bfloat16" if has_bfloat16(device) else "float32"
        kernels = _kernels(settings.kernels, device)
        dispatch.use(kernels)
        if settings.cuda_graph and device.type != "cuda":
            raise UsageError(
                f"training.cuda_graph = true: no CUDA graphs on '{device}'; use --set training.cuda_graph=false."
            )
        if settings.cuda_graph and ranks.size() > 1:
            raise UsageError(
                "training.cuda_graph = true: graphs of several processes are not supported; use --set"
                " training.cuda_graph=false."
            )
        if device.type == "cpu":
            keep_freed_memory()
        else:
            # cuDNN uses TF32 by default. Operations that stay in float32 beside bfloat16 need its precision, too.
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
            choose_determinism(settings.deterministic)
            if device.index is not None:
                torch.cuda.set_device(device)  # Triton launches kernels on the current device
        return cls(device, precision, torch.get_num_threads(), kernels, settings.cuda_graph, ranks.size())

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context for matrix products and convolutions in the chosen precision; a null context for float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def wrap_repeated(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return `function` under `autocast` and without gradient, for repeated calls.

        With `training.cuda_graph` it is recorded and replayed. `RecordedFunction` states the conditions.
        """

        @torch.no_grad()
        def run(*arguments: Any) -> R:
            with self.autocast():
                return function(*arguments)

        return RecordedFunction(run) if self.cuda_graph else run

    def wrap_update(self, update: Callable[..., tuple[Metrics, R]]) -> Callable[..., tuple[Metrics, R]]:
        """Return `update`, which changes weights and returns metrics and more tensors, for repeated calls.

        With `training.cuda_graph` it is recorded and replayed as a whole. `RecordedFunction` states the conditions. The
        metrics are copies, the rest is overwritten by the next call.
        """
        if not self.cuda_graph:
            return update
        recorded = RecordedFunction(update)

        def run(*arguments: Any) -> tuple[Metrics, R]:
            metrics, rest = recorded(*arguments)
            copies = torch.stack([value.detach().float() for value in metrics.values()])
            return dict(zip(metrics, copies, strict=True)), rest

        return run

    def freeze(self, module: M) -> M:
        """Return `module` on the device, for use without training under `autocast`.

        Matrices and convolution kernels are stored in autocast's precision, which saves the conversion at every call.
        Results stay the same. A module whose attribute `in_float32` is True is left unchanged, such as
        `wmcli.nn.layers.Float32Linear`. Modules with a method `freeze`, such as backbones, then precompute quantities
        from their weights.
        """
        module = module.to(self.device).eval().requires_grad_(False)
        if self.precision == "bfloat16":
            _lower(module)
        for part in module.modules():
            if callable(freeze := getattr(part, "freeze", None)):
                freeze()
        return module

    def describe(self) -> dict[str, Any]:
        """Return the machine section of a manifest."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        return {
            "wm": wmcli.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "platform": platform.system(),
            "device": str(self.device),
            "device_name": name,
            "precision": self.precision,
            "threads": self.threads,
            "kernels": self.kernels,
            "cuda_graph": self.cuda_graph,
            "ranks": self.ranks,
        }

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        graph = ", recorded as CUDA graphs" if self.cuda_graph else ""
        each = f", on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.device}, {self.precision}, {threads}, kernels in {self.kernels}{graph}{each}"


def _lower(module: nn.Module) -> None:
    if getattr(module, "in_float32", False):
        return
    if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        module.weight.data = module.weight.data.to(torch.bfloat16)
    for child in module.children():
        _lower(child)


def _device(name: str) -> torch.device:
    if ranks.size() > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{ranks.local_rank()}"
    elif ranks.size() > 1 and ":" in name:
        raise UsageError(
            f"training.device = '{name}' is one device, and every process needs its own: use auto, cpu or cuda."
        )
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"training.device = '{name}' is not a device of torch; use auto, cpu or cuda.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"training.device = '{name}' is not on this machine; run with --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"training.device = '{name}' is not supported; use auto, cpu or cuda.")
    return device


def choose_determinism(wanted: bool) -> None:
    """Let operations on a GPU give the same bits every time, or take the fastest way."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.backends.cudnn.deterministic = wanted
    torch.use_deterministic_algorithms(wanted, warn_only=True)  # warns of operations that have no such form
    # These two sum gradients of attention in any order. The form by plain products, which then serves where flash
    # attention does not (a mask, float32), is to keep bfloat16, as on a CPU.
    torch.backends.cuda.enable_mem_efficient_sdp(not wanted)
    torch.backends.cuda.enable_cudnn_sdp(not wanted)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs a pass


def _kernels(name: Literal["auto", "torch", "triton"], device: torch.device) -> Literal["torch", "triton"]:
    missing = dispatch.unavailable(device)
    if name == "triton" and missing:
        raise UsageError(f"training.kernels = 'triton': {missing}; use auto or torch.")
    if name != "auto":
        return name
    return "triton" if device.type == "cuda" and not missing else "torch"


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware computes in bfloat16 natively."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def derived_seed(seed: int, *path: int | str) -> int:
    """Derive an independent 63-bit seed for the random stream that `path` names, the same on every machine."""
    words = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed, len(words), *words]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def isolated_randomness(seed: int, device: torch.device) -> Iterator[np.random.Generator]:
    """Seed torch's global generators for a stage (dropout uses them) and restore them afterwards.

    Yields:
        The stage's NumPy generator, which serves everything on the host.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield np.random.default_rng(seed)
