"""Real frames that were perceived while acting and that no backbone has read yet.

A controller that sees nothing but the current frame's latent needs no backbone while it acts. So a model may keep the
frames as they are, and read them at the first imagined step, just as `observe` reads a window.

Axes: B batch, T frames kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Recent(NamedTuple):
    """The last frames, the current one at the end; fewer at the beginning."""

    latent: Tensor
    """(B, T, ...)"""
    previous: Tensor
    """(B, T) int64: the action that led to each frame."""
    reset: Tensor
    """(B, T) bool: the frame opens an episode."""

    @property
    def action(self) -> Tensor:
        """(B, T) int64: the action taken in each frame. The last one is not known yet and means nothing."""
        return self.previous.roll(-1, 1)


def with_frame(recent: Recent | None, latent: Tensor, previous: Tensor, reset: Tensor, most: int) -> Recent:
    """Append a frame, and let go of the oldest where there are more than `most`.

    Args:
        recent: the frames before it; None: there are none.
        latent: (B, ...) of the new frame.
        previous: (B,) int64, the action that led to it.
        reset: (B,) bool: it opens an episode.
        most: how many frames to keep.
    """
    new = Recent(latent[:, None], previous[:, None], reset[:, None])
    if recent is None:
        return new
    return Recent(*(torch.cat(pair, 1)[:, -most:] for pair in zip(recent, new, strict=True)))
