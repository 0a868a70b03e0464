"""Public kernels for the jobs of ours, for comparison where their packages are installed.

None of the packages is a dependency. A public kernel takes its operands in its own layout, prepared before it is timed.

Axes: B batch, H heads, G groups of heads (1 or H), T time, K key width, V value width, C channels, S state components
per channel, W taps.

Source, read at: flash-linear-attention 0.6.0, mamba-ssm 2.3.2, causal-conv1d 1.6.1, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LONGEST = 80  # characters of a message
PACKAGES = {
    "fla": ("fla-core", "flash-linear-attention"),
    "mamba_ssm": ("mamba-ssm",),
    "causal_conv1d": ("causal-conv1d",),
}
"""Distributions by the module that they install."""


class Public(NamedTuple):
    """A public kernel."""

    prepare: Callable[..., tuple[Tensor, ...]]
    """From our operands to its own, differentiable."""
    call: Callable[..., Tensor]
    """The kernel, on its own operands."""
    restore: Callable[[Tensor], Tensor]
    """From its result to ours."""


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    installed = {}
    for module, names in PACKAGES.items():
        for name in names:
            try:
                installed[module] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return installed


def why_not(error: Exception) -> str:
    """Return in one line why a public kernel is not timed."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in PACKAGES:
        return "not installed"
    return first_line(error)


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message, at most `LONGEST` characters of it."""
    line = next(iter(str(error).strip().splitlines()), "without a message")
    return f"{type(error).__name__}: {line if len(line) <= LONGEST else f'{line[: LONGEST - 1]}…'}"


# -- linear recurrences -----------------------------------------------------------------------------------------------


def _gates(log_decay: Tensor) -> dict[str, Tensor]:
    """Return log decays (H,) or (B, T, H) as arguments of simple GLA."""
    return {"g_gamma": log_decay} if log_decay.dim() == 1 else {"g": log_decay}


def _for_simple_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
    """Return operands (B, G or H, T, ·) as (B, T, H, ·), a shared head of queries and keys repeated."""
    q, k = (x.expand(-1, v.shape[1], -1, -1) for x in (q, k))
    decay = log_decay if log_decay.dim() == 1 else log_decay.mT.contiguous()
    return *(x.transpose(1, 2).contiguous() for x in (q, k, v)), decay


def _simple_gla(name: str) -> Public:
    from fla.ops import simple_gla

    function = getattr(simple_gla, name)
    return Public(
        _for_simple_gla,
        lambda q, k, v, decay: function(q, k, v, scale=1.0, **_gates(decay))[0],
        lambda y: y.transpose(1, 2),
    )


def _simple_gla_step() -> Public:
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    def prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        decay = log_decay if log_decay.dim() == 1 else log_decay[..., None]
        return *_for_simple_gla(q[:, :, None], k[:, :, None], v[:, :, None], decay), state

    def call(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> Tensor:
        gates = _gates(decay)
        return fused_recurrent_simple_gla(q, k, v, scale=1.0, initial_state=state, output_final_state=True, **gates)[0]

    return Public(prepare, call, lambda y: y[:, 0])


def _mamba_chunk_scan(chunk: int = 256) -> Public:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def prepare(c: Tensor, b: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
        """With A = -1 the step size is the negated log decay; x is scaled by it inside."""
        dt = -log_decay
        x = (v / dt[..., None]).to(v.dtype).transpose(1, 2).contiguous()
        a = torch.full((v.shape[1],), -1.0, device=v.device)
        return x, dt.mT.contiguous(), a, *(each.transpose(1, 2).contiguous() for each in (b, c))

    return Public(
        prepare,
        lambda x, dt, a, b, c: mamba_chunk_scan_combined(x, dt, a, b, c, chunk),
        lambda y: y.transpose(1, 2),
    )


def _mamba2_state_update() -> Public:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    def prepare(c: Tensor, b: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """As `_mamba_chunk_scan`, with the state as (B, H, V, K). A stride of 0 says that a head has one decay."""
        dt = (-log_decay)[..., None].expand_as(v)
        a, nothing = (torch.full((1, 1, 1), value, device=v.device) for value in (-1.0, 0.0))
        nothing = nothing[0].expand(v.shape[1:])
        return state.mT.contiguous(), (v / dt).to(v.dtype), dt, a.expand(*v.shape[1:], state.shape[2]), b, c, nothing

    def call(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, nothing: Tensor) -> Tensor:
        return selective_state_update(state, x, dt, a, b, c, D=nothing, dt_bias=nothing)  # 2.3.2 fails on None

    return Public(prepare, call, lambda y: y)


# -- selective scan ---------------------------------------------------------------------------------------------------


def _selective_scan() -> Public:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def prepare(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Return all but a with time last, and dt in the dtype of x."""
        return *(each.mT.contiguous() for each in (x, dt.to(x.dtype))), a, *(each.mT.contiguous() for each in (b, c))

    return Public(prepare, selective_scan_fn, lambda y: y.mT)


