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
    """Settings that every backbone has. They stay where `--backbone` chooses another one."""

    kind: str
    """Which backbone."""
    width: int = Field(default=256, ge=1)
    """Width of an element, of input and output."""
    layers: int = Field(default=5, ge=1)
    """Number of layers."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Probability, wherever the backbone has dropout."""

    @property
    def size_note(self) -> str | None:
        """A size that says more about the cost than the width, in words; None if there is none."""
        return None

    @property
    def width_step(self) -> int:
        """Heads divide the width if it is a multiple of this."""
        return 1

    def resized(self, layers: int, width: int) -> Self | None:
        """Return these settings in another size, or None if the heads do not fit."""
        return self.model_copy(update={"layers": layers, "width": width})


class Size(NamedTuple):
    """What every backbone is built for, whatever its kind."""

    width: int  # D, of the input and the output
    layers: int
    dropout: float  # probability
    max_length: int  # elements that one state may hold, queries included; backbones without such a limit ignore it
    block: int  # elements of a block (one time step of the environment)


class Backbone(nn.Module, ABC):
    """A causal sequence model (B, T, D) -> (B, T, D).

    A state is returned, never kept on the module. `state=None` means: start fresh, and give no state back (None), which
    spares the bookkeeping. What a state accumulates is float32 (float64 in a float64 model), also under autocast. What
    a state holds and how long an old one stays valid stands with each backbone. Nothing here waits for the device.
    """

    width: int
    max_length: int | None  # elements that one state may hold, None without limit

    @property
    def inputs(self) -> int:
        """Width of what goes in, elements and queries: that of what comes out, D, unless a backbone says otherwise."""
        return self.width

    def freeze(self) -> None:  # noqa: B027 (most backbones have nothing to prepare)
        """Prepare for calls with weights that will not change any more. `Machine.freeze` calls it."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state before the first element, for `batch` rows."""

    @abstractmethod
    def forward(self, x: Tensor, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """All of x (B, T, D) at once. reset (B, T) bool clears a row's state before that element.

        Returns y (B, T, D) and the state after the last element.
        """

    @abstractmethod
    def step(self, x: Tensor, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """One element x (B, D), reset (B,) bool; equals `forward` to rounding. Returns y (B, D) and the new state."""

    def read(self, x: Tensor, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """As `forward`, but of the outputs the last alone, (B, D): a backbone may spare the last layer the others."""
        y, state = self.forward(x, state, reset)
        return y[:, -1], state

    @abstractmethod
    def fork(self, x: Tensor, queries: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Parallel Observation Prediction (REM: Cohen et al. 2024, arXiv 2402.05643), for any backbone.

        x (B, N, L, D) is N blocks of L elements; queries is (Q, D), the same everywhere, or (B, N, Q, D). After each
        block its queries are answered as if they stood next, causal among themselves, and leave no trace in the state.
        Returns y (B, N, D), which equals `forward` at each block's last element, the answers (B, N, Q, D), and the
        state after the last block. The outputs at a block's other elements are left out: nobody needs them, and a
        backbone may spare the last layer their computation.
        """

    def replace_rows(self, state: State, rows: Tensor, fresh: State) -> State:
        """Return `state` with its `rows` (k,) int64 replaced by the k rows of `fresh`, for inference.

        Rows may have read different numbers of elements. What a backbone counts on the host stays an upper bound.
        """
        return replace_rows(state, rows, fresh)


def for_each_block(queries: Tensor, x: Tensor) -> Tensor:
    """Queries (Q, D) or (B, N, Q, D) as (B, N, Q, D), in the dtype of x (B, N, L, D)."""
    return queries.to(x.dtype).expand(*x.shape[:2], *queries.shape[-2:])


def cache_dtype(weight: Tensor) -> torch.dtype:
    """The precision that projections with this weight come in: that of autocast, if it is on, for float32 weights.

    For a cache of keys and values, which are kept and never added to, so that nothing is lost.
    """
    device = weight.device.type
    low = weight.dtype == torch.float32 and device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if low else weight.dtype


def flat_state(state: State) -> Tensor | None:
    """All that a state holds as one vector a row, (B, M); None where that is no fixed set of numbers, because it counts
    elements or knows their places, as caches do."""
    tensors = state_tensors(state)
    if not all(tensor.is_floating_point() for tensor in tensors):
        return None
    return torch.cat([tensor.flatten(1) for tensor in tensors], 1)


def state_tensors(state: State) -> list[Tensor]:
    """Return the tensors of a state, in the order of `map_state`."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_state(keep, state)
    return tensors


def with_tensors(state: State, tensors: Iterable[Tensor]) -> State:
    """Return a tree like `state` that holds these tensors, in the order of `state_tensors`."""
    left = iter(tensors)
    return map_state(lambda _: next(left), state)


def replace_rows(state: State, rows: Tensor, fresh: State) -> State:
    """Return `state` with its `rows` (k,) int64 replaced by the k rows of `fresh`, a state of the same form.

    Constants are those of `state`.
    """
    pairs = zip(state_tensors(state), state_tensors(fresh), strict=True)
    return with_tensors(state, [old.index_copy(0, rows, new.to(old.dtype)) for old, new in pairs])


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """`function` on every tensor of a state, for example `map_state(torch.Tensor.detach, state)`; the rest is kept."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: map_state(function, value) for key, value in state.items()}
    if isinstance(state, tuple | list):
        values = [map_state(function, value) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    return state
