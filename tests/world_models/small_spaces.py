"""Small spaces of every kind, and random observations and actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wmcli.nn.actions import random_actions
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete, Image, ObservationSpace, Vector, map_parts

OBSERVATIONS: dict[str, ObservationSpace] = {
    "vector": Vector(3),
    "categories": Categories((2, 4)),
    "gray image": Image(12, 20, 1),
    "camera alone": {"camera": Image(12, 12)},
    "all": {"joints": Vector(3), "camera": Image(12, 20), "bag": Categories((2, 4)), "depth": Image(12, 20, 1)},
}
ACTIONS: dict[str, ActionSpace] = {
    "discrete": Discrete(5),
    "categories": Categories((3, 2)),
    "continuous": Continuous((-2.0, 0.0), (2.0, 1.0)),
}


def observations(space: ObservationSpace, *lead: int, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(part: Any) -> Tensor:
        if isinstance(part, Vector):
            return 5 * torch.randn(*lead, *part.shape, generator=generator)
        if isinstance(part, Categories):
            return random_actions(part, lead, generator)
        return torch.randint(256, (*lead, *part.shape), dtype=torch.uint8, generator=generator)

    return map_parts(draw, space)


def actions(space: ActionSpace, *lead: int, seed: int = 2) -> Tensor:
    return random_actions(space, lead, torch.Generator().manual_seed(seed))
