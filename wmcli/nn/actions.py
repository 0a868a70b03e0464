"""Actions and observations as tensors, on any space (`wmcli.spaces`).

Axes: A length of an encoded action, K numbers of a `Categories` action, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wmcli.nn.categorical import one_hot
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete, ObservationSpace, PartSpace, Vector, map_parts
from wmcli.transfer import to_device

NUMBER_TYPES = {np.uint8: torch.uint8, np.float32: torch.float32, np.int32: torch.int64}
"""Number types of tensors by those of the spaces on disk."""


def encode_action(space: ActionSpace, action: Tensor, dtype: torch.dtype) -> Tensor:
    """Return actions (..., *space.shape) as vectors (..., A): one-hot, several one-hot vectors, or the numbers.

    Numbers outside of [-1, 1] act like the nearest bound, as in the environment.
    """
    if isinstance(space, Continuous):
        return action.clamp(-1, 1).to(dtype)
    if isinstance(space, Discrete):
        return one_hot(action, space.count, dtype)
    return torch.cat(
        [one_hot(each, size, dtype) for each, size in zip(action.unbind(-1), space.sizes, strict=True)], -1
    )


def no_action(space: ActionSpace, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Return zeros (*shape, *space.shape) in the dtype of actions."""
    dtype = torch.float32 if isinstance(space, Continuous) else torch.int64
    return torch.zeros(*shape, *space.shape, dtype=dtype, device=device)


def no_observation(space: ObservationSpace, shape: Sequence[int], device: torch.device | str | None = None) -> Any:
    """Return an observation of zeros, a tree of (*shape, *part)."""

    def zeros(part: PartSpace) -> Tensor:
        return torch.zeros(*shape, *part.shape, dtype=NUMBER_TYPES[part.dtype], device=device)

    return map_parts(zeros, space)


def random_observation(space: ObservationSpace, shape: Sequence[int], device: torch.device | str | None = None) -> Any:
    """Draw random observations, a tree of (*shape, *part)."""

    def draw(part: PartSpace) -> Tensor:
        if isinstance(part, Vector):
            return torch.randn(*shape, *part.shape, device=device)
        if isinstance(part, Categories):
            return random_actions(part, shape, device=device)
        return torch.randint(0, 256, (*shape, *part.shape), dtype=torch.uint8, device=device)

    return map_parts(draw, space)


def put_observation(observation: Any, device: torch.device | str | None) -> Any:
    """Return an observation, a tree of arrays or tensors, on a device; integers of any type as int64."""

    def put(part: Any) -> Tensor:
        tensor = torch.as_tensor(part)
        if tensor.dtype in (torch.int32, torch.int16):
            tensor = tensor.long()
        return to_device(tensor, torch.device(device or "cpu"))

    return map_parts(put, observation)


def random_actions(
    space: ActionSpace,
    shape: Sequence[int],
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw uniformly random actions (*shape, *space.shape)."""
    if isinstance(space, Discrete):
        return torch.randint(space.count, tuple(shape), generator=generator, device=device)
    if isinstance(space, Continuous):
        return torch.rand((*shape, *space.shape), generator=generator, device=device) * 2 - 1
    each = [torch.randint(size, tuple(shape), generator=generator, device=device) for size in space.sizes]
    return torch.stack(each, -1)


def where_rows(condition: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """Return the rows of `chosen` where `condition` (...) is True, else of `other`, both (..., *axes)."""
    return torch.where(condition.view(*condition.shape, *[1] * (chosen.ndim - condition.ndim)), chosen, other)


def action_embedding(space: ActionSpace, width: int) -> nn.Embedding | CategoriesEmbedding | nn.Linear:
    """Build the map of actions (..., *space.shape) to (..., D) = `width`.

    It is a table for `Discrete`, the sum over a table for each number of `Categories`, and linear for `Continuous`.
    """
    if isinstance(space, Discrete):
        return nn.Embedding(space.count, width)
    if isinstance(space, Continuous):
        return _ContinuousEmbedding(len(space.low), width)
    return CategoriesEmbedding(space.sizes, width)


class CategoriesEmbedding(nn.Embedding):
    """Sum of the vectors of K categories, each from its own rows of one table."""

    offset: Tensor

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__(sum(sizes), width)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.register_buffer("offset", torch.tensor(starts), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Embed categories (..., K) as (..., D)."""
        return super().forward(input + self.offset).sum(-2)


class _ContinuousEmbedding(nn.Linear):
    """Linear in the numbers, which act like the nearest bound outside of [-1, 1]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.clamp(-1, 1).to(self.weight.dtype))
