"""Norms that compute in float32 under autocast, where torch's own would leave their fused form or sum in bfloat16."""

from __future__ import annotations

from torch import Tensor, nn


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
