"""State carried from batch to batch: truncated backpropagation through time over streams of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli.backbones.base import state_tensors, with_tensors
from wmcli.world_models.base import Batch, WorldModel


class StreamState:
    """The state at the beginning of the next chunk of each stream. A checkpoint holds it (`Resumable`)."""

    def __init__(self, world_model: WorldModel, streams: int) -> None:
        self._world_model = world_model
        self._carry = world_model.initial_carry(streams)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the model's loss of the next chunk of each stream, and carry the state after it."""
        total, metrics, self._carry = self._world_model.carried_loss(batch, self._carry)
        return total, metrics

    def state(self) -> dict[str, Any]:
        """Return the tensors of the carry, numbered in its order."""
        return {str(index): tensor.float().cpu().numpy() for index, tensor in enumerate(state_tensors(self._carry))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `state`."""
        saved = [torch.from_numpy(np.array(state[str(index)])) for index in range(len(state))]
        current = state_tensors(self._carry)
        self._carry = with_tensors(
            self._carry, [tensor.to(like.device, like.dtype) for tensor, like in zip(saved, current, strict=True)]
        )

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Begin new streams: those of a finished stage have ended."""
