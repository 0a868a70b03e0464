"""Codes of vectors and categories, which are fixed: nothing is learned.

Axes: K tokens of a part, N codes of all its tokens together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wmcli.nn.categorical import one_hot
from wmcli.nn.two_hot import symexp, symlog
from wmcli.spaces import Categories, Vector

DENSE_UNTIL = math.pi  # so that angles have dense bins
OUTERMOST = 6.0  # bin in symlog space, 402 as a number


def bin_values(bins: int) -> Tensor:
    """Return the values (N,) of bins in symlog space, float32, in ascending order.

    0 is one of them, and as many are positive as negative. Half of the positive ones reach up to symlog(pi), the other
    half from there to 6, each half evenly spaced. With 125 bins steps are 0.046 and 0.148.

    Args:
        bins: N, a multiple of 4 plus 1.

    Source: Simulus (Cohen et al. 2025, arXiv 2502.11537) and its public code, leor-c/Simulus, with 125 bins.
    """
    assert bins > 1 and bins % 4 == 1
    each, middle = bins // 4, math.log1p(DENSE_UNTIL)
    dense = torch.linspace(0, middle, each + 1, dtype=torch.float64)
    coarse = torch.linspace(middle, OUTERMOST, each + 1, dtype=torch.float64)
    positive = torch.cat((dense[1:], coarse[1:]))
    return torch.cat((-positive.flip(0), dense[:1], positive)).float()


class VectorCodes(nn.Module):
    """Codes of vectors: each number is the nearest bin in symlog space, see `bin_values`."""

    values: Tensor
    borders: Tensor

    def __init__(self, space: Vector, bins: int) -> None:
        super().__init__()
        self.tokens, self.codes, self.feature_count = space.size, bins, space.size
        self.ranges = ((0, bins),) * space.size
        values = bin_values(bins)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("borders", (values[1:] + values[:-1]) / 2, persistent=False)

    def encode(self, part: Tensor) -> Tensor:
        """Encode vectors (..., K) float32 as codes (..., K) int64."""
        return torch.bucketize(symlog(part), self.borders)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes (..., K) to vectors (..., K) float32."""
        return symexp(self.values[codes])

    def features(self, codes: Tensor) -> Tensor:
        """Return the bins' values (..., K) float32, in symlog space."""
        return self.values[codes]


class CategoryCodes(nn.Module):
    """Codes of categories: the values of the first, those of the second, and so on."""

    starts: Tensor

    def __init__(self, space: Categories) -> None:
        super().__init__()
        self.tokens, self.codes, self.feature_count = len(space.sizes), sum(space.sizes), sum(space.sizes)
        self.sizes = space.sizes
        starts = [sum(space.sizes[:index]) for index in range(len(space.sizes))]
        self.ranges = tuple((start, start + size) for start, size in zip(starts, space.sizes, strict=True))
        self.register_buffer("starts", torch.tensor(starts), persistent=False)

    def encode(self, part: Tensor) -> Tensor:
        """Encode categories (..., K) as codes (..., K) int64."""
        return part.long() + self.starts

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes (..., K) to categories (..., K) int64."""
        return codes - self.starts

    def features(self, codes: Tensor) -> Tensor:
        """Return one-hot vectors of all categories, one behind the other, (..., N) float32."""
        values = self.decode(codes).unbind(-1)
        return torch.cat(
            [one_hot(value, size, torch.float32) for value, size in zip(values, self.sizes, strict=True)], -1
        )
