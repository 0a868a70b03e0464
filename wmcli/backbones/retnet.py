"""RetNet (Sun et al. 2023, arXiv 2307.08621) as REM trains it (Cohen et al. 2024, arXiv 2402.05643).

It has the differences of REM's public code (leor-c/REM on fkodom/yet-another-retnet) from Sun et al.: log-spaced
decays, rotation without a length scale and SiLU instead of GELU. The only normalizer is the GroupNorm per token. There
is no final LayerNorm.

Positions. Queries and keys are rotated by their position, and only differences of positions matter. A state is stored
relative to the next element, at position 0. A call with n elements rotates the state back by n and gives its elements
the positions -n ... -1. So a state carries no position, rows of different age share a batch, and `reset` needs no
bookkeeping. The results equal those of absolute positions.

Axes: B batch, T time (elements), D width, H heads, K width of a head (= D / H), N blocks, L elements of a block, Q
queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, BackboneSettings, BackboneSize, for_each_block
from wmcli.errors import UsageError
from wmcli.kernels.linear_recurrence import linear_recurrence, linear_recurrence_fork, linear_recurrence_step
from wmcli.nn.dropout import dropout
from wmcli.transfer import to_device

NORM_EPS = 1e-6
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


class RetNetSettings(BackboneSettings):
    """Settings of the RetNet backbone."""

    kind: Literal["retnet"] = "retnet"
    """Retention with a fixed decay in each head (REM)."""
    heads: int = Field(default=4, ge=1)
    """Retention heads, each with its own decay. [heads]"""
    ffn: int = Field(default=4, ge=1)
    """Width of the feed-forward layer. [backbone widths]"""
    activation: Literal["silu", "gelu"] = "silu"
    """Activation of the feed-forward layer. REM's scores come from silu; its paper says gelu."""
    decay: Literal["log", "paper"] = "log"
    """Decays per element: log-spaced 1 - 1/32 ... 1 - 1/512 (REM's scores), or 1 - 2^(-5-head) (its paper)."""
    decay_range_blocks: list[float] = []
    """Shortest and longest half-life, with heads log-spaced between; empty uses `decay`. [blocks]"""
    chunk_size: int = Field(default=128, ge=1)
    """Chunk length inside a long sequence: affects speed, not results. [elements]"""
    copied_layers: bool = False
    """Initialize all layers with the weights of the first, as in REM's public code but not in its paper."""

    @property
    def width_step(self) -> int:
        return 2 * self.heads


