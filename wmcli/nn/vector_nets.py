"""Networks for the parts of an observation that are no images: one MLP reads them all, one predicts them all.

Numbers of any size are read and predicted in symlog space, categories one-hot and as logits.

Axes: B batch, I inputs, D width of the MLPs, O outputs for a part, N numbers of a vector, K categories of a part.

Source: DreamerV3 (Hafner et al. 2023, arXiv 2301.04104) and its public code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.nn.initialize import Initialization, initialize
from wmcli.nn.layers import Float32Linear
from wmcli.nn.mlp import Activation, Norm, hidden_layers
from wmcli.nn.observations import as_numbers
from wmcli.nn.two_hot import symexp, symlog
from wmcli.spaces import Categories, Vector

VectorSpace = Vector | Categories


class DenseStack(NamedTuple):
    """Shape of an MLP."""

    layers: int
    """Hidden layers."""
    width: int
    """D."""
    norm: Norm
    """Norm after each layer."""
    activation: Activation
    """Activation after each norm."""
    eps: float = 0.0
    """Constant of the norms; 0 is each norm's default."""
    initialization: Initialization = "fan-average"
    """Initialization of all layers."""

    def build(self, inputs: int) -> nn.Sequential:
        """Build the hidden layers (B, inputs) -> (B, D), with torch's initialization."""
        return nn.Sequential(
            *hidden_layers(
                inputs, self.width, self.layers, norm_kind=self.norm, activation=self.activation, eps=self.eps
            )
        )


def read_vectors(spaces: Sequence[VectorSpace], parts: Sequence[Tensor]) -> Tensor:
    """Return the inputs (B, I) float32 of the encoder."""
    return torch.cat([as_numbers(space, part) for space, part in zip(spaces, parts, strict=True)], -1)


class VectorEncoder(nn.Sequential):
    """Encoder (B, I) -> (B, D)."""

    def __init__(self, spaces: Sequence[VectorSpace], stack: DenseStack) -> None:
        super().__init__(*stack.build(sum(space.encoded for space in spaces)))
        initialize(self, stack.initialization)


class VectorDecoder(nn.Module):
    """Decoder (B, inputs) -> the outputs (B, O) float32 of each part: an MLP and a linear layer for each."""

    def __init__(self, inputs: int, spaces: Sequence[VectorSpace], stack: DenseStack) -> None:
        super().__init__()
        self.hidden = stack.build(inputs)
        self.heads = nn.ModuleList(Float32Linear(stack.width, space.encoded) for space in spaces)
        initialize(self, stack.initialization)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.hidden(x)
        return [head(x) for head in self.heads]


def vector_loss(space: VectorSpace, output: Tensor, target: Tensor) -> Tensor:
    """Return the losses (B,) of outputs (B, O) for parts (B, ...).

    It is the squared error in symlog space, summed over numbers, or the cross entropy, summed over categories, in nats.
    """
    if isinstance(space, Vector):
        return (output - symlog(target.float())).square().sum(-1)
    losses = [
        F.cross_entropy(logits, index, reduction="none")
        for logits, index in zip(output.split(space.sizes, -1), target.unbind(-1), strict=True)
    ]
    return torch.stack(losses, -1).sum(-1)


def vector_value(space: VectorSpace, output: Tensor) -> Tensor:
    """Return the parts, numbers (B, N) float32 or the likeliest categories (B, K) int64, of outputs (B, O)."""
    if isinstance(space, Vector):
        return symexp(output)
    return torch.stack([logits.argmax(-1) for logits in output.split(space.sizes, -1)], -1)
