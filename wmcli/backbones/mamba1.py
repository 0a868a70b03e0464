"""Mamba (Gu and Dao 2023, arXiv 2312.00752) as Drama's ablation trains it (Wang et al. 2024, arXiv 2410.08893).

One block projects an element to a gate and to channels, convolves the channels over the last few elements, and scans
them. The scan has a state of S numbers per channel. Its decay, input and output depend on the data. There are no
positional embeddings.

Axes: B batch, T time (elements), D width, C channels (= expand D), S numbers of a channel's state, R rank of the step
sizes, W taps, N blocks, L elements of a block, Q queries; ... is B, or B T, or B N (L + Q).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import BackboneSettings, BackboneSize
from wmcli.backbones.residual import MambaState, Mixer, ResidualStack, draw_step_bias
from wmcli.kernels.causal_conv import causal_conv, causal_conv_fork, causal_conv_step
from wmcli.kernels.selective_scan import selective_scan, selective_scan_fork, selective_scan_step


class Mamba1Settings(BackboneSettings):
    """Settings of the Mamba-1 backbone."""

    kind: Literal["mamba1"] = "mamba1"
    """Mamba-1: a selective scan (Drama's ablation)."""
    state_size: int = Field(default=16, ge=1)
    """State size of one channel. [numbers]"""
    expand: int = Field(default=2, ge=1)
    """Channels of the scan. [backbone widths]"""
    conv_kernel: int = Field(default=4, ge=2)
    """Kernel size of the causal convolution, the newest element included. [elements]"""
    dt_rank: int = Field(default=0, ge=0)
    """Rank of the map from channels to step sizes; 0 is a sixteenth of the backbone's width, rounded up."""


class Mamba1(ResidualStack):
    """Mamba-1 whose state is a tuple with one `MambaState` per layer. Old states always stay valid."""

    def __init__(self, settings: Mamba1Settings, size: BackboneSize) -> None:
        super().__init__(size, lambda: Mamba1Mixer(settings, size))


class Mamba1Mixer(Mixer):
    """One Mamba-1 block without its norm and residual."""

    def __init__(self, settings: Mamba1Settings, size: BackboneSize) -> None:
        super().__init__()
        channels = settings.expand * size.width
        rank = settings.dt_rank or math.ceil(size.width / 16)
        self.parts = (rank, settings.state_size, settings.state_size)
        self.in_proj = nn.Linear(size.width, 2 * channels, bias=False)  # channels, then their gate
        self.conv = nn.Conv1d(channels, channels, settings.conv_kernel, groups=channels)  # holds the taps, oldest first
        self.x_proj = nn.Linear(channels, sum(self.parts), bias=False)
        self.dt_proj = nn.Linear(rank, channels)
        self.a_log = nn.Parameter(torch.arange(1.0, settings.state_size + 1).log().repeat(channels, 1))
        self.a_log._no_weight_decay = True  # type: ignore[attr-defined]  # it would pull all rates to 1
        self.skip = nn.Parameter(torch.ones(channels))
        self.out_proj = nn.Linear(channels, size.width, bias=False)
        with torch.no_grad():
            self.dt_proj.weight.uniform_(-(rank**-0.5), rank**-0.5)
            self.dt_proj.bias.copy_(draw_step_bias(channels))
            self.out_proj.weight.div_(math.sqrt(size.layers))

    def initial_state(self, batch: int) -> MambaState:
        channels, state = self.a_log.shape
        past = self.conv.weight.shape[-1] - 1
        zeros = partial(self.a_log.new_zeros, dtype=torch.promote_types(self.a_log.dtype, torch.float32))
        return MambaState(zeros((batch, channels, past)), zeros((batch, channels, state)))

    def forward(self, u: Tensor, state: MambaState | None, reset: Tensor | None) -> tuple[Tensor, MambaState]:
        return self._mix(u, state, partial(causal_conv, reset=reset), partial(selective_scan, reset=reset))

    def step(self, u: Tensor, state: MambaState, reset: Tensor | None) -> tuple[Tensor, MambaState]:
        return self._mix(u, state, partial(causal_conv_step, reset=reset), partial(selective_scan_step, reset=reset))

    def fork(self, u: Tensor, block: int, state: MambaState | None) -> tuple[Tensor, MambaState]:
        return self._mix(u, state, partial(causal_conv_fork, block=block), partial(selective_scan_fork, block=block))

    def _mix(
        self,
        u: Tensor,
        state: MambaState | None,
        convolve: Callable[..., tuple[Tensor, Tensor]],
        scan: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, MambaState]:
        """Mix u (..., D) by one form of the convolution and the same form of the scan."""
        conv_state, scan_state = (None, None) if state is None else state
        x, gate = self.in_proj(u).chunk(2, -1)  # (..., C)
        x, conv_state = convolve(x, self.conv.weight[:, 0], self.conv.bias, state=conv_state)
        x = F.silu(x)
        rank, b, c = self.x_proj(x).split(self.parts, -1)  # (..., R), (..., S), (..., S)
        # A separate addition of the bias is float32 also under autocast.
        dt = F.softplus(F.linear(rank, self.dt_proj.weight) + self.dt_proj.bias)
        y, scan_state = scan(x, dt, -self.a_log.exp(), b, c, state=scan_state)
        y = (y + self.skip * x) * F.silu(gate)
        return self.out_proj(y), MambaState(conv_state, scan_state)