class RetNet(Backbone):
    """RetNet whose state is a tuple with one (B, H, K, K) tensor per layer, key axis first.

    Old states always stay valid.
    """

    layers: Any  # nn.ModuleList of RetNetLayer

    def __init__(self, settings: RetNetSettings, size: BackboneSize) -> None:
        super().__init__()
        if size.width % (2 * settings.heads):
            raise UsageError(
                f"backbone.heads = {settings.heads}: must divide backbone.width = {size.width} into even widths."
            )
        self.width, self.max_length = size.width, None
        self.heads, self.head_width, self.chunk = settings.heads, size.width // settings.heads, settings.chunk_size
        self.decays = head_decays(settings, size.block)
        self.layers = nn.ModuleList(RetNetLayer(settings, size) for _ in range(size.layers))
        if settings.copied_layers:
            for layer in self.layers:
                layer.load_state_dict(self.layers[0].state_dict())

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        weight = self.layers[0].qkvg.weight
        shape = (batch, self.heads, self.head_width, self.head_width)
        dtype = _wide(weight.dtype)
        return tuple(torch.zeros(shape, device=weight.device, dtype=dtype) for _ in self.layers)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        rotations, log_decay = self._rotations(x), self._log_decay(x)
        rotation = rotations.between(-x.shape[1], 0)
        after = []
        for index, layer in enumerate(self.layers):
            q, k, v, gate = layer.project(x, rotation)
            before = None if state is None else rotations.turn_back(state[index], x.shape[1])
            y, new = linear_recurrence(q, k, v, log_decay, before, reset, self.chunk)
            x = layer.finish(x, y, gate)
            after.append(new)
        return x, None if state is None else tuple(after)

    def step(
        self, x: Tensor, state: tuple[Tensor, ...] | None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        rotations, log_decay = self._rotations(x[:, None]), self._log_decay(x)
        rotation = rotations.between(-1, 0)
        after = []
        x = x[:, None]  # (B, 1, D)
        for layer, old in zip(self.layers, self.initial_state(len(x)) if state is None else state, strict=True):
            q, k, v, gate = layer.project(x, rotation)
            before = rotations.turn_back(old, 1)
            y, new = linear_recurrence_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], log_decay, before, reset)
            x = layer.finish(x, y[:, :, None], gate)
            after.append(new)
        return x[:, 0], None if state is None else tuple(after)

    def fork(
        self, x: Tensor, queries: Tensor, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...] | None]:
        blocks, block = x.shape[1:3]
        x = torch.cat((x, for_each_block(queries, x)), 2)  # (B, N, L + Q, D)
        shape = x.shape[1:3]
        rotations, log_decay = self._rotations(x), self._log_decay(x)
        rotation = torch.cat([rotations.between(-n * block, shape[1] - n * block) for n in range(blocks, 0, -1)], -2)
        after = []
        x = x.flatten(1, 2)  # (B, N (L + Q), D)
        for index, layer in enumerate(self.layers):
            q, k, v, gate = layer.project(x, rotation)
            before = None if state is None else rotations.turn_back(state[index], blocks * block)
            q, k, v = (part.unflatten(2, shape) for part in (q, k, v))  # (B, H, N, L + Q, K)
            y, new = linear_recurrence_fork(q, k, v, log_decay, block, before)
            after.append(new)
            if layer is self.layers[-1]:  # only each block's last element and its queries are needed
                x, gate = (part.unflatten(1, shape)[:, :, block - 1 :].flatten(1, 2) for part in (x, gate))
                y = y[:, :, :, block - 1 :]
            x = layer.finish(x, y.flatten(2, 3), gate)
        x = x.unflatten(1, (blocks, -1))
        return x[:, :, 0], x[:, :, 1:], None if state is None else tuple(after)

    def _rotations(self, x: Tensor) -> Rotations:
        return rotations(self.head_width, math.prod(x.shape[1:-1]), x.device, _wide(x.dtype))

    def _log_decay(self, x: Tensor) -> Tensor:
        return _constant(tuple(math.log(decay) for decay in self.decays), x.device, _wide(x.dtype))


