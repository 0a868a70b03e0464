"""Stacks of dense layers as in Dreamer's heads, and norms that compute in float32 under autocast.

Torch's own norms would leave their fused form there, or sum in bfloat16.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "relu", "elu"]

NORM_EPS = {"rms": 1e-6, "layer": 1e-5}
ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU, "elu": nn.ELU}


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 (float64 for float64)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class ChannelRMSNorm(RMSNorm):
    """The same over the channels of each pixel of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class LayerNorm(nn.LayerNorm):
    """Torch's over the last axis, in float32 (float64 for float64), as autocast has it on a GPU.

    On a CPU torch's own sums the gradients of a bfloat16 input's weight and bias in bfloat16: over 65,536 rows a
    quarter of one and nine tenths of the other is lost.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class ChannelLayerNorm(LayerNorm):
    """The same over the channels of each pixel of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm(kind: Norm, width: int, eps: float = 0.0) -> nn.Module:
    """RMSNorm (eps 1e-6 where none is given) or LayerNorm (1e-5) over the last axis."""
    eps = eps or NORM_EPS[kind]
    return RMSNorm(width, eps) if kind == "rms" else LayerNorm(width, eps)


def mlp(
    inputs: int,
    width: int,
    layers: int,
    outputs: int,
    *,
    norm_kind: Norm = "rms",
    activation: Activation = "silu",
    eps: float = 0.0,
    last_layer: type[nn.Linear] = nn.Linear,
) -> nn.Sequential:
    """(..., inputs) to (..., outputs): `layers` times Linear, norm, activation, then `last_layer`.

    A Linear before a LayerNorm has no bias, since the norm has one (STORM); before an RMSNorm it has (Drama). `eps` is
    that of the norms, see `norm`. Weights have torch's own initialization.
    """
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts.append(nn.Linear(inputs, width, bias=norm_kind == "rms"))
        parts += [norm(norm_kind, width, eps), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*parts, last_layer(inputs, outputs))
