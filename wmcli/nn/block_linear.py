"""A linear layer in independent blocks: the matrix is block-diagonal.

Source: DreamerV3 (Hafner et al. 2023, arXiv 2301.04104).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class BlockLinear(nn.Module):
    """G linear maps side by side, from (..., inputs) to (..., outputs). Group g of the outputs reads group g of the
    inputs.

    Weights begin as those of `nn.Linear` with `inputs / blocks` inputs.

    Args:
        inputs: Number of inputs.
        outputs: Number of outputs.
        blocks: G, which divides both.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        assert inputs % blocks == outputs % blocks == 0, (inputs, outputs, blocks)
        self.inputs, self.outputs, self.blocks = inputs, outputs, blocks
        self.weight = nn.Parameter(torch.empty(blocks, inputs // blocks, outputs // blocks))
        self.bias = nn.Parameter(torch.empty(outputs))
        bound = 1 / math.sqrt(inputs // blocks)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.blocks, self.inputs // self.blocks).transpose(0, 1)  # (G, N, inputs / G)
        y = torch.bmm(groups, self.weight).transpose(0, 1).reshape(*x.shape[:-1], self.outputs)
        return y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, outputs={self.outputs}, blocks={self.blocks}"
