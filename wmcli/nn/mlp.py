"""Stacks of dense layers as in Dreamer's heads, and norms that compute in float32 under autocast.

Under autocast torch's own norms are not fused, or sum in bfloat16.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from wmcli.nn.low_precision import layer_norm

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "relu", "elu"]

NORM_EPS = {"rms": 1e-6, "layer": 1e-5}
ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU, "elu": nn.ELU}


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 (float64 for float64)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class ChannelRMSNorm(RMSNorm):
    """RMSNorm over the channels of each pixel of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class LayerNorm(nn.LayerNorm):
    """Torch's LayerNorm over the last axis, in float32 (float64 for float64), as under autocast on a GPU.

    On a CPU torch sums the gradients of weight and bias in bfloat16 for a bfloat16 input. Over 65,536 rows the first
    loses a quarter and the second nine tenths.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class ChannelLayerNorm(LayerNorm):
    """LayerNorm over the channels of each pixel of (B, C, H, W), computed in float32 and returned as x is."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x.permute(0, 2, 3, 1), self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def norm(kind: Norm, width: int, eps: float = 0.0) -> nn.Module:
    """Build an RMSNorm (default eps 1e-6) or LayerNorm (default eps 1e-5) over the last axis."""
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
    """Build a network (..., inputs) -> (..., outputs): `layers` times Linear, norm, activation, then `last_layer`.

    A Linear before a LayerNorm has no bias, because the norm has one (STORM). Before an RMSNorm it has a bias (Drama).
    `eps` is the norms', as in `norm`. Weights have torch's default initialization.
    """
    hidden = hidden_layers(inputs, width, layers, norm_kind=norm_kind, activation=activation, eps=eps)
    return nn.Sequential(*hidden, last_layer(width if layers else inputs, outputs))


def hidden_layers(
    inputs: int, width: int, layers: int, *, norm_kind: Norm, activation: Activation, eps: float
) -> list[nn.Module]:
    """Build the layers of `mlp` (..., inputs) -> (..., width) without the last one."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts.append(nn.Linear(inputs, width, bias=norm_kind == "rms"))
        parts += [norm(norm_kind, width, eps), ACTIVATIONS[activation]()]
        inputs = width
    return parts
