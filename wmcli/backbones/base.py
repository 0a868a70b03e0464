"""The contract of every backbone: a causal sequence model with an explicit state.

Axes: B batch, T time (elements), D width, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from wmcli.config import Section

State = Any
"""Nested tuples (also named), lists and dicts whose leaves are tensors, batch first; other leaves are constants."""


class BackboneSettings(Section):
    """Settings of every backbone. `--backbone` leaves them as they are."""

    kind: str
    """Kind of backbone."""
    width: int = Field(default=256, ge=1)
    """Width of the input and output. [features]"""
    layers: int = Field(default=5, ge=1)
    """Number of layers. [layers]"""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout probability."""

    @property
    def size_note(self) -> str | None:
        """A size that determines the cost more than the width does, as text; None without one."""
        return None

    @property
    def width_step(self) -> int:
        """Heads divide the width if it is a multiple of this."""
        return 1

    def resized(self, layers: int, width: int) -> Self | None:
        """Return these settings in another size, or None if the heads do not fit."""
        return self.model_copy(update={"layers": layers, "width": width})


class BackboneSize(NamedTuple):
    """Sizes that every kind of backbone is built from."""

    width: int  # D, of the input and the output
    layers: int
    dropout: float  # probability
    max_length: int  # elements that one state may hold, queries included; backbones without such a limit ignore it
    block: int  # elements of a block (one time step of the environment)


class Backbone(nn.Module, ABC):
    """A causal sequence model (B, T, D) -> (B, T, D).

    A call returns its state and stores none on the module. `state=None` starts fresh and returns no state (None), which
    saves the bookkeeping. Accumulators in a state are float32 (float64 in a float64 model), also under autocast. Each
    backbone documents its state and how long an old one stays valid. No method waits for the device.
    """

    width: int
    max_length: int | None  # elements that one state may hold, None without limit

    @property
    def inputs(self) -> int:
        """Width of elements and queries: D, unless the backbone overrides it."""
        return self.width

    def freeze(self) -> None:  # noqa: B027 (most backbones have nothing to prepare)
        """Prepare for calls with final weights. `Machine.freeze` calls it."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """Return the state before the first element, for `batch` rows."""

    @abstractmethod
    def forward(self, x: Tensor, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Process a sequence.

        Args:
            x: (B, T, D).
            state: State before the first element, or None.
            reset: (B, T) bool, clears a row's state before that element.

        Returns:
            y (B, T, D) and the state after the last element.
        """

    @abstractmethod
    def step(self, x: Tensor, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Process one element, as `forward` does up to rounding.

        Args:
            x: (B, D).
            state: State before the element, or None.
            reset: (B,) bool, clears a row's state before the element.

        Returns:
            y (B, D) and the new state.
        """

    def read(self, x: Tensor, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Process a sequence as `forward` does, but return only the last output (B, D) and the state.

        A backbone may skip the other outputs in its last layer.
        """
        y, state = self.forward(x, state, reset)
        return y[:, -1], state

    @abstractmethod
    def fork(self, x: Tensor, queries: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Process N blocks and answer queries after each one.

        A block's queries are answered as if they followed it, causally among themselves. They do not enter the state.
        Outputs at the other elements of a block are omitted, so that the last layer may skip them.

        Args:
            x: (B, N, L, D).
            queries: (Q, D), the same after each block, or (B, N, Q, D).
            state: State before the first block, or None.

        Returns:
            y (B, N, D), which equals `forward` at each block's last element, the answers (B, N, Q, D), and the state
            after the last block.

        Source: Parallel Observation Prediction, REM (Cohen et al. 2024, arXiv 2402.05643).
        """

    def replace_rows(self, state: State, rows: Tensor, fresh: State) -> State:
        """Return `state` with its `rows` (k,) int64 replaced by the k rows of `fresh`, for inference.

        Rows may have different lengths. Counts on the host stay upper bounds.
        """
        return replace_rows(state, rows, fresh)


def for_each_block(queries: Tensor, x: Tensor) -> Tensor:
    """Return queries (Q, D) or (B, N, Q, D) as (B, N, Q, D), in the dtype of x (B, N, L, D)."""
    return queries.to(x.dtype).expand(*x.shape[:2], *queries.shape[-2:])


def cache_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of projections by `weight`: that of autocast, if it is on, for float32 weights.

    A cache of keys and values needs no more, because nothing is added to its entries.
    """
    device = weight.device.type
    low = weight.dtype == torch.float32 and device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if low else weight.dtype


def flat_state(state: State) -> Tensor | None:
    """Return a state as one vector per row, (B, M).

    None for states that contain integers, as caches do: they count elements or store positions.
    """
    tensors = state_tensors(state)
    if not all(tensor.is_floating_point() for tensor in tensors):
        return None
    return torch.cat([tensor.flatten(1) for tensor in tensors], 1)


def state_tensors(state: State) -> list[Tensor]:
    """Return the tensors of a state, in the order of `map_state`."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_state(collect, state)
    return tensors


def with_tensors(state: State, tensors: Iterable[Tensor]) -> State:
    """Return a tree like `state` with other tensors, in the order of `state_tensors`."""
    remaining = iter(tensors)
    return map_state(lambda _: next(remaining), state)


def replace_rows(state: State, rows: Tensor, fresh: State) -> State:
    """Return `state` with its `rows` (k,) int64 replaced by the k rows of `fresh`, a state of the same form.

    Constants are those of `state`.
    """
    pairs = zip(state_tensors(state), state_tensors(fresh), strict=True)
    return with_tensors(state, [old.index_copy(0, rows, new.to(old.dtype)) for old, new in pairs])


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `function` to every tensor of a state, for example `map_state(torch.Tensor.detach, state)`.

    Other leaves stay as they are.
    """
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: map_state(function, value) for key, value in state.items()}
    if isinstance(state, tuple | list):
        values = [map_state(function, value) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    return state
