"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860) as the backbone of TSSM-XL (Deng et al. 2023, arXiv 2307.02064).

Pre-norm blocks with attention relative to distance, as in TransDreamer (Chen et al. 2022, arXiv 2202.09481). Query i
and key j stand d = i - j apart; R_d is a sinusoid of that distance, u and v are learned per head:

    score_ij = ((q_i + u) k_j + (q_i + v) W_r R_d) / sqrt(K)        0 <= d <= memory

The memory is a sliding window: in each layer an element sees the `memory` elements before it and itself. So nothing
depends on where a sequence is cut, and a stack of layers reaches layers * memory elements back. The cache of the paper
works by segments: an element sees its own segment up to itself and `memory` elements before that segment, so its view
depends on where the cuts are. The paper also stops gradients between segments; whoever trains segment by segment
detaches the state with `map_state`.

Axes: B batch, T time (elements), D width, H heads, K width of a head, M memory, S keys, N blocks, L elements of a
block, Q queries.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, Size, cache_dtype, for_each_block
from wmcli.config import Section
from wmcli.errors import UsageError
from wmcli.kernels.attention import masked_attention
from wmcli.nn.attention_prior import AttentionPrior, AttentionPriorSettings, scaled_attention
from wmcli.nn.dropout import dropout

INIT_STD = 0.02
CHUNK = 128  # queries attended together: a long sequence costs T (M + CHUNK), not T (M + T)


class TransformerXLSettings(Section):
    """What is particular to the Transformer-XL backbone."""

    heads: int = Field(default=8, ge=1)
    """Attention heads."""
    head_width: int = Field(default=0, ge=0)
    """Width of a head; 0 shares the backbone's width among the heads."""
    ffn: int = Field(default=2, ge=1)
    """Width of the feed-forward layer, in multiples of the backbone's width."""
    memory: int = Field(default=128, ge=1)
    """Elements before itself that an element attends to, in each layer."""
    prior: AttentionPriorSettings = AttentionPriorSettings()
    """What each head expects of distance, on top of what its scores make of it; in units of elements."""


class Memory(NamedTuple):
    """The state: what the next elements can see. The newest element stands last."""

    layers: tuple[Tensor, ...]  # one (B, 2, H, M, K) per layer, keys first
    length: Tensor  # (B,) int64: how many are in use, the last ones


