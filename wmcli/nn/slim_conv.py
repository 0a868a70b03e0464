"""The slim convolutional encoder and decoder of REM's tokenizer: no residual connections, no attention.

One block halves (encoder) or doubles (decoder) height and width. All convolutions have a bias. GroupNorm has 8 groups
and eps 1e-6. The encoder starts with `channels` and doubles them at every block. The decoder starts with `width`
channels and halves them at every block, down to `channels` at least, as in the last block of REM's 4x4 variant (32).

Axes: B batch, C channels, H height, W width.

Source: Cohen et al. 2024, ICML, arXiv 2402.05643, appendix; where paper and code differ, the code (leor-c/REM).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from wmcli.errors import UsageError
from wmcli.nn.group_norm import GroupNorm

GROUPS = 8


def norm(channels: int, setting: str) -> GroupNorm:
    """Build a GroupNorm of 8 groups.

    Raises:
        UsageError: `channels`, from `setting`, is not a multiple of 8.
    """
    if channels % GROUPS:
        raise UsageError(
            f"{setting} gives a layer of {channels} channels, but the slim network normalizes in {GROUPS} groups and "
            f"needs multiples of {GROUPS} everywhere; use powers of two, for example --set tokenizer.channels=16."
        )
    return GroupNorm(GROUPS, channels, eps=1e-6)


class Down(nn.Module):
    """Encoder block (B, C, H, W) -> (B, 2C, H/2, W/2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels, "tokenizer.channels")
        self.shrink = nn.Conv2d(channels, 2 * channels, 3, stride=2)
        self.conv = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(F.silu(self.norm(x)), (0, 1, 0, 1))  # one zero row at the bottom, one zero column at the right
        return self.conv(self.shrink(x))


class Up(nn.Module):
    """Decoder block (B, C, H, W) -> (B, out, 2H, 2W), with nearest upsampling before the convolutions."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm = norm(channels, "tokenizer.width")
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(F.silu(self.norm(x)), scale_factor=2, mode="nearest")
        return self.conv2(self.conv1(x))


class SlimEncoder(nn.Module):
    """Encoder of images (B, colors, H, W) in [-1, 1] -> (B, width, H / 2^downsamples, W / 2^downsamples).

    Raises:
        UsageError: `channels` is not a multiple of 8.
    """

    def __init__(self, channels: int, downsamples: int, width: int, colors: int = 3) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(colors, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Down(channels * 2**level) for level in range(downsamples)))
        last = channels * 2**downsamples
        self.norm_out = norm(last, "tokenizer.channels")
        self.conv_out = nn.Conv2d(last, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.conv_in(x))
        return self.conv_out(F.silu(self.norm_out(x)))


class SlimDecoder(nn.Module):
    """Decoder (B, width, h, w) -> (B, colors, h * 2^downsamples, w * 2^downsamples).

    It is trained for [-1, 1] but not clamped.

    Raises:
        UsageError: A layer between `width` and `channels` has no multiple of 8 channels.
    """

    def __init__(self, channels: int, downsamples: int, width: int, colors: int = 3) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(width, width, 3, padding=1)
        counts = [width] + [max(width // 2**level, channels) for level in range(1, downsamples + 1)]
        self.blocks = nn.Sequential(*(Up(counts[level], counts[level + 1]) for level in range(downsamples)))
        self.norm_out = norm(counts[-1], "tokenizer.width")
        self.conv_out = nn.Conv2d(counts[-1], colors, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.conv_in(x))
        return self.conv_out(F.silu(self.norm_out(x)))
