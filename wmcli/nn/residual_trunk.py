"""The residual convolutions with batch norm that encode the frames of MuZero and its descendants.

Every convolution of the trunk is 3 x 3 without bias. Height and width are halved three times, rounded up each time.
Images are channels last in memory.

Axes: B batch, C channels, H height, W width.

Sources: MuZero (Schrittwieser et al. 2020, arXiv 1911.08265), in the smaller form for frames of 64 x 64 by LightZero
(Niu et al. 2023, arXiv 2310.08348) and UniZero (Pu et al. 2024, arXiv 2406.10667).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from wmcli.nn.layers import BatchNorm2d

Activation = Literal["leaky_relu", "gelu_tanh", "relu"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": nn.LeakyReLU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
}
SHRINK = 8


def conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    """Build a convolution that preserves height and width or, with stride 2, halves them; `size` 1 or 3."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class TrunkBlock(nn.Module):
    """Residual block act(skip(x) + norm(conv(act(norm(conv(x)))))).

    (B, inputs, H, W) -> (B, outputs, H / stride, W / stride). `skip` is a convolution without norm at stride 2, and the
    identity at stride 1. The convolutions are `size` x `size`.
    """

    def __init__(self, inputs: int, outputs: int, activation: Activation, stride: int = 1, size: int = 3) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, stride, size)
        self.norm1 = BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs, size=size)
        self.norm2 = BatchNorm2d(outputs)
        self.skip = conv(inputs, outputs, stride, size) if stride > 1 else nn.Identity()
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm1(self.conv1(x)))
        return self.activation(self.skip(x) + self.norm2(self.conv2(y)))


class ResidualTrunk(nn.Sequential):
    """Trunk (B, inputs, H, W) -> (B, channels[1], H / 8, W / 8).

    `channels` are the channels before and after the second halving. The third halving is an average over 3 x 3 pixels,
    zero padding included.
    """

    def __init__(self, inputs: int, channels: tuple[int, int], activation: Activation) -> None:
        narrow, wide = channels
        super().__init__(
            conv(inputs, narrow, stride=2),
            BatchNorm2d(narrow),
            ACTIVATIONS[activation](),
            TrunkBlock(narrow, narrow, activation),
            TrunkBlock(narrow, wide, activation, stride=2),
            TrunkBlock(wide, wide, activation),
            nn.AvgPool2d(3, 2, 1),
            TrunkBlock(wide, wide, activation),
            TrunkBlock(wide, wide, activation),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def side(image_side: int) -> int:
    """Return the height, or width, of a `ResidualTrunk`'s output for images of that height, or width."""
    return -(-image_side // SHRINK)
