"""The residual encoder and decoder with attention of IRIS's tokenizer.

Every level has the same number of channels. The encoder has 2 residual blocks per level, the decoder 3. Self-attention
with one head follows each residual block on images 16 or 8 pixels high, and separates the two middle blocks. GroupNorm
has 32 groups and eps 1e-6.

Axes: B batch, C channels, H height, W width.

Source: Micheli et al. 2023, ICLR, arXiv 2209.00588, after Esser et al. 2021, arXiv 2012.09841 (eloialonso/iris and
CompVis/taming-transformers), with channel multipliers 1 at all levels and no dropout.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from wmcli.errors import UsageError
from wmcli.nn.group_norm import GroupNorm

GROUPS = 32
ATTENTION_HEIGHTS = (16, 8)


def norm(channels: int) -> GroupNorm:
    """Build a GroupNorm of 32 groups.

    Raises:
        UsageError: `channels` is not a multiple of 32.
    """
    if channels % GROUPS:
        raise UsageError(
            f"tokenizer.channels = {channels}: the residual network normalizes in {GROUPS} groups and needs a multiple "
            f"of {GROUPS}; use --set tokenizer.channels=64, or the smaller network with --set tokenizer.network=slim."
        )
    return GroupNorm(GROUPS, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    """Residual block x + conv(silu(norm(conv(silu(norm(x)))))) of x (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = norm(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention over all H * W positions of x (B, C, H, W), with one head of C channels and a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.query = nn.Conv2d(channels, channels, 1)
        self.key = nn.Conv2d(channels, channels, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (conv(y).flatten(2).mT for conv in (self.query, self.key, self.value))  # (B, H*W, C)
        # scaled_dot_product_attention takes three times as long on a CPU in bfloat16, at one head and 256 positions.
        y = (query * query.shape[-1] ** -0.5 @ key.mT).softmax(-1) @ value
        return x + self.out(y.mT.unflatten(2, x.shape[2:]))  # (B, C, H*W) -> (B, C, H, W)


class ShrinkConv(nn.Module):
    """Convolution of stride 2, (B, C, H, W) -> (B, C, H/2, W/2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # one zero row at the bottom, one zero column at the right


class GrowConv(nn.Module):
    """Nearest upsampling and a convolution, (B, C, H, W) -> (B, C, 2H, 2W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


def _level(channels: int, blocks: int, height: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers.append(ResidualBlock(channels))
        if height in ATTENTION_HEIGHTS:
            layers.append(Attention(channels))
    return layers


def _middle(channels: int) -> list[nn.Module]:
    return [ResidualBlock(channels), Attention(channels), ResidualBlock(channels)]


class ResidualEncoder(nn.Module):
    """Encoder of images (B, colors, H, W) in [-1, 1] -> (B, width, H / 2^downsamples, W / 2^downsamples).

    `height` is the height of the images in pixels.

    Raises:
        UsageError: `channels` is not a multiple of 32.
    """

    def __init__(self, channels: int, downsamples: int, width: int, height: int, colors: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(colors, channels, 3, padding=1)]
        for level in range(downsamples + 1):
            layers += _level(channels, 2, height // 2**level)
            if level < downsamples:
                layers.append(ShrinkConv(channels))
        layers += [*_middle(channels), norm(channels), nn.SiLU(), nn.Conv2d(channels, width, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ResidualDecoder(nn.Module):
    """Decoder (B, width, h, w) -> (B, colors, h * 2^downsamples, w * 2^downsamples), not clamped.

    `height` is the height of the images in pixels.

    Raises:
        UsageError: `channels` is not a multiple of 32.
    """

    def __init__(self, channels: int, downsamples: int, width: int, height: int, colors: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(width, channels, 3, padding=1), *_middle(channels)]
        for level in reversed(range(downsamples + 1)):
            layers += _level(channels, 3, height // 2**level)
            if level > 0:
                layers.append(GrowConv(channels))
        layers += [norm(channels), nn.SiLU(), nn.Conv2d(channels, colors, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
