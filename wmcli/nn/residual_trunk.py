"""The residual convolutions with batch norm that MuZero's descendants see frames through.

B batch, C channels, H height, W width; images are channels last in memory. Every convolution is 3 x 3 without bias.
Height and width shrink eightfold, rounded up at each halving.

Sources: MuZero (Schrittwieser et al. 2020, arXiv 1911.08265), as cut down for frames of 64 x 64 by LightZero (Niu et
al. 2023, arXiv 2310.08348) and UniZero (Pu et al. 2024, arXiv 2406.10667).
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


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """3 x 3, that keeps height and width or, with stride 2, halves them."""
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


class ResidualBlock(nn.Module):
    """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride): act(skip(x) + norm(conv(act(norm(conv(x)))))).

    `skip` is a convolution of its own, without norm, where the stride is 2, and nothing else.
    """

    def __init__(self, inputs: int, outputs: int, activation: Activation, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, stride)
        self.norm1 = BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs)
        self.norm2 = BatchNorm2d(outputs)
        self.skip = conv(inputs, outputs, stride) if stride > 1 else nn.Identity()
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm1(self.conv1(x)))
        return self.activation(self.skip(x) + self.norm2(self.conv2(y)))


class ResidualTrunk(nn.Sequential):
    """(B, inputs, H, W) to (B, channels[1], H / 8, W / 8).

    `channels` are those before and after the second halving. The third halving is an average over 3 x 3 pixels, the
    zeros around the image counted.
    """

    def __init__(self, inputs: int, channels: tuple[int, int], activation: Activation) -> None:
        narrow, wide = channels
        super().__init__(
            conv(inputs, narrow, stride=2),
            BatchNorm2d(narrow),
            ACTIVATIONS[activation](),
            ResidualBlock(narrow, narrow, activation),
            ResidualBlock(narrow, wide, activation, stride=2),
            ResidualBlock(wide, wide, activation),
            nn.AvgPool2d(3, 2, 1),
            ResidualBlock(wide, wide, activation),
            ResidualBlock(wide, wide, activation),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def side(image_size: int) -> int:
    """Height and width of what a `ResidualTrunk` makes of square images."""
    return -(-image_size // SHRINK)
