"""A tiny world in which everything can be counted by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from wmcli.spaces import Image, to_action_space
from wmcli.world_models.base import Batch, ImaginedStep, WorldModel


class Seen(NamedTuple):
    total: Tensor
    """(B,) what the frames and actions of the episode add up to."""
    frame: Tensor
    """(B,)"""
    step: int


class CountingModel(WorldModel):
    """Frames carry a number; the state adds up frames and actions, modulo 97. Deterministic, and it remembers."""

    frozen_encoder = True
    across_ends = False
    feature_shape = (5, 2, 3)
    uniforms_per_step = 0

    def __init__(self, actions: int = 4, size: int = 8) -> None:
        super().__init__()
        self.action_space, self.observation_space = to_action_space(actions), Image(size, size)
        self.size = size
        self.told: list[Tensor] = []  # previous actions, as perceive heard them
        self.eval()

    def encode(self, observation: Tensor) -> Tensor:
        return observation[..., 0, 0, 0].long()

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        raise AssertionError("only the controller is trained here")

    def parameter_groups(self) -> list[dict[str, Any]]:
        return []

    def _next(self, total: Tensor, action: Tensor, frame: Tensor, reset: Tensor) -> Tensor:
        return ((total + 5 * action).masked_fill(reset, 0) + 3 * frame) % 97

    def _features(self, total: Tensor) -> Tensor:
        phase = torch.arange(1, 31).reshape(5, 2, 3)
        return torch.sin(total[..., None, None, None] * phase).float()

    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, Seen]:
        total, totals = torch.zeros_like(latent[:, 0]), []
        for t in range(latent.shape[1]):
            total = self._next(total, action[:, t - 1] if t else 0 * total, latent[:, t], reset[:, t])
            totals.append(total)
        return self._features(torch.stack(totals, dim=1)), Seen(total, latent[:, -1], 0)

    def imagine(self, state: Seen, action: Tensor, numbers: Tensor | None = None) -> tuple[ImaginedStep, Seen]:
        frame = (state.frame + action + 1) % 50
        total = self._next(state.total, action, frame, torch.zeros_like(action, dtype=torch.bool))
        reward = ((state.total + action) % 3 - 1).float()
        return ImaginedStep(frame, reward, total % 5 == 0), Seen(total, frame, state.step + 1)

    def features(self, state: Seen) -> Tensor:
        return self._features(state.total)

    def perceive(
        self,
        state: Seen | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> Seen:
        self.told.append(previous_action.clone())
        frame = self.encode(observation)
        before = torch.zeros_like(frame) if state is None else state.total
        step = 0 if state is None else state.step + 1
        return Seen(self._next(before, previous_action, frame, reset), frame, step)

    def latent(self, state: Seen) -> Tensor:
        return state.frame

    def decode(self, latent: Tensor, state: Seen | None = None) -> Tensor:
        row = torch.arange(self.size)
        image = latent[..., None, None, None] * (1 + row[:, None, None]) + 7 * row[:, None] * torch.arange(1, 4)
        return (image % 256).to(torch.uint8)


@pytest.fixture
def world() -> CountingModel:
    return CountingModel()


@pytest.fixture
def make_batch():
    def make(real: tuple[int, ...], window: int, actions: int = 4, seed: int = 0) -> Batch:
        """Left-padded windows; row i holds `real[i]` real frames."""
        generator = torch.Generator().manual_seed(seed)

        def whole(high: int) -> Tensor:
            return torch.randint(high, (len(real), window), generator=generator)

        never = torch.zeros(len(real), window, dtype=torch.bool)
        valid = torch.arange(window) >= window - torch.tensor(real)[:, None]
        # padding points at some real row, which may well open an episode
        first = ~valid
        reward = whole(3).float()
        return Batch(whole(50), whole(actions), reward, never, never, first, valid)

    return make
