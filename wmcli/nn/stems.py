"""Maps from a latent and an action to an element of the backbone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from wmcli.errors import UsageError
from wmcli.nn.initialize import Initialization, initialize
from wmcli.nn.mlp import norm

Stem = Literal["linear", "deep", "dreamer", "separate"]


def build_stem(
    kind: Stem, latent: int, action: int, width: int, *, eps: float, initialization: Initialization
) -> nn.Module:
    """Build the map from a latent and an action, (..., latent + action), to an element (..., width).

    Args:
        kind: See `dynamics.stem`.
        latent: Length of a flattened latent.
        action: Length of an encoded action.
        width: Length of an element.
        eps: Epsilon of the norms of all but the deep stem; 0 is their default.
        initialization: Of the stems of Dreamer and DreamerV3.

    Raises:
        UsageError: The width of a separate stem is odd.
    """
    inputs = latent + action
    if kind == "separate":
        separate = SeparateStem(latent, action, width, eps)
        initialize(separate, initialization)
        return separate
    if kind == "linear":
        linear = nn.Linear(inputs, width)
        nn.init.zeros_(linear.bias)  # Mamba's public code begins with biases 0, also in the stem that Drama adds
        return nn.Sequential(linear, norm("rms", width, eps), nn.SiLU())
    if kind == "dreamer":
        layers = nn.Sequential(nn.Linear(inputs, width, bias=False), norm("layer", width, eps), nn.SiLU())
        initialize(layers, initialization)
        return layers
    return nn.Sequential(
        nn.Linear(inputs, width, bias=False),
        norm("layer", width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        norm("layer", width),
    )


class SeparateStem(nn.Module):
    """Projections of latent and action with norms of their own, one behind the other: DreamerV3's inputs of the core.

    Raises:
        UsageError: The width is odd.
    """

    def __init__(self, latent: int, action: int, width: int, norm_eps: float) -> None:
        super().__init__()
        if width % 2:
            raise UsageError(
                f"dynamics.stem = separate: elements of width {width} have no two halves; set backbone.input_width to"
                " an even number."
            )
        self.sizes = (latent, action)
        self.latent, self.action = (
            nn.Sequential(nn.Linear(inputs, width // 2), norm("rms", width // 2, norm_eps), nn.SiLU())
            for inputs in self.sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        latent, action = x.split(self.sizes, -1)
        return torch.cat((self.latent(latent), self.action(action)), -1)
