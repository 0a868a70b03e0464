"""The image networks of DreamerV3: convolutions and max-pools, and their mirror image with nearest neighbors.

The decoder's first layer reads the past in blocks, as the block GRU does, and adds a network on the latent.

Axes: B batch, C channels, F length of the flattened output of the encoder, K C numbers of a latent, D width of the
backbone. Images are (B, C, H, W), with three colors or any other number of channels, channels last in memory.

Source: the public code of DreamerV3 since 2024, and Hafner et al. 2025, Nature 640.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from wmcli.errors import UsageError
from wmcli.nn.block_linear import BlockLinear
from wmcli.nn.initialize import initialize
from wmcli.nn.layers import Flatten
from wmcli.nn.mlp import mlp
from wmcli.nn.strided_conv import ConvStack, norm_and_activation, to_channels_last
from wmcli.spaces import Image

CENTER = 0.5  # pixel value that is zero for the encoder


class PooledEncoder(nn.Sequential):
    """Encoder (B, colors, H, W) in [0, 1] -> (B, F), flattened in the order C, H, W.

    Each layer is a convolution, a max-pool, norm and activation.

    Raises:
        UsageError: The kernel is even, or the norm is over the batch.
    """

    def __init__(self, stack: ConvStack, colors: int = 3) -> None:
        _check(stack)
        layers: list[nn.Module] = []
        inputs = colors
        for outputs, stride in zip(stack.channels, stack.strides, strict=True):
            layers.append(nn.Conv2d(inputs, outputs, stack.kernel, padding=stack.kernel // 2, bias=stack.bias))
            layers += [nn.MaxPool2d(stride), *norm_and_activation(stack, outputs)]
            inputs = outputs
        super().__init__(*layers, Flatten())
        initialize(self, stack.initialization)
        to_channels_last(self)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - CENTER)


class PooledDecoder(nn.Module):
    """Decoder (B, K C + D) -> (B, colors, H, W): two readings of latent and past, then upsampling and convolutions.

    The last convolution has neither norm nor activation.

    Args:
        latent: Numbers of a latent, K C.
        past: D.
        stack: Of the encoder.
        image: The image, or the side of a square one in three colors. [pixels]
        blocks: Blocks in which the past is read, which divide it and the encoder's channels.
        width: Hidden width of the network on the latent.

    Raises:
        UsageError: There is no past, or the blocks do not fit.
    """

    def __init__(
        self, latent: int, past: int, stack: ConvStack, image: Image | int, *, blocks: int, width: int
    ) -> None:
        super().__init__()
        _check(stack)
        channels, colors = stack.channels, 3 if isinstance(image, int) else image.channels
        if not past:
            raise UsageError(
                "tokenizer.network = pooled: its decoder reads the past as well; set dynamics.decoder_reads=state."
            )
        if past % blocks or channels[-1] % blocks:
            raise UsageError(
                f"tokenizer.decoder_blocks = {blocks} must divide backbone.width = {past} and the last of"
                f" tokenizer.channels = {channels[-1]}: set it to a divisor of both."
            )
        _, *sides = stack.shape(image)
        self.sizes, self.shape = (latent, past), (*sides, channels[-1])
        size = math.prod(self.shape)
        self.of_past = BlockLinear(past, size, blocks)
        self.of_latent = mlp(latent, width, 1, size, activation=stack.activation, eps=stack.eps)
        self.first = nn.Sequential(*norm_and_activation(stack, channels[-1]))
        layers: list[nn.Module] = []
        for i in range(len(channels) - 1, -1, -1):
            outputs = channels[i - 1] if i else colors
            layers.append(nn.Upsample(scale_factor=float(stack.strides[i]), mode="nearest"))
            layers.append(nn.Conv2d(channels[i], outputs, stack.kernel, padding=stack.kernel // 2))
            if i:
                layers += norm_and_activation(stack, outputs)
        self.layers = nn.Sequential(*layers)
        initialize(self, stack.initialization)
        to_channels_last(self)

    def forward(self, x: Tensor) -> Tensor:
        latent, past = x.split(self.sizes, -1)
        # Each block yields some channels of all pixels.
        blocks = self.of_past(past).view(len(x), self.of_past.blocks, *self.shape[:2], -1)
        image = blocks.permute(0, 2, 3, 1, 4).flatten(3) + self.of_latent(latent).view(len(x), *self.shape)
        return self.layers(self.first(image.permute(0, 3, 1, 2)))


def _check(stack: ConvStack) -> None:
    if stack.kernel % 2 == 0:
        raise UsageError(f"tokenizer.kernel = {stack.kernel} is even; network = 'pooled' needs an odd one.")
    if stack.norm == "batch":
        raise UsageError("tokenizer.norm = batch: network = 'pooled' has norms over channels; set tokenizer.norm=rms.")
