"""Statistics of everything seen so far, kept as buffers: saved with the weights, on the device, never waited for.

F number of features. Whoever holds one decides when it is updated; reading it never changes it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningNormalizer(nn.Module):
    """Shifts and scales each feature by the mean and variance of all batches it was shown, then clips to +-10.

    The input normalization of Drama's actor (Wang et al. 2024, arXiv 2410.08893; in its code only). Mean 0 and variance
    1 stand at the beginning, with the weight of 1e-4 observations.
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
        """Take in a batch (..., F): the statistics of two samples become those of both together (Chan et al. 1983)."""
        x = x.to(self.mean.dtype).flatten(0, -2)
        mean = x.mean(0)
        variance = (x - mean).square_().mean(0)  # on a CPU torch's own takes three times as long over columns
        total = self.count + x.shape[0]
        share = x.shape[0] / total
        difference = mean - self.mean
        spread = variance - self.variance + (1 - share) * difference.square()
        self.variance.add_(share * spread)
        self.mean.add_(share * difference)
        self.count.copy_(total)

    def forward(self, x: Tensor) -> Tensor:
        """(..., F) to the same shape, in the precision of the buffers."""
        scale = (self.variance + self.EPS).rsqrt()
        return (x.to(self.mean.dtype) - self.mean).mul_(scale).clamp_(-self.CLIP, self.CLIP)


class RunningRange(nn.Module):
    """How far apart the 5th and the 95th percentile are, both as exponential moving averages that start at 0.

    DreamerV3 (Hafner et al. 2023, arXiv 2301.04104) divides advantages by it. As in Drama the averages are not
    corrected for their start, so the range grows over the first few hundred batches.
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
        """Take in a batch of n numbers of any shape; a percentile is its k-th smallest, k = int(q n), at least 1."""
        ordered = x.to(self.low.dtype).flatten().sort().values
        for average, q in zip((self.low, self.high), self.PERCENTILES, strict=True):
            average.lerp_(ordered[max(int(q * x.numel()), 1) - 1], 1 - self.DECAY)

    def forward(self) -> Tensor:
        """The range now, ()."""
        return self.high - self.low
