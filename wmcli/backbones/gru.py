"""A stack of gated recurrent units (Cho et al. 2014, arXiv 1406.1078), the recurrent baseline of Drama.

Drama (Wang et al. 2024, arXiv 2410.08893) has results with a GRU but publishes no code for it. The width of the GRUs is
a setting of its own, so that parameter counts can be matched.

Axes: B batch, T time (elements), D width, H hidden width, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import BackboneSettings, BackboneSize
from wmcli.backbones.residual import Mixer, ResidualStack


class GRUSettings(BackboneSettings):
    """Settings of the GRU backbone."""

    kind: Literal["gru"] = "gru"
    """Blocks of GRUs with residual connections."""
    hidden_size: int = Field(default=0, ge=0)
    """Width of each GRU's state; 0 is the backbone's width. Another width adds an output projection. [features]"""

    def resized(self, layers: int, width: int) -> Self:
        """Return these settings in another size, the hidden size included."""
        return self.model_copy(update={"layers": layers, "width": width, "hidden_size": 0})


class GRU(ResidualStack):
    """GRU stack whose state is a tuple with one (B, H) tensor per layer. Old states always stay valid.

    The recurrence is computed in float32 (float64 in a float64 model), also under autocast.
    """

    def __init__(self, settings: GRUSettings, size: BackboneSize) -> None:
        super().__init__(size, lambda: GRUMixer(size.width, settings.hidden_size or size.width))


class GRUMixer(Mixer):
    """A GRU, with an output projection if its width H differs from D."""

    gru: Any  # nn.GRU, which does not declare its weights

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, hidden, batch_first=True)
        self.out = nn.Identity() if hidden == width else nn.Linear(hidden, width)

    def train(self, mode: bool = True) -> GRUMixer:
        super().train(mode)
        # cuDNN has no backward pass in evaluation mode. A GRU without inner dropout computes the same in both modes.
        self.gru.train()
        return self

    def initial_state(self, batch: int) -> Tensor:
        return self.gru.weight_hh_l0.new_zeros(batch, self.gru.hidden_size)

    def forward(self, u: Tensor, state: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        states = self._states(u, state, reset)
        return self.out(states), states[:, -1]

    def step(self, u: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        if reset is not None:
            state = state.masked_fill(reset[:, None], 0.0)
        state = self._states(u[:, None], state)[:, 0]
        return self.out(state), state

    def fork(self, u: Tensor, block: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        blocks = u.shape[1]
        states = self._states(u[:, :, :block].flatten(1, 2), state).unflatten(1, (blocks, block))  # (B, N, L, H)
        # The queries of all blocks in one batch, each from the state at its block's end.
        answers = self._states(u[:, :, block:].flatten(0, 1), states[:, :, -1].flatten(0, 1))
        return self.out(torch.cat((states, answers.unflatten(0, (-1, blocks))), 2)), states[:, -1, -1]

    def _states(self, u: Tensor, state: Tensor | None, reset: Tensor | None = None) -> Tensor:
        """Return the state after each element (B, T, H).

        Args:
            u: (B, T, D).
            state: (B, H), or None for zeros.
            reset: (B, T) bool.
        """
        with torch.autocast(u.device.type, enabled=False):
            u = u.to(self.gru.weight_ih_l0.dtype)
            if reset is not None:
                return self._states_with_resets(u, state, reset)
            # By default cuDNN computes in TF32. It accepts only contiguous states.
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                return self.gru(u, None if state is None else state[None].contiguous())[0]

    def _states_with_resets(self, u: Tensor, state: Tensor | None, reset: Tensor) -> Tensor:
        """Return the same with resets: one product for all inputs, then a loop over time."""
        gru = self.gru
        state = self.initial_state(len(u)) if state is None else state
        states = []
        # Unbind, because the gradient of each index operation is as large as the whole tensor.
        inputs = F.linear(u, gru.weight_ih_l0, gru.bias_ih_l0).unbind(1)
        for element, clear in zip(inputs, reset[..., None].unbind(1), strict=True):
            state = state.masked_fill(clear, 0.0)
            recurrent = F.linear(state, gru.weight_hh_l0, gru.bias_hh_l0)
            (r_u, z_u, n_u), (r_h, z_h, n_h) = element.chunk(3, -1), recurrent.chunk(3, -1)
            new = torch.tanh(n_u + torch.sigmoid(r_u + r_h) * n_h)
            state = torch.lerp(new, state, torch.sigmoid(z_u + z_h))
            states.append(state)
        return torch.stack(states, 1)
