"""Stacks of dense layers as Dreamer-style heads, actors and critics have them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from wmcli.nn.norms import RMSNorm

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "relu"]

NORM_EPS = {"rms": 1e-6, "layer": 1e-5}
ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU}


def norm(kind: Norm, width: int) -> nn.Module:
    """RMSNorm (eps 1e-6) or LayerNorm (eps 1e-5) over the last axis."""
    return RMSNorm(width, NORM_EPS[kind]) if kind == "rms" else nn.LayerNorm(width, NORM_EPS[kind])


def mlp(
    inputs: int,
    width: int,
    layers: int,
    outputs: int,
    *,
    norm_kind: Norm = "rms",
    activation: Activation = "silu",
) -> nn.Sequential:
    """(..., inputs) to (..., outputs): `layers` times Linear, norm, activation, then a Linear.

    A Linear before a LayerNorm has no bias, since the norm has one (STORM); before an RMSNorm it has (Drama). Weights
    have torch's own initialisation.
    """
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(inputs, width, bias=norm_kind == "rms"), norm(norm_kind, width), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*parts, nn.Linear(inputs, outputs))
