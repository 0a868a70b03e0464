"""A stack of strided convolutions from an image to a vector, and its mirror image.

Axes: B batch, C channels, F length of the flattened output of the encoder. Images are (B, C, H, W), with three colors
or any other number of channels, channels last in memory.

Sources: the autoencoder of Drama (Wang et al. 2024) and, with other sizes, of STORM (Zhang et al. 2023, arXiv
2310.09615).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from wmcli.errors import UsageError
from wmcli.nn.initialize import Initialization, initialize
from wmcli.nn.layers import BatchNorm2d, Flatten
from wmcli.nn.mlp import ACTIVATIONS, NORM_EPS, Activation, ChannelLayerNorm, ChannelRMSNorm
from wmcli.spaces import Image

Norm = Literal["batch", "rms", "layer"]

FEW = 4  # output channels that a transposed convolution computes for four pixels at once


class ConvStack(NamedTuple):
    """Shape of the encoder; the decoder mirrors it."""

    channels: tuple[int, ...]
    """Output channels of each convolution."""
    strides: tuple[int, ...]
    """Stride of each convolution."""
    kernel: int
    """Side of each kernel. [pixels]"""
    bias: bool
    """Use biases in convolutions."""
    norm: Norm
    """Norm after each convolution: over the batch, or RMSNorm or LayerNorm over the channels of each pixel."""
    activation: Activation
    """Activation after each norm."""
    eps: float = 0.0
    """Constant of the norms over channels; 0 is 1e-6 for rms and 1e-5 for layer."""
    initialization: Initialization = "fan-average"
    """Initialization of all layers."""

    def shape(self, image: Image | int) -> tuple[int, int, int]:
        """Return the shape (C, H, W) of the encoder's output for an image, or for the side of a square one.

        Raises:
            UsageError: The strides do not divide the image.
        """
        height, width = (image, image) if isinstance(image, int) else (image.height, image.width)
        shrink = math.prod(self.strides)
        if height % shrink or width % shrink:
            raise UsageError(
                f"frames of {height}x{width} pixels cannot be shrunk by tokenizer.strides ="
                f" {list(self.strides)}; use a multiple of {shrink}, or other strides"
            )
        return self.channels[-1], height // shrink, width // shrink

    def padding(self, stride: int) -> int:
        """Return the padding of a convolution: 0 if the kernel is as large as the stride."""
        return 0 if stride == self.kernel else (self.kernel - 1) // 2

    def features(self, image: Image | int) -> int:
        """Return F for an image, or for the side of a square one."""
        return math.prod(self.shape(image))


class StridedEncoder(nn.Sequential):
    """Encoder (B, colors, H, W) -> (B, F), flattened in the order C, H, W."""

    def __init__(self, stack: ConvStack, colors: int = 3) -> None:
        layers: list[nn.Module] = []
        inputs = colors
        for outputs, stride in zip(stack.channels, stack.strides, strict=True):
            kind = PatchConv2d if stride == stack.kernel else nn.Conv2d
            layers.append(kind(inputs, outputs, stack.kernel, stride, stack.padding(stride), bias=stack.bias))
            layers += norm_and_activation(stack, outputs)
            inputs = outputs
        super().__init__(*layers, Flatten())
        initialize(self, stack.initialization)
        to_channels_last(self)


class StridedDecoder(nn.Module):
    """Decoder (B, inputs) -> (B, colors, H, W): a linear layer to the encoder's output shape, then its layers in
    reverse.

    The last convolution has neither norm nor activation.
    """

    def __init__(self, inputs: int, stack: ConvStack, image: Image | int) -> None:
        super().__init__()
        channels, colors = stack.channels, 3 if isinstance(image, int) else image.channels
        self.shape = stack.shape(image)
        self.linear = nn.Linear(inputs, math.prod(self.shape), bias=stack.bias)
        layers = norm_and_activation(stack, channels[-1])
        for i in range(len(channels) - 1, -1, -1):
            stride, outputs = stack.strides[i], channels[i - 1] if i else colors
            padding = stack.padding(stride)
            # The encoder's strided convolution rounds down by this many pixels.
            missing = stride + 2 * padding - stack.kernel
            kind = PatchTransposedConv2d if stride == stack.kernel else TransposedConv2d
            layers.append(kind(channels[i], outputs, stack.kernel, stride, padding, missing, bias=stack.bias or not i))
            if i:
                layers += norm_and_activation(stack, outputs)
        self.layers = nn.Sequential(*layers)
        initialize(self, stack.initialization)
        to_channels_last(self)

    def forward(self, z: Tensor) -> Tensor:
        x = self.linear(z).unflatten(-1, self.shape).contiguous(memory_format=torch.channels_last)
        return self.layers(x)


class PatchConv2d(nn.Conv2d):
    """Convolution with a kernel as large as its stride, as one matrix product over all patches.

    On a CPU it is several times as fast as torch's convolution, especially in the backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.permute(0, 2, 3, 1)  # (outputs, kernel, kernel, inputs)
        (high, wide), pixels = self.kernel_size, x.permute(0, 2, 3, 1)
        patches = pixels.unflatten(2, (-1, wide)).unflatten(1, (-1, high)).transpose(2, 3)
        return F.linear(patches.flatten(3), weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class PatchTransposedConv2d(nn.ConvTranspose2d):
    """Transposed convolution with a kernel as large as its stride, as one matrix product from pixels to patches."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # an output size has no use here
        weight = self.weight.permute(2, 3, 1, 0)  # (kernel, kernel, outputs, inputs)
        bias = None if self.bias is None else self.bias.repeat(weight.shape[0] * weight.shape[1])
        patches = F.linear(x.permute(0, 2, 3, 1), weight.flatten(0, 2), bias).unflatten(3, weight.shape[:3])
        return patches.transpose(2, 3).flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)


class TransposedConv2d(nn.ConvTranspose2d):
    """Transposed convolution with equal sizes in both directions, faster on a CPU. First derivatives only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # an output size has no use here
        weight, bias, device = self.weight, self.bias, x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _TransposedConv.apply(x, weight, bias, self.stride[0], self.padding[0], self.output_padding[0])


class _TransposedConv(torch.autograd.Function):
    """Transposed convolution whose gradients are those of the convolution it transposes.

    In oneDNN the weight's gradient of a transposed convolution takes two to three times as long as the same numbers
    from that convolution.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, missing: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        keeps_size = stride == 1 and weight.shape[2] == 2 * padding + 1
        if keeps_size and weight.shape[1] <= FEW and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return _by_squares(x, weight, bias)
        return F.conv_transpose2d(x, weight, bias, stride, padding, missing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = F.conv2d(grad, weight, None, ctx.stride, ctx.padding) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = conv2d_weight(grad, weight.shape, x, ctx.stride, ctx.padding)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum((0, 2, 3))
        return grad_x, grad_weight, grad_bias, None, None, None


def _by_squares(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a transposed convolution that preserves an even size, with 2 x 2 pixels of a color as four channels.

    A vector register has room for 16 channels, most of which a few colors would leave idle.
    """
    kernel = weight.transpose(0, 1).flip(2, 3)
    squares = torch.stack([F.pad(kernel, (j, 1 - j, i, 1 - i)) for i in (0, 1) for j in (0, 1)], 1).flatten(0, 1)
    squares = squares.contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else bias.repeat_interleave(4)
    return F.pixel_shuffle(F.conv2d(x, squares, bias, 2, kernel.shape[2] // 2), 2)


def to_channels_last(module: nn.Module) -> None:
    """Store the kernels of all convolutions channels last, as the frames are."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def norm_and_activation(stack: ConvStack, channels: int) -> list[nn.Module]:
    if stack.norm == "batch":
        return [BatchNorm2d(channels), ACTIVATIONS[stack.activation]()]
    kind = ChannelRMSNorm if stack.norm == "rms" else ChannelLayerNorm
    return [kind(channels, stack.eps or NORM_EPS[stack.norm]), ACTIVATIONS[stack.activation]()]
