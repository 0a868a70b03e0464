"""Norms that compute in float32 under autocast, where torch's own would leave their fused form."""

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


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
