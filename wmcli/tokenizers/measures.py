"""How well frames survive a tokenizer.

B batch, H height, W width, C colors (3).
"""

from __future__ import annotations

import torch
from torch import Tensor

OBJECT_CONTRAST = 0.1  # of full scale; a pixel this far from the median frame belongs to an object


def median(observation: Tensor) -> Tensor:
    """uint8 (B, ...) -> uint8 (...), the lower of two middle values.

    Found bit by bit, the largest value with less than half of all below it: on a CPU over ten times as fast as sorting,
    and unlike torch.median deterministic on CUDA.
    """
    half = (len(observation) + 1) // 2
    found = torch.zeros_like(observation[0])
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        larger = found | bit
        below = (observation < larger).sum(0, dtype=torch.int32)
        found = torch.where(below < half, larger, found)
    return found


def objects(observation: Tensor) -> Tensor:
    """uint8 (B, H, W, C) -> bool (B, H, W): off the batch's median frame by over 10 % of full scale in a color."""
    return ((observation.float() - median(observation).float()).abs() > 255 * OBJECT_CONTRAST).any(-1)


def survival(observation: Tensor, reconstruction: Tensor) -> dict[str, float]:
    """What is left of uint8 frames (B, H, W, C) in their reconstructions.

    - object_recall: among pixels that differ from the median frame of this batch by more than 10 % of full scale in
      some color, the share whose reconstruction is nearer to the truth than to the median frame (sum of absolute
      differences over colors). 1 = small objects survive, 0 = they vanish. 1 when no pixel differs.
    - l1: mean absolute error, as a share of full scale.
    """
    truth, guess = observation.float() / 255, reconstruction.float() / 255
    background = median(observation).float() / 255
    is_object = objects(observation)
    survives = (guess - truth).abs().sum(-1) < (guess - background).abs().sum(-1)
    count = int(is_object.sum())
    return {
        "object_recall": float((survives & is_object).sum()) / count if count else 1.0,
        "l1": float((guess - truth).abs().mean()),
    }
