"""Recordings made of random numbers, for all tests here."""

from __future__ import annotations

import numpy as np

from wmcli.exchange import Episode, Recording
from wmcli.spaces import (
    Categories,
    Continuous,
    Discrete,
    Image,
    Spaces,
    Vector,
    draw_actions,
    map_parts,
)

SPACES = {
    "image": Spaces.of_images(40, 3),
    "parts": Spaces(
        {"cam": Image(16, 20, 1), "x": Vector(1), "kind": Categories((3, 4))}, Continuous((-2.0, 0.0), (1.0, 5.0))
    ),
    "vector": Spaces(Vector(5), Categories((2, 3))),
    "one named part": Spaces({"only": Image(33, 40)}, Continuous((-1.0,), (1.0,))),
    "categories": Spaces(Categories((7,)), Discrete(2)),
}


def random_episode(spaces: Spaces, time: int, rng: np.random.Generator, *, closing: bool, end: str) -> Episode:
    """An episode of T actions. `end`: terminated, truncated or neither."""
    count = time + closing

    def part(space: Image | Vector | Categories) -> np.ndarray:
        if isinstance(space, Image):
            return rng.integers(0, 256, (count, *space.shape), dtype=np.uint8)
        if isinstance(space, Vector):
            return rng.normal(size=(count, space.size)).astype(np.float32)
        return np.stack([rng.integers(0, size, count) for size in space.sizes], -1).astype(np.int32)

    action = draw_actions(spaces.action, (time,), rng)
    last = np.arange(time) == time - 1
    return Episode(
        map_parts(part, spaces.observation),
        action.astype(spaces.action.dtype),
        rng.normal(size=time).astype(np.float32),
        last & (end == "terminated"),
        last & (end == "truncated"),
    )


def random_recording(spaces: Spaces, *, closing: bool = True, count: int = 5, seed: int = 0) -> Recording:
    """Episodes of 1, 2, ... actions that end in turn in both ways and, without `closing`, not at all."""
    rng = np.random.default_rng(seed)
    ends = ["terminated", "truncated"] if closing else ["terminated", "truncated", "neither"]
    made = [random_episode(spaces, 1 + n, rng, closing=closing, end=ends[n % len(ends)]) for n in range(count)]
    source = {"license": "CC0", "environment": "none"}
    return Recording("random", "wm", spaces, count, made.__getitem__, source=source)
