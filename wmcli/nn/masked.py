"""Means over what is real in a padded batch."""

from __future__ import annotations

from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask`, which has the same shape; 0 where nothing is."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