class TransformerXL(Backbone):
    """The state is a `Memory`. Nothing is written in place: old states always stay valid."""

    layers: Any  # nn.ModuleList of TransformerXLLayer
    prior: AttentionPrior | None

    def __init__(self, settings: TransformerXLSettings, size: Size) -> None:
        super().__init__()
        if not settings.head_width and size.width % settings.heads:
            raise UsageError(
                f"backbone.transformer_xl.heads = {settings.heads}: must divide backbone.width = {size.width}, or set "
                "backbone.transformer_xl.head_width."
            )
        self.width, self.max_length = size.width, None
        self.heads, self.head_width = settings.heads, settings.head_width or size.width // settings.heads
        self.memory = settings.memory
        self.layers = nn.ModuleList(TransformerXLLayer(settings, size, self.head_width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.prior = None if settings.prior.kind == "none" else _prior(settings, size.layers)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def initial_state(self, batch: int) -> Memory:
        weight = self.norm.weight
        shape = (batch, 2, self.heads, self.memory, self.head_width)
        # Zeros, not empty: an unused slot has weight 0 in attention, but 0 * NaN would be NaN.
        layers = tuple(torch.zeros(shape, device=weight.device, dtype=cache_dtype(weight)) for _ in self.layers)
        return Memory(layers, torch.zeros(batch, device=weight.device, dtype=torch.int64))

    def forward(self, x: Tensor, state: Memory | None, reset: Tensor | None = None) -> tuple[Tensor, Memory | None]:
        segment = self._segments(x, state, reset)
        table = self._table()
        after = []
        for index, (layer, row) in enumerate(zip(self.layers, self._rows(), strict=True)):
            q, kv = layer.project(x)
            if state is not None:
                kv = _behind(state.layers[index], kv)
            x = layer.finish(x, layer.attend(q, kv, table, segment, row))
            after.append(kv)
        return self.norm(x), self._remember(state, after, segment)

    def step(self, x: Tensor, state: Memory | None, reset: Tensor | None = None) -> tuple[Tensor, Memory | None]:
        if reset is not None and state is not None:
            state = state._replace(length=state.length.masked_fill(reset, 0))
        y, state = self.forward(x[:, None], state)
        return y[:, 0], state

    def fork(self, x: Tensor, queries: Tensor, state: Memory | None) -> tuple[Tensor, Tensor, Memory | None]:
        (blocks, block), count = x.shape[1:3], queries.shape[-2]
        asked = for_each_block(queries, x).flatten(0, 1)  # (B N, Q, D)
        x = x.flatten(1, 2)
        # Every block's end needs a full window before it, be it of unused slots.
        before = self.initial_state(len(x)) if state is None else state
        segment = self._segments(x, before, None)
        assert segment is not None
        # What the state is at the end of each block: the window of M keys that ends there.
        windows = F.pad(segment[:, block:].unfold(1, self.memory, block), (0, count)).flatten(0, 1)  # (B N, M + Q)
        table = self._table()
        after = []
        for old, layer, row in zip(before.layers, self.layers, self._rows(), strict=True):
            q, kv = layer.project(x)
            kv = _behind(old, kv)
            asked_q, asked_kv = layer.project(asked)
            ends = kv[:, :, :, block:].unfold(3, self.memory, block).permute(0, 3, 1, 2, 5, 4)  # (B, N, 2, H, M, K)
            asked_kv = torch.cat((ends, asked_kv.unflatten(0, (-1, blocks))), 4).flatten(0, 1)
            y = layer.attend(q, kv, table, segment, row)
            if layer is self.layers[-1]:  # what else stands in a block is not asked for
                x, y = x[:, block - 1 :: block], y[:, :, block - 1 :: block]
            x = layer.finish(x, y)
            asked = layer.finish(asked, layer.attend(asked_q, asked_kv, table, windows, row))
            after.append(kv)
        answers = self.norm(asked).unflatten(0, (-1, blocks))
        return self.norm(x), answers, self._remember(state, after, segment)

    def _segments(self, x: Tensor, state: Memory | None, reset: Tensor | None) -> Tensor | None:
        """Numbers for the keys (B, S), those of the state and those of x (B, T, D): equal ones may see each other.

        The unused slots of a state have -1, all else counts the resets so far. None: everything is one segment.
        """
        if state is None:
            return None if reset is None else reset.cumsum(1)
        slots = torch.arange(self.memory, device=x.device)
        held = torch.where(slots >= self.memory - state.length[:, None], 0, -1)
        return F.pad(held, (0, x.shape[1])) if reset is None else torch.cat((held, reset.cumsum(1)), 1)

    def _table(self) -> Tensor:
        """The sinusoids of the distances M ... 0: (M + 1, D)."""
        weight = self.norm.weight
        return _sinusoids(self.memory, self.width, weight.device, weight.dtype)

    def _rows(self) -> list[Tensor] | list[None]:
        """Each layer's prior by distance, M ... 0 like the table: (H, M + 1); None where there is none."""
        return [None] * len(self.layers) if self.prior is None else list(self.prior().flip(2))

    def _remember(self, state: Memory | None, after: list[Tensor], segment: Tensor | None) -> Memory | None:
        if state is None:
            return None
        assert segment is not None
        dtype = state.layers[0].dtype
        layers = tuple(kv[:, :, :, -self.memory :].to(dtype) for kv in after)
        return Memory(layers, (segment[:, -self.memory :] == segment[:, -1:]).sum(1))


class TransformerXLLayer(nn.Module):
    """Relative attention and a feed-forward layer, each with LayerNorm before and a residual around."""

    def __init__(self, settings: TransformerXLSettings, size: Size, head_width: int) -> None:
        super().__init__()
        width, inner, hidden = size.width, settings.heads * head_width, settings.ffn * size.width
        self.heads, self.memory, self.dropout = settings.heads, settings.memory, size.dropout
        self.scales = settings.prior.form == "scale"
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)  # query, key and value in one product
        self.distance = nn.Linear(width, inner, bias=False)  # W_r
        # Biases of the heads, kept flat as biases are, so that weight decay leaves them alone.
        self.u = nn.Parameter(torch.empty(inner).normal_(std=INIT_STD))
        self.v = nn.Parameter(torch.empty(inner).normal_(std=INIT_STD))
        self.out = nn.Linear(inner, width, bias=False)
        self.ffn_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, D) -> queries (B, H, T, K), keys and values (B, 2, H, T, K)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(0, 2, 3, 1, 4)
        return qkv[:, 0], qkv[:, 1:]

    def attend(self, q: Tensor, kv: Tensor, table: Tensor, segment: Tensor | None, row: Tensor | None = None) -> Tensor:
        """Each q (B, H, T, K) attends to the M keys before it and its own, as far as they are of its segment.

        kv (B, 2, H, S, K) are keys and values, the last T of them those of the queries; table (M + 1, D); segment
        (B, S) or None; row (H, M + 1) the prior, the farthest first, or None. Returns (B, H, T, K).
        """
        first = kv.shape[3] - q.shape[2]  # the key of the first query
        u, v = (bias.unflatten(0, (self.heads, 1, -1)) for bias in (self.u, self.v))
        scores = self._distance_scores(q + v, table[max(self.memory + 1 - kv.shape[3], 0) :])
        if row is not None:
            row = row[:, None, -scores.shape[3] :]  # (H, 1, distances)
            scores = (scores * row if self.scales else scores + row).to(scores.dtype)
        drop = self.dropout if self.training else 0.0
        outputs = []
        q = (q + u).to(q.dtype)
        for part, by_distance in zip(q.split(CHUNK, 2), scores.split(CHUNK, 2), strict=True):
            last = first + part.shape[2]
            keys = slice(max(first - self.memory, 0), last)
            near = kv[:, :, :, keys]
            bias = band(by_distance)[..., -near.shape[3] :]  # (B, H, queries, keys)
            if segment is not None:
                apart = segment[:, first:last, None] != segment[:, None, keys]
                bias = bias.masked_fill(apart[:, None], float("-inf"))
            if row is not None and self.scales:
                weight = band(row.expand(-1, part.shape[2], -1), 0.0)[..., -near.shape[3] :]  # (H, queries, keys)
                outputs.append(scaled_attention(part, near[:, 0], near[:, 1], weight, bias, drop))
            elif drop:
                outputs.append(F.scaled_dot_product_attention(part, near[:, 0], near[:, 1], bias, drop))
            else:
                outputs.append(masked_attention(part, near[:, 0], near[:, 1], bias))
            first = last
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """What follows the attention y (B, H, T, K) of x (B, T, D)."""
        x = x + self._drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self._drop(self.down(F.gelu(self.up(self.ffn_norm(x)))))

    def _distance_scores(self, q: Tensor, table: Tensor) -> Tensor:
        """q W_r R_d / sqrt(K) for q (B, H, T, K) and each distance of the table (distances, D)."""
        weight = self.distance.weight.unflatten(0, (self.heads, -1))  # (H, K, D)
        (batch, _, count, k), (distances, width) = q.shape, table.shape
        q = q * k**-0.5
        # A few queries (a step) go through W_r themselves; for many it is cheaper to take the table through it.
        if batch * count * width * (k + distances) < k * distances * (width + batch * count):
            return (q @ weight) @ table.T
        return q @ (weight @ table.T)

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