def _selective_state_update() -> Public:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    def prepare(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return state.clone(), x, dt, a, b, c, x.new_zeros(len(a)).float()  # a copy: it is updated in place

    def call(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, nothing: Tensor) -> Tensor:
        return selective_state_update(state, x, dt, a, b, c, D=nothing, dt_bias=nothing)  # 2.3.2 fails on None

    return Public(prepare, call, lambda y: y)


# -- causal convolution -----------------------------------------------------------------------------------------------


def _causal_conv1d() -> Public:
    from causal_conv1d import causal_conv1d_fn

    return Public(lambda x, weight, bias: (x.mT, weight, bias), causal_conv1d_fn, lambda y: y.mT)


def _causal_conv1d_update() -> Public:
    from causal_conv1d import causal_conv1d_update

    def prepare(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return x, state.to(x.dtype, copy=True), weight, bias  # a copy: it is updated in place

    return Public(prepare, causal_conv1d_update, lambda y: y)


# -- attention --------------------------------------------------------------------------------------------------------


def _as_they_are(*operands: Tensor) -> tuple[Tensor, ...]:
    return operands


def _scaled_dot_product_attention() -> Public:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Public(_as_they_are, call, lambda y: y)


def _flex_attention() -> Public:
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # it compiles one function a few times only, and every shape is another
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend: Any = compiled if q.is_cuda else flex_attention  # on a CPU its compiled form has no gradients
        return attend(q, k, v, block_mask=_causal_blocks(q.shape[2], q.device))

    return Public(_as_they_are, call, lambda y: y)


@lru_cache(maxsize=1)
def _causal_blocks(length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=str(device))


PUBLIC: Mapping[str, Mapping[str, Callable[[], Public]]] = {
    "linear recurrence of RetNet": {
        "fla chunk_simple_gla": lambda: _simple_gla("chunk_simple_gla"),
        "fla fused_recurrent_simple_gla": lambda: _simple_gla("fused_recurrent_simple_gla"),
    },
    "linear recurrence of RetNet, step": {"fla fused_recurrent_simple_gla": _simple_gla_step},
    "linear recurrence of Mamba-2": {
        "mamba_ssm mamba_chunk_scan_combined": _mamba_chunk_scan,
        "fla chunk_simple_gla": lambda: _simple_gla("chunk_simple_gla"),
        "fla fused_recurrent_simple_gla": lambda: _simple_gla("fused_recurrent_simple_gla"),
    },
    "linear recurrence of Mamba-2, step": {
        "mamba_ssm selective_state_update": _mamba2_state_update,
        "fla fused_recurrent_simple_gla": _simple_gla_step,
    },
    "selective scan of Mamba-1": {"mamba_ssm selective_scan_fn": _selective_scan},
    "selective scan of Mamba-1, step": {"mamba_ssm selective_state_update": _selective_state_update},
    "causal convolution of Mamba-2": {"causal_conv1d causal_conv1d_fn": _causal_conv1d},
    "causal convolution of Mamba-2, step": {"causal_conv1d causal_conv1d_update": _causal_conv1d_update},
    "attention": {
        "torch scaled_dot_product_attention": _scaled_dot_product_attention,
        "torch flex_attention": _flex_attention,
    },
}
"""By the name of our kernel and their own name. chunk_retention and fused_recurrent_retention of flash-linear-attention
are its simple GLA with the decays of RetNet's paper. Ours are not always these, so simple GLA is called itself."""
