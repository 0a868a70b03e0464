"""The block GRU of DreamerV3's newer RSSM: a gated recurrent unit on a network whose large layers are block-diagonal.

    p = silu(norm(W h))                         projection of the state, H numbers
    y_g = [h_g; p; x]                           for each of the G blocks
    y = silu(norm(block-diagonal(y)))           once per layer; the norm is over all D
    r, c, u = block-diagonal(y)                 of each block
    h <- sigmoid(u - 1) tanh(sigmoid(r) c) + (1 - sigmoid(u - 1)) h

Every block reads its part of the state, and all of the projection and of the element. Blocks exchange nothing else. The
output is h. DreamerV3's element is two projections of H numbers, one of the latent and one of the action: the stem
"separate" of the latent world model, with `input_width` = 2 H.

Source: the public code of DreamerV3 since 2024, and Hafner et al. 2025, Nature 640.

Axes: B batch, T time (elements), D width, I input width, H hidden width, G blocks, N blocks of elements, L elements of
such a block, Q queries.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, BackboneSettings, BackboneSize, for_each_block
from wmcli.errors import UsageError
from wmcli.nn.block_linear import BlockLinear
from wmcli.nn.dropout import dropout
from wmcli.nn.initialize import fan_in
from wmcli.nn.mlp import RMSNorm


class BlockGRUSettings(BackboneSettings):
    """Settings of the block GRU. Defaults: DreamerV3."""

    kind: Literal["block-gru"] = "block-gru"
    """The block GRU of DreamerV3."""
    layers: int = Field(default=1, ge=1)
    """Hidden layers before the gates. [layers]"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability after each hidden layer."""
    blocks: int = Field(default=8, ge=1)
    """Blocks of the state, which divide the width. [blocks]"""
    hidden_size: int = Field(default=0, ge=0)
    """Width of the state's projection that all blocks read; 0 is an eighth of the width. [features]"""
    input_width: int = Field(default=0, ge=0)
    """Width of the input elements; 0 is the backbone's width. DreamerV3: twice `hidden_size`. [features]"""
    norm_eps: float = Field(default=1e-4, gt=0)
    """Constant added to the mean square in the RMSNorms."""

    @property
    def width_step(self) -> int:
        return self.blocks

    def resized(self, layers: int, width: int) -> Self | None:
        """Return these settings in another size, hidden and input width included; None if the blocks do not fit."""
        if width % self.blocks:
            return None
        return self.model_copy(update={"layers": layers, "width": width, "hidden_size": 0, "input_width": 0})


class BlockGRU(Backbone):
    """The block GRU, whose state is h, (B, D). Old states always stay valid.

    Products follow autocast. Norms, gates and state are float32 (float64 in a float64 model).

    Raises:
        UsageError: The blocks do not divide the width.
    """

    hidden: Any  # nn.ModuleList of BlockLinear
    norms: Any  # nn.ModuleList of RMSNorm

    def __init__(self, settings: BlockGRUSettings, size: BackboneSize) -> None:
        super().__init__()
        width, blocks = size.width, settings.blocks
        if width % blocks:
            raise UsageError(
                f"backbone.blocks = {blocks} must divide backbone.width = {width}: set backbone.blocks to one of its"
                " divisors."
            )
        hidden = settings.hidden_size or max(1, width // 8)
        inputs = settings.input_width or width
        self.width, self.max_length, self.dropout = width, None, size.dropout
        self.projection = nn.Linear(width, hidden)
        self.projection_norm = RMSNorm(hidden, settings.norm_eps)
        widths = [width + blocks * (hidden + inputs)] + [width] * (size.layers - 1)
        self.hidden = nn.ModuleList(BlockLinear(each, width, blocks) for each in widths)
        self.norms = nn.ModuleList(RMSNorm(width, settings.norm_eps) for _ in widths)
        self.gates = BlockLinear(width, 3 * width, blocks)
        fan_in(self)

    @property
    def inputs(self) -> int:
        first = self.hidden[0]
        return (first.inputs - self.width) // first.blocks - self.projection.out_features

    def initial_state(self, batch: int) -> Tensor:
        return self.projection_norm.weight.new_zeros(batch, self.width)

    def forward(self, x: Tensor, state: Tensor | None, reset: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        h = self.initial_state(len(x)) if state is None else state
        of_block, of_projection, of_element = self._parts_of_weight()
        elements = (x.to(self._precision(x)) @ of_element).unbind(1)
        clear = [None] * len(elements) if reset is None else reset[..., None].unbind(1)
        states = []
        for element, cleared in zip(elements, clear, strict=True):
            if cleared is not None:
                h = h.masked_fill(cleared, 0.0)
            h = self._advance(h, element, of_block, of_projection)
            states.append(h)
        return torch.stack(states, 1), None if state is None else h

    def step(self, x: Tensor, state: Tensor | None, reset: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y, state = self.forward(x[:, None], state, None if reset is None else reset[:, None])
        return y[:, 0], state

    def fork(self, x: Tensor, queries: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        blocks, block = x.shape[1:3]
        states, after = self.forward(x.flatten(1, 2), state)
        ends = states[:, block - 1 :: block]  # (B, N, D)
        # The queries of all blocks in one batch, each from the state at its block's end.
        answers, _ = self.forward(for_each_block(queries, x).flatten(0, 1), ends.flatten(0, 1))
        return ends, answers.unflatten(0, (-1, blocks)), after

    def _precision(self, x: Tensor) -> torch.dtype:
        """Return the type of elements before their product, which autocast may lower."""
        return torch.promote_types(x.dtype, self.projection.weight.dtype)

    def _parts_of_weight(self) -> tuple[Tensor, Tensor, Tensor]:
        """Split the first layer's weight by what it reads: a block's state (G, D / G, D / G), projection (H, D), and
        element (I, D)."""
        weight = self.hidden[0].weight  # (G, D / G + H + I, D / G)
        own, hidden = weight.shape[2], self.projection.out_features
        of_all = weight[:, own:].transpose(0, 1).flatten(1)  # (H + I, D)
        return weight[:, :own], of_all[:hidden], of_all[hidden:]

    def _advance(self, h: Tensor, element: Tensor, of_block: Tensor, of_projection: Tensor) -> Tensor:
        """Return the next state (B, D).

        Args:
            h: (B, D).
            element: (B, D), its share in the first layer.
            of_block: Part of the first layer's weight, as the next one see `_parts_of_weight`.
            of_projection: (H, D).
        """
        blocks, kind = self.gates.blocks, h.dtype
        projection = F.silu(self.projection_norm(self.projection(h)))
        own = torch.bmm(h.unflatten(1, (blocks, -1)).transpose(0, 1), of_block).transpose(0, 1).flatten(1)
        y = own.to(kind) + (projection @ of_projection).to(kind) + element.to(kind) + self.hidden[0].bias
        for index, norm in enumerate(self.norms):
            if index:
                y = self.hidden[index](y)
            y = dropout(F.silu(norm(y.to(kind))), self.dropout, self.training)
        r, c, u = self.gates(y).to(kind).unflatten(1, (blocks, 3, -1)).unbind(2)  # (B, G, D / G) each
        new = torch.tanh(r.sigmoid() * c)
        return torch.lerp(h, new.flatten(1), (u - 1).sigmoid().flatten(1))
