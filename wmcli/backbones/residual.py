"""A pre-norm residual stack around any mixer of elements over time.

    x <- x + dropout(mixer(RMSNorm(x)))        once per layer, then a last RMSNorm

The sum x is float32 (float64 in a float64 model) also under autocast, and so is the output. This is the block stack of
Mamba (Gu and Dao 2023, arXiv 2312.00752). The state and the initial step sizes of Mamba-1 and Mamba-2 are here too.

Axes: B batch, T time (elements), D width, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wmcli.backbones.base import Backbone, BackboneSize, State, for_each_block
from wmcli.nn.dropout import dropout

NORM_EPS = 1e-5
STEP_SIZES = (1e-3, 1e-1)  # of a fresh Mamba block


class Mixer(nn.Module, ABC):
    """The mixer of a layer over time, (B, T, D) -> (B, T, D), with the state of a backbone.

    `state=None` starts fresh. Every call returns a state.
    """

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """Return the state before the first element, for `batch` rows."""

    @abstractmethod
    def forward(self, u: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Mix a sequence u (B, T, D), with reset (B, T) bool."""

    @abstractmethod
    def step(self, u: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Mix one element u (B, D), with reset (B,) bool and a state that is never None."""

    @abstractmethod
    def fork(self, u: Tensor, block: int, state: State) -> tuple[Tensor, State]:
        """Mix u (B, N, L + Q, D). Only the first `block` elements of each block enter the state."""


class ResidualStack(Backbone):
    """Residual stack whose state is a tuple with the state of each mixer. Old states always stay valid."""

    layers: Any  # nn.ModuleList of Layer

    def __init__(self, size: BackboneSize, mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.width, self.max_length, self.dropout = size.width, None, size.dropout
        self.layers = nn.ModuleList(Layer(size.width, mixer()) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, NORM_EPS)

    def initial_state(self, batch: int) -> tuple[State, ...]:
        return tuple(layer.mixer.initial_state(batch) for layer in self.layers)

    def forward(
        self, x: Tensor, state: tuple[State, ...] | None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...] | None]:
        return self._run(x, state, lambda mixer, u, old: mixer(u, old, reset))

    def step(
        self, x: Tensor, state: tuple[State, ...] | None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...] | None]:
        before = self.initial_state(len(x)) if state is None else state
        y, after = self._run(x, before, lambda mixer, u, old: mixer.step(u, old, reset))
        return y, None if state is None else after

    def fork(
        self, x: Tensor, queries: Tensor, state: tuple[State, ...] | None
    ) -> tuple[Tensor, Tensor, tuple[State, ...] | None]:
        block = x.shape[2]
        x = torch.cat((x, for_each_block(queries, x)), 2)  # (B, N, L + Q, D)
        y, state = self._run(x, state, lambda mixer, u, old: mixer.fork(u, block, old))
        return y[:, :, block - 1], y[:, :, block:], state

    def _run(
        self,
        x: Tensor,
        state: tuple[State, ...] | None,
        mix: Callable[[Mixer, Tensor, State], tuple[Tensor, State]],
    ) -> tuple[Tensor, tuple[State, ...] | None]:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        after = []
        for index, layer in enumerate(self.layers):
            y, new = mix(layer.mixer, layer.norm(x), None if state is None else state[index])
            x = x + dropout(y, self.dropout, self.training)
            after.append(new)
        return self.norm(x), None if state is None else tuple(after)


class Layer(nn.Module):
    """A mixer and the norm before it."""

    def __init__(self, width: int, mixer: Mixer) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, NORM_EPS)
        self.mixer = mixer


class MambaState(NamedTuple):
    """State of one block of Mamba-1 or Mamba-2."""

    convolution: Tensor  # (B, channels of the convolution, W - 1): its latest inputs, newest last
    scan: Tensor  # (B, C, S) in Mamba-1, (B, H, S, P) in Mamba-2


def draw_step_bias(count: int) -> Tensor:
    """Draw biases (count,) whose softplus, the step sizes, is log-uniform in `STEP_SIZES`."""
    low, high = STEP_SIZES
    step = torch.empty(count).uniform_(math.log(low), math.log(high)).exp()
    return step + (-torch.expm1(-step)).log()  # the inverse of softplus
