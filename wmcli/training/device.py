"""Device, precision and randomness of a stage, chosen once and recorded in what the stage publishes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn

import wmcli
from wmcli.errors import UsageError
from wmcli.kernels import dispatch
from wmcli.training.allocator import keep_freed_memory
from wmcli.training.graph import Recorded
from wmcli.training.settings import TrainingSettings

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")


@dataclass(frozen=True)
class Machine:
    """What a stage runs on: the answer to `device`, `precision` and `kernels` = auto on this computer."""

    device: torch.device
    precision: str
    threads: int
    kernels: Literal["torch", "triton"] = "torch"
    cuda_graph: bool = False

    @classmethod
    def choose(cls, settings: TrainingSettings) -> Machine:
        """Chooses kernels, the use of memory and, on a GPU, float32 without TF32 for the whole process.

        Raises UsageError when the device or the kernels asked for are not there; nothing falls back silently.
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
                f"training.cuda_graph = true: there are none on '{device}'; use --set training.cuda_graph=false."
            )
        if device.type == "cpu":
            keep_freed_memory()
        else:
            # cuDNN would take TF32 unasked. What stays in float32 beside bfloat16 stays there for its digits, too.
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
            if device.index is not None:
                torch.cuda.set_device(device)  # kernels of Triton's are launched on the current device
        return cls(device, precision, torch.get_num_threads(), kernels, settings.cuda_graph)

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products and convolutions in the chosen precision; a null context for float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def repeated(self, function: Callable[..., R]) -> Callable[..., R]:
        """`function` under `autocast`; with `training.cuda_graph` recorded at its first call and replayed from then on,
        on the terms of `wmcli.training.graph`."""

        def run(*arguments: Any) -> R:
            with self.autocast():
                return function(*arguments)

        return Recorded(run) if self.cuda_graph else run

    def freeze(self, module: M) -> M:
        """`module` on the device, for use without training under `autocast`: matrices and convolution kernels are kept
        in the precision that autocast would convert them to at every call, with the same results.

        A module with an attribute `in_float32` that is True stays as it is, such as `wmcli.nn.layers.Float32Linear`.
        Modules with a method `freeze`, such as backbones, then prepare what follows from their weights.
        """
        module = module.to(self.device).eval().requires_grad_(False)
        if self.precision == "bfloat16":
            _lower(module)
        for part in module.modules():
            if callable(freeze := getattr(part, "freeze", None)):
                freeze()
        return module

    def block(self) -> dict[str, Any]:
        """What a manifest says about the machine."""
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
        }

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        graph = ", rollouts as a CUDA graph" if self.cuda_graph else ""
        return f"{self.device}, {self.precision}, {threads}, kernels in {self.kernels}{graph}"


def _lower(module: nn.Module) -> None:
    if getattr(module, "in_float32", False):
        return
    if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        module.weight.data = module.weight.data.to(torch.bfloat16)
    for child in module.children():
        _lower(child)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"training.device = '{name}' is no device torch knows; use auto, cpu or cuda.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"training.device = '{name}' is not on this machine; run with --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"training.device = '{name}' is not supported; use auto, cpu or cuda.")
    return device


def _kernels(name: Literal["auto", "torch", "triton"], device: torch.device) -> Literal["torch", "triton"]:
    missing = dispatch.unavailable(device)
    if name == "triton" and missing:
        raise UsageError(f"training.kernels = 'triton': {missing}; use auto or torch.")
    if name != "auto":
        return name
    return "triton" if device.type == "cuda" and not missing else "torch"


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware computes in bfloat16 itself."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def derived_seed(seed: int, *path: int | str) -> int:
    """An independent 63-bit seed for the stream that `path` names, the same on every machine."""
    words = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed, len(words), *words]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def isolated_randomness(seed: int, device: torch.device) -> Iterator[np.random.Generator]:
    """Seed torch's global generators for a stage (dropout draws from them) and put them back afterwards.

    Yields the stage's NumPy generator, which serves everything on the host.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield np.random.default_rng(seed)
