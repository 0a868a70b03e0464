"""The attention weights of a transformer and the prior on them, as matrices: query by key, for pictures and analysis.

Nothing is computed a second way. A layer's attention is linear in its values, so the same call on the rows of an
identity matrix returns the weights, whatever kernel, mask and prior it uses.

Axes: B batch, H heads, T queries, S keys, K width of a head, D width of the backbone, N blocks, L elements of a block,
Q queries behind a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from wmcli.backbones.base import Backbone
from wmcli.nn.attention_prior import AttentionPrior

Attend = Callable[[Tensor], Tensor]
"""Attention of one layer: maps values (B, H, S, K) to outputs (B, H, T, K)."""
Watch = Callable[[int, Attend, Tensor], None]
"""Called behind each layer's attention with the layer's index, the attention, and its values (B, H, S, K)."""


class AttentionBackbone(Backbone):
    """A backbone whose layers attend: its weights and its prior can be read."""

    heads: int
    prior: AttentionPrior | None
    watch: Watch | None = None
    """Set by `watching`, None everywhere else."""

    @abstractmethod
    def prior_matrix(self, count: int) -> Tensor:
        """Return what attention in a sequence of `count` elements without a past applies to its scores.

        Returns:
            (layers, H, T, T): summands, or factors where `prior.settings.multiplies`. NaN where a key is hidden by a
            mask, and -inf where the prior hides it. Without a prior 0 at visible keys.
        """


@contextmanager
def watching(backbone: AttentionBackbone, watch: Watch) -> Iterator[None]:
    """Call `watch` behind the attention of each layer, in every call of the backbone within the context."""
    backbone.watch = watch
    try:
        yield
    finally:
        backbone.watch = None


def weights_of(attend: Attend, values: Tensor) -> Tensor:
    """Return the weights (B, H, T, S) of an attention.

    The identity is passed in slices as wide as a head, so that every kernel takes it.
    """
    keys, width = values.shape[2:]
    slices = torch.eye(keys, dtype=values.dtype, device=values.device).split(width, 1)
    padded = (F.pad(each, (0, width - each.shape[1])).expand_as(values) for each in slices)
    return torch.cat([attend(each.contiguous()) for each in padded], -1)[..., :keys]


@torch.no_grad()
def attention_weights(backbone: AttentionBackbone, x: Tensor) -> Tensor:
    """Return the weights with which a backbone reads a sequence without a past.

    Args:
        backbone: In eval mode, since dropout removes weights.
        x: Elements (B, T, D).

    Returns:
        (layers, B, H, T, T). Each row sums to 1.
    """
    assert not backbone.training, "dropout removes weights"
    layers: list[Tensor] = []
    with watching(backbone, lambda _, attend, values: layers.append(weights_of(attend, values))):
        backbone(x, None)
    return torch.stack(layers)


@torch.no_grad()
def query_weights(backbone: AttentionBackbone, blocks: Tensor, queries: Tensor) -> Tensor:
    """Return the weights of a sequence of blocks without a past, with queries in the places of what they predict.

    The rows of the first Q elements of each block but the first are those of the queries that are asked behind the
    block before. Such a row has the queries' own keys in the columns of its block. All other rows are those of
    `attention_weights`.

    Args:
        backbone: In eval mode.
        blocks: (B, N, L, D).
        queries: (Q, D), Q <= L.

    Returns:
        (layers, B, H, N L, N L).

    Source: Parallel Observation Prediction, REM (Cohen et al. 2024, arXiv 2402.05643).
    """
    batch, count, length, _ = blocks.shape
    found = attention_weights(backbone, blocks.flatten(1, 2))
    asked = queries.to(blocks.dtype).expand(batch, -1, -1)
    for block in range(1, count):
        begin, end = block * length, block * length + len(queries)
        # By the contract of `fork` a block's queries are answered as if they followed it.
        answered = attention_weights(backbone, torch.cat((blocks[:, :block].flatten(1, 2), asked), 1))
        found[..., begin:end, :] = 0
        found[..., begin:end, :end] = answered[..., begin:end, :]
    return found
