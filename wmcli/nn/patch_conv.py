"""A tokenizer network that sees each square patch of a frame by itself: a patch, a token.

B batch, C channels, h w grid of patches, S side of a patch in pixels. Convolutions with a wider view let one moving
object change tokens all over a small frame, and the dynamics model has to predict every one of them. Here a token
changes only when its patch does, and costs less; an object that lies over two patches takes a code in each.

Both halves add a learned vector per place, so that a fixed background costs no codes. Not in any of the papers; the
patches are those of vision transformers (Dosovitskiy et al. 2021, ICLR, arXiv 2010.11929).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PatchEncoder(nn.Module):
    """(B, 3, h * S, w * S) -> (B, width, h, w), for a square grid of `grid` patches a side."""

    def __init__(self, channels: int, patch: int, grid: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, channels, patch, stride=patch)
        self.place = nn.Parameter(torch.zeros(channels, grid, grid))
        self.conv = nn.Conv2d(channels, channels, 1)
        self.conv_out = nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.cut(x) + self.place)
        return self.conv_out(F.silu(self.conv(x)))


class PatchDecoder(nn.Module):
    """(B, width, h, w) -> (B, 3, h * S, w * S), meant to lie in [-1, 1] but not clamped."""

    def __init__(self, channels: int, patch: int, grid: int, width: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(width, channels, 1)
        self.place = nn.Parameter(torch.zeros(channels, grid, grid))
        self.conv = nn.Conv2d(channels, channels, 1)
        self.conv_out = nn.Conv2d(channels, 3 * patch * patch, 1)
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv_in(x) + self.place)
        return F.pixel_shuffle(self.conv_out(F.silu(self.conv(x))), self.patch)
