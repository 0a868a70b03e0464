"""States of a world model over categorical latents. Letters: see latent.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wmcli.backbones.base import state_tensors, with_tensors


class ActingWindow(NamedTuple):
    """The frames before the current one that acting rereads; the newest stand last."""

    latent: Tensor
    """(B, W, K, C)."""
    action: Tensor
    """(B, W, *axes), taken in those frames."""
    length: Tensor
    """(B,) int64: number of them that belong to the episode."""
    current: Tensor
    """(B, K, C): latent of the current frame."""


class LatentState(NamedTuple):
    """State of a trajectory: the current frame, and the backbone's state of those before it."""

    backbone_state: Any
    """State of the backbone."""
    is_first: Tensor | None
    """(B,) bool: the current frame has no past, so the backbone's state is cleared first; None if all rows have one."""
    deterministic: Tensor
    """(B, D) float32: output of the backbone at the frame before; zeros without a past."""
    latent: Tensor
    """(B, K, C) sampled: the dynamics' input for the current frame."""
    policy_latent: Tensor
    """(B, K, C) sampled: the controller's input for the current frame."""
    length: int
    """Frames that the backbone has read, counted on the host: attention has learned a limited number of positions."""
    window: ActingWindow | None = None
    """While acting with a window."""
    posterior_encoder: Any = None
    """While acting with a full posterior: the state of its backbone, the current frame included."""


class Carry(NamedTuple):
    """State between the batches of truncated backpropagation, or behind a burn-in: the last frame read so far of each
    row. It has no gradient."""

    backbone_state: Any
    """State of the backbone before that frame's element."""
    posterior_encoder: Any
    """State of the full posterior's backbone, that frame included; () without one."""
    latent: Tensor
    """(B, K, C) sampled."""
    action: Tensor
    """(B, *axes). This field and those below belong to the frame's row of experience."""
    reward: Tensor
    """(B,) float32."""
    terminated: Tensor
    """(B,) bool."""
    is_first: Tensor
    """(B,) bool."""
    is_valid: Tensor
    """(B,) bool: False before the first frame, and if no action was taken in it."""


def detach(empty: Carry, carry: Carry) -> Carry:
    """Return the tensors of `carry` in the tree of `empty`, so that nothing else of a state outlives its graph."""
    tensors = [tensor.detach() for tensor in state_tensors(carry)]
    return with_tensors(
        empty, [tensor.to(like.dtype) for tensor, like in zip(tensors, state_tensors(empty), strict=True)]
    )