class RetNetLayer(nn.Module):
    """Multi-scale retention and a feed-forward layer, each with a LayerNorm before it and a residual."""

    def __init__(self, settings: RetNetSettings, size: BackboneSize) -> None:
        super().__init__()
        width, hidden = size.width, settings.ffn * size.width
        self.heads, self.dropout = settings.heads, size.dropout
        self.activation = ACTIVATIONS[settings.activation]
        self.retention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.qkvg = nn.Linear(width, 4 * width)  # query, key, value and gate in one product
        self.out = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        with torch.no_grad():
            for weight in (*self.qkvg.weight.chunk(4), self.out.weight, self.up.weight, self.down.weight):
                nn.init.xavier_normal_(weight)
            for linear in (self.qkvg, self.out, self.up, self.down):
                nn.init.zeros_(linear.bias)

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rotated q and k, and v, each (B, H, T, K), and the gate (B, T, D).

        x is (B, T, D) and rotation (2, 1, 1, T, K / 2).
        """
        qk, v, gate = self.qkvg(self.retention_norm(x)).split((2 * self.width, self.width, self.width), -1)
        # Copying is cheapest before the conversion to float32.
        qk = qk.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).contiguous()  # (2, B, H, T, K)
        qk = torch.view_as_complex(qk.to(_wide(qk.dtype)).unflatten(-1, (-1, 2))) * rotation
        q, k = torch.view_as_real(qk).flatten(-2).to(v.dtype).unbind()
        return q, k, v.unflatten(-1, (self.heads, -1)).transpose(1, 2), gate

    def finish(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        """Apply norm, gate, projection and feed-forward layer to x (B, T, D) and its retention y (B, H, T, K)."""
        y = self._drop(y.transpose(1, 2))  # (B, T, H, K)
        # A GroupNorm of H groups without affine parameters, separately on each token.
        y = F.layer_norm(y, y.shape[-1:], eps=NORM_EPS).flatten(2)
        x = x + self._drop(self.out(F.silu(gate) * y))
        hidden = self._drop(self.activation(self.up(self.ffn_norm(x))))
        return x + self._drop(self.down(hidden))

    @property
    def width(self) -> int:
        return self.out.in_features

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


# -- decays and rotations ----------------------------------------------------------------------------------------------


def head_decays(settings: RetNetSettings, block: int) -> tuple[float, ...]:
    """Return each head's decay of the state per element, the fastest first.

    Args:
        settings: Settings of the backbone.
        block: Elements of a block.

    Raises:
        UsageError: `decay_range_blocks` is neither empty nor two ascending positive numbers.
    """
    heads = settings.heads
    bounds = settings.decay_range_blocks
    if bounds:
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
            raise UsageError(
                f"backbone.decay_range_blocks = {bounds}: must be two ascending half-lives in blocks, as [0.25, 8]."
            )
        return tuple(0.5 ** (1 / (block * half_life)) for half_life in _log_spaced(bounds[0], bounds[1], heads))
    if settings.decay == "paper":
        return tuple(1 - 2.0 ** (-5 - head) for head in range(heads))
    return tuple(1 - share for share in _log_spaced(1 / 32, 1 / 512, heads))


class Rotations:
    """Factors exp(i n theta_j), theta_j = 10000^(-j / (K / 2 - 1)), for the interleaved pairs (2j, 2j + 1)."""

    def __init__(self, head_width: int, reach: int, device: torch.device, dtype: torch.dtype) -> None:
        self.reach = reach
        pairs = head_width // 2
        # Angles in float64: in lower precision their error far exceeds the rounding of the rotated values.
        theta = 10000.0 ** -torch.linspace(0, 1, pairs, dtype=torch.float64, device=device)
        angle = torch.arange(-reach, reach + 1, dtype=torch.float64, device=device)[:, None] * theta
        unit = torch.polar(torch.ones_like(angle), angle)  # (positions, K / 2)
        # One table rotates queries and keys together and scales keys by 1 / sqrt(K).
        complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        self.table = torch.stack((unit, unit * head_width**-0.5))[:, None, None].to(complex_dtype)
        # A state is rotated along its key axis, in adjacent pairs: cos * S + sin * (S with the pairs swapped).
        self.cos = angle.cos().repeat_interleave(2, 1)[..., None].to(dtype)  # (positions, K, 1)
        self.sin = torch.stack((-angle.sin(), angle.sin()), 2).flatten(1)[..., None].to(dtype)

    def between(self, start: int, stop: int) -> Tensor:
        """Return factors for queries and keys at positions start ... stop - 1: (2, 1, 1, stop - start, K / 2)."""
        assert -self.reach <= start <= stop <= self.reach + 1
        return self.table[..., start + self.reach : stop + self.reach, :]

    def turn_back(self, state: Tensor, count: int) -> Tensor:
        """Return the state (B, H, K, V) relative to a position `count` elements later."""
        swapped = state.unflatten(2, (-1, 2)).flip(3).flatten(2, 3)
        index = self.reach - count
        return torch.addcmul(state * self.cos[index], swapped, self.sin[index])


def rotations(head_width: int, reach: int, device: torch.device, dtype: torch.dtype) -> Rotations:
    """Return the table for positions up to +-reach, from a cache with one table per power of two."""
    return _rotations(head_width, 1 << (reach - 1).bit_length(), device, dtype)


@functools.cache
def _rotations(head_width: int, reach: int, device: torch.device, dtype: torch.dtype) -> Rotations:
    with torch.inference_mode(False), torch.no_grad():  # the cached table must not depend on the first caller's mode
        return Rotations(head_width, reach, device, dtype)


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return to_device(torch.tensor(values, dtype=dtype), device)


def _log_spaced(first: float, last: float, count: int) -> list[float]:
    return [first * (last / first) ** (i / max(count - 1, 1)) for i in range(count)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, decays and positions for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