def band(scores: Tensor, around: float = -math.inf) -> Tensor:
    """Moves each row of scores one further to the right than the row above, and puts -inf, or `around`, all around.

    (..., T, W) -> (..., T, W - 1 + T): row i, column i + c of the result is row i, column c of the scores. So scores by
    distance, the farthest first, become scores by key, and what lies outside of the window is masked. (The relative
    shift of Transformer-XL.)
    """
    count, wide = scores.shape[-2], scores.shape[-1] - 1 + scores.shape[-2]
    # Rows one longer than those wanted: read as rows of the length wanted, each starts one later than the last.
    padded = F.pad(scores, (0, count), value=around).flatten(-2)
    return padded[..., : count * wide].unflatten(-1, (count, wide))


def _prior(settings: TransformerXLSettings, layers: int) -> AttentionPrior:
    key = "backbone.transformer_xl.prior"
    if settings.prior.unit == "step":
        raise UsageError(f"{key}.unit = step: the memory knows distances, not where blocks begin; set it to token.")
    if settings.prior.leak:
        raise UsageError(f"{key}.leak = true: it reproduces code with the backbone transformer; set it to false.")
    return AttentionPrior(settings.prior, layers, settings.heads, settings.memory + 1, key)


def _behind(old: Tensor, new: Tensor) -> Tensor:
    """Keys and values (B, 2, H, T, K) behind those of the state (B, 2, H, M, K)."""
    return torch.cat((old.to(new.dtype), new), 3)


@functools.cache
def _sinusoids(reach: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(reach + 1, width): the distances reach ... 0, each as sines and then cosines of falling frequency."""
    with torch.inference_mode(False):  # the first caller's mode must not stick to the table
        distance = torch.arange(reach, -1, -1, device=device, dtype=torch.float64)
        frequency = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
        angle = distance[:, None] * frequency
        return torch.cat((angle.sin(), angle.cos()), 1)[:, :width].to(dtype)
