"""How a stage draws its training windows: `training.sampling`, for each stage alike."""

from __future__ import annotations

from typing import Literal

import numpy as np

from wmcli.experience.frequency import FrequencySampler
from wmcli.experience.memory import Memory
from wmcli.experience.sampler import WindowSampler
from wmcli.settings import Settings

Sampler = WindowSampler | FrequencySampler


def build_sampler(
    settings: Settings,
    memory: Memory,
    rng: np.random.Generator,
    *,
    length: int,
    minimum: int,
    pad: Literal["left", "right"],
    history: int = 0,
    across_ends: bool = False,
    trained: np.ndarray | None = None,
    ratio: float = 1.0,
) -> Sampler:
    """A sampler of windows of `length` frames, of which the first `history` stand before the one that is drawn.

    Windows lie within one episode, of which `minimum` frames are enough; with `across_ends` they run over ends and are
    always full. Under dynamic frequency sampling the windows that were drawn least are favored. `trained` makes it
    the imagination's variant: how often each row (N,) started a window that the dynamics model was trained on, with
    `ratio`, the dynamics model's batch over imagination's.

    Raises UsageError when there is no window at all.
    """
    runs, order = memory.runs(across_ends)
    if across_ends:
        minimum = length
    sampling = settings.training.sampling
    if sampling != "dfs":
        return WindowSampler(
            runs, order, length=length, minimum=minimum, pad=pad, history=history, sampling=sampling, rng=rng
        )
    return FrequencySampler(
        runs,
        order,
        length=length,
        minimum=minimum,
        pad=pad,
        history=history,
        kind="dynamics" if trained is None else "imagination",
        settings=settings.training.dfs,
        ratio=ratio,
        trained=trained,
        rng=rng,
    )
