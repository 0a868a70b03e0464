"""The stack of S4WM with diagonal systems: S4D, which is S4 with P = 0.

Each channel has its own linear system with a diagonal matrix, so powers need no algebra. The kernel is a Vandermonde
product of the parameters, for any length, and an element costs O(N) per channel.

Axes: B batch, T time, D width, N state numbers per channel (M = N / 2 conjugate pairs), S layers.

Source: S4D (Gu et al. 2022, arXiv 2206.11893).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wmcli.backbones.base import BackboneSize
from wmcli.backbones.s4 import StackSettings, StateSpaceStack, draw_log_dt, hippo_legs, learn_slowly, legs_input, wide
from wmcli.kernels import s4 as kernels
from wmcli.kernels.diagonal_scan import diagonal_scan_step, vandermonde
from wmcli.kernels.dispatch import on_triton


class S4DSettings(StackSettings):
    """Settings of the S4D backbone. A layer is a block of two S4D layers and an MLP."""

    kind: Literal["s4d"] = "s4d"
    """S4D: diagonal state spaces."""
    state_size: int = Field(default=64, ge=2, multiple_of=2)
    """State size of one channel. [numbers]"""
    tied: bool = True
    """Share Lambda and B among the channels of a layer (n_ssm = 1 in the S4 code)."""
    discretization: Literal["zoh", "bilinear"] = "zoh"
    """Discretization of the systems: zero-order hold, or the trapezoidal rule."""
    initialization: Literal["lin", "legs"] = "lin"
    """Initial frequencies and B: pi n and 1 (S4D-Lin), or HiPPO-LegS without its rank-one part (S4D-LegS)."""


class S4D(StateSpaceStack):
    """The stack of S4D layers. The weights serve sequences of any length."""

    def __init__(self, settings: S4DSettings, size: BackboneSize) -> None:
        build = partial(build_system, discretization=settings.discretization)
        super().__init__(settings, size, lambda: DiagonalStateSpace(settings, size), partial(DiagonalSystems, build))


class DiagonalStateSpace(nn.Module):
    """D linear systems, one per channel. Complex parameters are stored as (..., 2), real part first."""

    def __init__(self, settings: S4DSettings, size: BackboneSize) -> None:
        super().__init__()
        self.shape = size.width, settings.state_size
        pairs = settings.state_size // 2
        if settings.initialization == "lin":
            frequency, b = math.pi * torch.arange(pairs), torch.ones(pairs, dtype=torch.complex64)
        else:
            poles, p, _ = hippo_legs(settings.state_size)
            frequency, b = poles.imag, legs_input(p)
        frequency, b = (part.expand(1 if settings.tied else size.width, -1) for part in (frequency.float(), b))
        self.log_dt = nn.Parameter(draw_log_dt(settings, size.width))
        self.log_decay = nn.Parameter(torch.full_like(frequency, math.log(0.5)))  # Re(Lambda) = -exp(log_decay)
        self.frequency = nn.Parameter(frequency.clone())
        self.b = nn.Parameter(torch.view_as_real(b.to(torch.complex64, copy=True)))
        learn_slowly(self.log_dt, self.log_decay, self.frequency, self.b)
        self.c = nn.Parameter(torch.view_as_real(torch.randn(size.width, pairs, dtype=torch.complex64)))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the parameters in the order of `build_system`."""
        return self.log_dt, self.log_decay, self.frequency, self.b, self.c


def build_system(
    log_dt: Tensor, log_decay: Tensor, frequency: Tensor, b: Tensor, c: Tensor, *, discretization: str
) -> tuple[kernels.Discrete, Tensor]:
    """Return the discretized system, in float64, and C: of one layer, or of several stacked on a first axis.

    Zero-order hold: Abar = exp(dt Lambda), Bbar = (Abar - 1) / Lambda B.
    Bilinear: Abar = (1 + dt Lambda / 2) / (1 - dt Lambda / 2), Bbar = dt B / (1 - dt Lambda / 2).

    Source: Equation 2 of the S4D paper.
    """
    dt, decay, frequency, b = (each.double() for each in (log_dt, log_decay, frequency, b))
    dt, poles, b = dt.exp()[..., None], torch.complex(-decay.exp(), frequency), torch.view_as_complex(b)
    if discretization == "zoh":
        diagonal = (dt * poles).exp()
        into = (diagonal - 1) / poles * b
    else:
        inverse = 1 / (1 - dt / 2 * poles)
        diagonal, into = 2 * inverse - 1, dt * inverse * b
    none = 0 * diagonal  # zeros with a graph, which gradients need
    return kernels.Discrete(diagonal, none, none, into), torch.view_as_complex(c.to(wide(c.dtype)).contiguous())


class DiagonalSystems(kernels.Systems):
    """Systems discretized by `build`, with C itself: with P = 0 kernels need neither Cauchy sums nor C~."""

    def _prepared(
        self, key: str | tuple[int, ...], function: Callable[..., tuple[Tensor, ...]], reach: int = 1
    ) -> list[tuple[Tensor, ...]]:
        function = {"kernel": _kernel, "step": _step}[key] if isinstance(key, str) else partial(_chunk, sizes=key)
        return super()._prepared(key, function, reach)

    def step(self, layer: int, u: Tensor, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if on_triton(state):
            return super().step(layer, u, state, reset)  # one launch for any P
        operators = self.step_operators(layer)
        with torch.autocast(u.device.type, enabled=False):
            diagonal = torch.view_as_real(operators.diagonal).flatten(0, 1)  # all channels in a row
            driven, before = (
                each.unflatten(2, (-1, 2)).flatten(1, 2)
                for each in (operators.input * u.to(state.dtype)[..., None], state)
            )
            after = diagonal_scan_step(diagonal, driven, before, reset).view_as(state)
            return torch.linalg.vecdot(operators.output, after), after


def _kernel(system: kernels.Discrete, c: Tensor, length: int) -> tuple[Tensor, ...]:
    weights = c * system.input.to(c.dtype)
    return (vandermonde(torch.view_as_real(system.diagonal), torch.view_as_real(weights), length),)


def _step(system: kernels.Discrete, c: Tensor, length: int) -> tuple[Tensor, ...]:
    return kernels.step_operators(system, c, c.real.dtype)


def _chunk(system: kernels.Discrete, c: Tensor, length: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    chunk = kernels.chunk_operators(system, c, c.real.dtype, *sizes)
    return tuple(part for part in chunk if part is not None)
