"""Running statistics as buffers, saved with the weights and updated on the device without a wait.

`update` changes them, `forward` does not.

Axes: F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wmcli import ranks


class RunningNormalizer(nn.Module):
    """Normalization of each feature by the mean and variance of all batches so far, clipped to +-10.

    The initial mean 0 and variance 1 have the weight of 1e-4 observations.

    Source: input normalization of Drama's actor (Wang et al. 2024, arXiv 2410.08893; in its code only).
    """

    EPS = 1e-8
    CLIP = 10.0

    mean: Tensor
    """(F,)"""
    variance: Tensor
    """(F,), of the population."""
    count: Tensor
    """(), observations so far."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add a batch (..., F) by pooling the statistics of two samples (Chan et al. 1983)."""
        x = x.to(self.mean.dtype).flatten(0, -2)
        mean = ranks.mean(x.mean(0))
        # On a CPU torch's own takes three times as long along columns.
        variance = ranks.mean((x - mean).square_().mean(0))
        count = ranks.all_rows(x.shape[0])
        total = self.count + count
        share = count / total
        difference = mean - self.mean
        spread = variance - self.variance + (1 - share) * difference.square()
        self.variance.add_(share * spread)
        self.mean.add_(share * difference)
        self.count.copy_(total)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., F) normalized, in the precision of the buffers."""
        scale = (self.variance + self.EPS).rsqrt()
        return (x.to(self.mean.dtype) - self.mean).mul_(scale).clamp_(-self.CLIP, self.CLIP)


class RunningRange(nn.Module):
    """Distance of the 5th and the 95th percentile, both as exponential moving averages that start at 0.

    DreamerV3 (Hafner et al. 2023, arXiv 2301.04104) divides advantages by it. As in Drama the averages have no bias
    correction, so the range grows over the first few hundred batches.
    """

    PERCENTILES = (0.05, 0.95)
    DECAY = 0.99

    low: Tensor
    """(), average of the 5th percentile."""
    high: Tensor
    """(), average of the 95th percentile."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add a batch of n numbers of any shape. A percentile is the k-th smallest, k = int(q n), at least 1."""
        ordered = ranks.gather_rows(x.to(self.low.dtype)).flatten().sort().values
        for average, q in zip((self.low, self.high), self.PERCENTILES, strict=True):
            average.lerp_(ordered[max(int(q * ordered.numel()), 1) - 1], 1 - self.DECAY)

    def forward(self) -> Tensor:
        """Return the current range, ()."""
        return self.high - self.low
