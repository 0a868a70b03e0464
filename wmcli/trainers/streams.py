"""State carried from batch to batch: truncated backpropagation through time over streams of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from wmcli import ranks
from wmcli.backbones.base import state_tensors, with_tensors
from wmcli.transfer import to_device
from wmcli.world_models.base import Batch, WorldModel


class StreamState:
    """The state at the beginning of the next chunk of each stream. A checkpoint holds it (`Resumable`)."""

    def __init__(self, world_model: WorldModel, streams: int) -> None:
        self._world_model = world_model
        self._carry = world_model.initial_carry(streams)
        self.tensors = state_tensors(self._carry)
        """The tensors of the carry, in its order."""

    def loss(self, batch: Batch, tensors: list[Tensor]) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """Compute the model's loss of the next chunk of each stream.

        Args:
            batch: The chunks.
            tensors: The carry before them.

        Returns:
            The loss, its parts, and the carry after the chunks.
        """
        total, metrics, carry = self._world_model.carried_loss(batch, with_tensors(self._carry, tensors))
        return total, metrics, state_tensors(carry)

    def state(self) -> dict[str, Any]:
        """Return the tensors of the carry, numbered in its order."""
        with ranks.sharing_rows():
            tensors = [ranks.gather_rows(tensor) for tensor in self.tensors]
        return {str(index): tensor.float().cpu().numpy() for index, tensor in enumerate(tensors)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `state`."""
        with ranks.sharing_rows():
            saved = [ranks.own_rows(np.array(state[str(index)])) for index in range(len(state))]
        self.tensors = [
            to_device(rows, like.device).to(like.dtype) for rows, like in zip(saved, self.tensors, strict=True)
        ]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Begin new streams: those of a finished stage have ended."""
