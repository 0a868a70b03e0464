"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), the backbone of Drama (Wang et al. 2024, arXiv 2410.08893).

Differences from Mamba-1: The channels form heads with one decay each, so a sequence is computed in chunks as products
of matrices. Input and output weights come from the first projection and are convolved too, one group of them for all
heads. A norm follows the gate. There are no positional embeddings.

Axes: B batch, T time (elements), D width, C channels (= expand D), H heads, P channels of a head, S numbers of a
channel's state, W taps, N blocks, L elements of a block, Q queries; ... is nothing, or T, or N (L + Q).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import BackboneSettings, BackboneSize
from wmcli.backbones.residual import NORM_EPS, MambaState, Mixer, ResidualStack, draw_step_bias
from wmcli.errors import UsageError
from wmcli.kernels.causal_conv import causal_conv, causal_conv_fork, causal_conv_step
from wmcli.kernels.linear_recurrence import linear_recurrence, linear_recurrence_fork, linear_recurrence_step

DECAY_RATES = (1.0, 16.0)  # range of -A at initialization


class Mamba2Settings(BackboneSettings):
    """Settings of the Mamba-2 backbone."""

    kind: Literal["mamba2"] = "mamba2"
    """Mamba-2: a selective state space with scalar decays (Drama)."""
    state_size: int = Field(default=16, ge=1)
    """State size of one channel. [numbers]"""
    expand: int = Field(default=2, ge=1)
    """Channels of the recurrence. [backbone widths]"""
    head_width: int = Field(default=64, ge=1)
    """Channels of a head, which share their decay. Drama's public code has 64, its paper says 128. [channels]"""
    conv_kernel: int = Field(default=4, ge=2)
    """Kernel size of the causal convolution, the newest element included. [elements]"""
    chunk_size: int = Field(default=64, ge=1)
    """Chunk length inside a long sequence: affects speed, not results. [elements]"""

    @property
    def size_note(self) -> str:
        return f"heads of {self.head_width}"

    def resized(self, layers: int, width: int) -> Self | None:
        """Return these settings in another size, with the widest heads that divide it, or None below half of theirs."""
        head_width = max(each for each in range(1, self.head_width + 1) if self.expand * width % each == 0)
        if 2 * head_width < self.head_width:
            return None
        return self.model_copy(update={"layers": layers, "width": width, "head_width": head_width})


class Mamba2(ResidualStack):
    """Mamba-2 whose state is a tuple with one `MambaState` per layer. Old states always stay valid."""

    def __init__(self, settings: Mamba2Settings, size: BackboneSize) -> None:
        if settings.expand * size.width % settings.head_width:
            raise UsageError(
                f"backbone.head_width = {settings.head_width}: must divide backbone.expand * "
                f"backbone.width = {settings.expand} * {size.width}."
            )
        super().__init__(size, lambda: Mamba2Mixer(settings, size))


class Mamba2Mixer(Mixer):
    """One Mamba-2 block without its norm and residual."""

    def __init__(self, settings: Mamba2Settings, size: BackboneSize) -> None:
        super().__init__()
        channels, state = settings.expand * size.width, settings.state_size
        heads, mixed = channels // settings.head_width, channels + 2 * state
        self.chunk = settings.chunk_size
        self.head_width, self.state = settings.head_width, state
        self.in_proj = nn.Linear(
            size.width, channels + mixed + heads, bias=False
        )  # gate, input of the convolution, step sizes
        self.conv = nn.Conv1d(mixed, mixed, settings.conv_kernel, groups=mixed)  # holds the taps, oldest first
        self.dt_bias = nn.Parameter(draw_step_bias(heads))
        self.a_log = nn.Parameter(torch.empty(heads).uniform_(*DECAY_RATES).log())
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(channels, NORM_EPS)
        self.out_proj = nn.Linear(channels, size.width, bias=False)
        with torch.no_grad():
            self.out_proj.weight.div_(math.sqrt(size.layers))

    def initial_state(self, batch: int) -> MambaState:
        mixed, _, taps = self.conv.weight.shape
        zeros = partial(self.a_log.new_zeros, dtype=torch.promote_types(self.a_log.dtype, torch.float32))
        scan_state = (batch, len(self.a_log), self.state, self.head_width)
        return MambaState(zeros((batch, mixed, taps - 1)), zeros(scan_state))

    def forward(self, u: Tensor, state: MambaState | None, reset: Tensor | None) -> tuple[Tensor, MambaState]:
        recur = partial(linear_recurrence, reset=reset, chunk=self.chunk)
        return self._mix(u, state, partial(causal_conv, reset=reset), recur)

    def step(self, u: Tensor, state: MambaState, reset: Tensor | None) -> tuple[Tensor, MambaState]:
        return self._mix(u, state, partial(causal_conv_step, reset=reset), partial(linear_recurrence_step, reset=reset))

    def fork(self, u: Tensor, block: int, state: MambaState | None) -> tuple[Tensor, MambaState]:
        return self._mix(u, state, partial(causal_conv_fork, block=block), partial(linear_recurrence_fork, block=block))

    def _mix(
        self,
        u: Tensor,
        state: MambaState | None,
        convolve: Callable[..., tuple[Tensor, Tensor]],
        recur: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, MambaState]:
        """Mix u (B, ..., D) by one form of the convolution and the same form of the recurrence."""
        conv_state, scan_state = (None, None) if state is None else state
        channels, heads = self.out_proj.in_features, len(self.a_log)
        gate, mixed, dt = self.in_proj(u).split((channels, channels + 2 * self.state, heads), -1)
        mixed, conv_state = convolve(mixed, self.conv.weight[:, 0], self.conv.bias, state=conv_state)
        x, b, c = F.silu(mixed).split((channels, self.state, self.state), -1)
        x = x.unflatten(-1, (heads, self.head_width))  # (B, ..., H, P)
        # Step sizes and decays are float32 also under autocast, because the parameters are.
        dt = F.softplus(dt + self.dt_bias)  # (B, ..., H)
        v, log_decay = (dt[..., None] * x).to(x.dtype), -dt * self.a_log.exp()
        # The recurrence has heads after the batch: b and c (B, 1, ..., S), v (B, H, ..., P), log_decay (B, H, ...).
        v, log_decay = v.movedim(-2, 1), log_decay.movedim(-1, 1)
        y, scan_state = recur(c[:, None], b[:, None], v, log_decay, state=scan_state)
        y = (y.movedim(1, -2) + self.skip[:, None] * x).flatten(-2)  # (B, ..., C)
        return self.out_proj(self.norm(y * F.silu(gate))), MambaState(conv_state, scan_state)
