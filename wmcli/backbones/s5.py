"""The stack of S4WM with S5 layers in place of S4's: S5WM.

An S5 layer has one linear system for all channels, with a diagonal matrix: a scan over a state of N numbers, for any
width. The scan computes the state at every element, so resets add no cost.

Axes: B batch, T time, D width, N state numbers of a layer, M = N / 2 conjugate pairs (real and imaginary part side by
side). J blocks of the contract, L elements of one, Q queries, S layers.

Source: S5 (Smith et al. 2023, arXiv 2208.04933).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wmcli.backbones.base import BackboneSize
from wmcli.backbones.s4 import StackSettings, StateSpaceStack, draw_log_dt, hippo_legs, learn_slowly, wide
from wmcli.errors import UsageError
from wmcli.kernels import s4 as kernels
from wmcli.kernels.diagonal_scan import diagonal_scan, diagonal_scan_step


class S5Settings(StackSettings):
    """Settings of the S5 backbone. A layer is a block of two S5 layers and an MLP."""

    kind: Literal["s5"] = "s5"
    """S5: one diagonal state space for all channels (S5WM)."""
    state_size: int = Field(default=256, ge=2, multiple_of=2)
    """State size of one layer, shared by all channels. [numbers]"""
    blocks: int = Field(default=8, ge=1)
    """Copies of the HiPPO-LegS spectrum of size state_size / blocks in the initial Lambda. [blocks]"""


class S5(StateSpaceStack):
    """The stack of S5 layers. The weights serve sequences of any length."""

    def __init__(self, settings: S5Settings, size: BackboneSize) -> None:
        if settings.state_size % (2 * settings.blocks):
            raise UsageError(
                f"backbone.blocks = {settings.blocks}: twice that must divide backbone.state_size ="
                f" {settings.state_size}."
            )
        super().__init__(settings, size, lambda: JointStateSpace(settings, size), partial(JointSystems, build_system))


class JointStateSpace(nn.Module):
    """One linear system of D inputs and D outputs. Complex parameters are stored as (..., 2), real part first.

    At initialization the mean of |B|^2 is 1 / N and that of |C|^2 is 2 / N, as in lindermanlab/S5 with its default
    C_init, trunc_standard_normal.
    """

    def __init__(self, settings: S5Settings, size: BackboneSize) -> None:
        super().__init__()
        self.shape = (settings.state_size,)
        pairs = settings.state_size // 2
        frequency = hippo_legs(settings.state_size // settings.blocks)[0].imag.repeat(settings.blocks).float()
        self.log_dt = nn.Parameter(draw_log_dt(settings, pairs))
        self.log_decay = nn.Parameter(torch.full_like(frequency, math.log(0.5)))  # Re(Lambda) = -exp(log_decay)
        self.frequency = nn.Parameter(frequency)
        # The public code draws a real B and a complex C, each number of variance 1 / state (jax's lecun_normal takes
        # the state for the inputs of both). It transforms them to the basis of the eigenvectors and retains one of each
        # pair. That basis is unitary, so the result is complex normal.
        b = torch.randn(pairs, size.width, dtype=torch.complex64) / math.sqrt(settings.state_size)
        c = torch.randn(size.width, pairs, dtype=torch.complex64) * math.sqrt(2 / settings.state_size)
        self.b, self.c = (nn.Parameter(torch.view_as_real(each)) for each in (b, c))
        learn_slowly(self.log_dt, self.log_decay, self.frequency, self.b)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the parameters in the order of `build_system`."""
        return self.log_dt, self.log_decay, self.frequency, self.b, self.c


def build_system(
    log_dt: Tensor, log_decay: Tensor, frequency: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Abar, Bbar and C of one layer, or of several stacked on a first axis.

        x_t = Abar x_{t-1} + u Bbar,  y = x C

    Abar (M, 2) is diagonal; Bbar (D, N) and C (N, D) act on rows of numbers. Discretized by zero-order hold, in
    float64.

    Source: Equation 6 of the S5 paper.
    """
    dtype = wide(c.dtype)
    dt, decay, frequency, b, c = (each.double() for each in (log_dt, log_decay, frequency, b, c))
    poles = torch.complex(-decay.exp(), frequency)
    diagonal = (dt.exp() * poles).exp()
    into = ((diagonal - 1) / poles)[..., None] * torch.view_as_complex(b)
    parts = (
        torch.view_as_real(diagonal),
        torch.view_as_real(into.mT.contiguous()).flatten(-2),
        kernels.output_numbers(torch.view_as_complex(c)).mT,
    )
    return tuple(part.to(dtype) for part in parts)  # type: ignore[return-value]


class JointSystems(kernels.Systems):
    """One system per layer, with states (B, N)."""

    def convolve(self, layer: int, u: Tensor, resets: kernels.Resets | None = None) -> Tensor:
        return self._run(layer, u, None, resets)[0]

    def step(self, layer: int, u: Tensor, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        diagonal, into, output = self._operators(layer)
        with torch.autocast(u.device.type, enabled=False):
            b = _pairs(u.to(into.dtype) @ into)
            state = diagonal_scan_step(diagonal, b, _pairs(state), reset).flatten(-2)
            return state @ output, state

    def run(self, layer: int, u: Tensor, state: Tensor, resets: kernels.Resets | None = None) -> tuple[Tensor, Tensor]:
        return self._run(layer, u, state, resets)

    def _run(self, layer: int, u: Tensor, state: Tensor | None, resets: kernels.Resets | None) -> tuple[Tensor, Tensor]:
        diagonal, into, output = self._operators(layer)
        with torch.autocast(u.device.type, enabled=False):
            b = _pairs(u.to(into.dtype) @ into)
            before = None if state is None else _pairs(state)
            states, last = diagonal_scan(diagonal, b, before, None if resets is None else resets.reset)
            return states.flatten(-2) @ output, last.flatten(-2)

    def fork(self, layer: int, u: Tensor, block: int, state: Tensor) -> tuple[Tensor, Tensor]:
        blocks = u.shape[1]
        diagonal, into, output = self._operators(layer)
        with torch.autocast(u.device.type, enabled=False):
            b = _pairs(u.to(into.dtype) @ into)  # (B, J, L + Q, M, 2)
            states, last = diagonal_scan(diagonal, b[:, :, :block].flatten(1, 2), _pairs(state))
            states = states.unflatten(1, (blocks, block))
            # The queries of all blocks in one batch, each from the state at its block's end.
            answers, _ = diagonal_scan(diagonal, b[:, :, block:].flatten(0, 1), states[:, :, -1].flatten(0, 1))
            states = torch.cat((states, answers.unflatten(0, (-1, blocks))), 2)
            return states.flatten(-2) @ output, last.flatten(-2)

    def _operators(self, layer: int) -> tuple[Tensor, ...]:
        return self._prepared("operators", _operators)[layer]


def _operators(*parts: Any, length: int) -> tuple[Tensor, ...]:
    return parts


def _pairs(x: Tensor) -> Tensor:
    """Return N numbers (..., N) as M complex ones (..., M, 2)."""
    return x.unflatten(-1, (-1, 2))
