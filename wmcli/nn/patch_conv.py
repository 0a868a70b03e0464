"""A tokenizer network that encodes each square patch of a frame separately, one token per patch.

With larger receptive fields one moving object changes tokens all over a small frame, and the dynamics model has to
predict all of them. Here a token changes only with its patch, at lower cost. An object across two patches takes a code
in each. Encoder and decoder add a learned vector per position, so that a fixed background needs no codes.

Axes: B batch, C channels, h w grid of patches, S side of a patch in pixels.

Source: our own; the patches are those of vision transformers (Dosovitskiy et al. 2021, ICLR, arXiv 2010.11929).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PatchEncoder(nn.Module):
    """Encoder (B, 3, h * S, w * S) -> (B, width, h, w), for a square grid of `grid` patches a side."""

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
    """Decoder (B, width, h, w) -> (B, 3, h * S, w * S), trained for [-1, 1] but not clamped."""

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
