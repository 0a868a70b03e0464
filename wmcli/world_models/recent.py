"""Real frames that were perceived while acting and that no backbone has read yet.

A controller that uses only the current frame's latent needs no backbone while it acts. The model then keeps the frames
and reads them at the first imagined step, as `observe` reads a window.

Axes: B batch, T frames kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RecentFrames(NamedTuple):
    """The last frames, the current one at the end; fewer at the beginning."""

    latent: Tensor
    """(B, T, ...)."""
    previous_action: Tensor
    """(B, T, ...): the action that led to each frame."""
    reset: Tensor
    """(B, T) bool: the frame opens an episode."""

    @property
    def action(self) -> Tensor:
        """(B, T, ...): the action taken in each frame. The last one is still open and has no meaning."""
        return self.previous_action.roll(-1, 1)


def append_frame(
    recent: RecentFrames | None, latent: Tensor, previous_action: Tensor, reset: Tensor, limit: int
) -> RecentFrames:
    """Append a frame, and drop the oldest beyond `limit`.

    Args:
        recent: The frames before it; None if there are none.
        latent: (B, ...) of the new frame.
        previous_action: (B, ...), the action that led to it.
        reset: (B,) bool: it opens an episode.
        limit: Number of frames to keep.
    """
    new = RecentFrames(latent[:, None], previous_action[:, None], reset[:, None])
    if recent is None:
        return new
    return RecentFrames(*(torch.cat(pair, 1)[:, -limit:] for pair in zip(recent, new, strict=True)))
