"""A stack of strided convolutions from an image to a vector, and its mirror image.

The autoencoder of Drama (Wang et al. 2024) and, with other numbers, of STORM (Zhang et al. 2023, arXiv 2310.09615).
B batch, C channels, F length of the flattened output of the encoder. Images are (B, 3, H, W), channels last in memory.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from wmcli.errors import UsageError
from wmcli.nn.initialise import fan_average
from wmcli.nn.mlp import ACTIVATIONS, NORM_EPS, Activation
from wmcli.nn.norms import ChannelRMSNorm

Norm = Literal["batch", "rms"]


class Stack(NamedTuple):
    """Shape of the encoder; the decoder mirrors it."""

    channels: tuple[int, ...]
    """Output channels of each convolution."""
    strides: tuple[int, ...]
    """By how much each convolution shrinks height and width."""
    kernel: int
    """Pixels."""
    bias: bool
    """Whether convolutions have one."""
    norm: Norm
    """After each convolution: over the batch, or RMS over the channels of each pixel."""
    activation: Activation
    """After each norm."""

    def side(self, image_size: int) -> int:
        """Height and width of the encoder's output. Raises UsageError when the image cannot be shrunk that often."""
        shrink = math.prod(self.strides)
        if image_size % shrink:
            raise UsageError(
                f"frames of {image_size}x{image_size} pixels cannot be shrunk by tokenizer.strides ="
                f" {list(self.strides)}; use a multiple of {shrink}, or other strides"
            )
        return image_size // shrink

    def features(self, image_size: int) -> int:
        """F."""
        return self.channels[-1] * self.side(image_size) ** 2


class StridedEncoder(nn.Sequential):
    """(B, 3, H, W) to (B, F), flattened in the order C, H, W."""

    def __init__(self, stack: Stack) -> None:
        layers: list[nn.Module] = []
        inputs = 3
        for outputs, stride in zip(stack.channels, stack.strides, strict=True):
            layers.append(nn.Conv2d(inputs, outputs, stack.kernel, stride, (stack.kernel - 1) // 2, bias=stack.bias))
            layers += _norm_and_activation(stack, outputs)
            inputs = outputs
        super().__init__(*layers, nn.Flatten())
        fan_average(self)
        _channels_last(self)


class StridedDecoder(nn.Module):
    """(B, inputs) to (B, 3, H, W): a linear layer to the encoder's output shape, then its layers in reverse.

    The last convolution has neither norm nor activation.
    """

    def __init__(self, inputs: int, stack: Stack, image_size: int) -> None:
        super().__init__()
        side, channels = stack.side(image_size), stack.channels
        self.shape = (channels[-1], side, side)
        self.linear = nn.Linear(inputs, math.prod(self.shape), bias=stack.bias)
        layers = _norm_and_activation(stack, channels[-1])
        for i in range(len(channels) - 1, -1, -1):
            stride, outputs = stack.strides[i], channels[i - 1] if i else 3
            padding = (stack.kernel - 1) // 2
            # What the rounding of the encoder's strided convolution swallowed.
            missing = stride + 2 * padding - stack.kernel
            layers.append(
                nn.ConvTranspose2d(
                    channels[i], outputs, stack.kernel, stride, padding, missing, bias=stack.bias or not i
                )
            )
            if i:
                layers += _norm_and_activation(stack, outputs)
        self.layers = nn.Sequential(*layers)
        fan_average(self)
        _channels_last(self)

    def forward(self, z: Tensor) -> Tensor:
        x = self.linear(z).unflatten(-1, self.shape).contiguous(memory_format=torch.channels_last)
        return self.layers(x)


def _channels_last(module: nn.Module) -> None:
    """Store the kernels of all convolutions channels last, as the frames are."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def _norm_and_activation(stack: Stack, channels: int) -> list[nn.Module]:
    norm = nn.BatchNorm2d(channels) if stack.norm == "batch" else ChannelRMSNorm(channels, NORM_EPS["rms"])
    return [norm, ACTIVATIONS[stack.activation]()]
