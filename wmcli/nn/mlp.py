"""Stacks of dense layers as Dreamer-style heads, actors and critics have them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from wmcli.nn.norms import LayerNorm, RMSNorm

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "relu", "elu"]

NORM_EPS = {"rms": 1e-6, "layer": 1e-5}
ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU, "elu": nn.ELU}


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
