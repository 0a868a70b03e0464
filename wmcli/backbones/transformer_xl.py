"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860) as the backbone of TSSM-XL (Deng et al. 2023, arXiv 2307.02064).

Pre-norm blocks with attention relative to distance, as in TransDreamer (Chen et al. 2022, arXiv 2202.09481). Query i
and key j stand d = i - j apart; R_d is a sinusoid of that distance, u and v are learned per head:

    score_ij = ((q_i + u) k_j + (q_i + v) W_r R_d) / sqrt(K)        0 <= d <= W

With `segment_length = 0` the memory is a sliding window. In each layer an element attends to itself and to the W =
`memory_length` elements before it. A stack of layers reaches layers * memory_length elements back. Gradients flow
equally far; detach the state with `map_state` to stop them.

With `segment_length = c` it is the paper's cache. A sequence is cut into segments of c elements, counted from the last
reset or from the first element of the state. In each layer an element attends to its own segment up to itself, and to
the last `memory_length` elements before that segment: W = memory_length + c - 1. The layer's inputs at those earlier
elements are constants (the paper's SG). No gradient reaches them, but W_k and W_v still learn from their keys and
values. Keys that a state carried over the end of a segment give no gradient at all.

In both modes results do not depend on how a sequence is cut into calls.

Axes: B batch, T time (elements), D width, H heads, K width of a head, W window, S keys, N blocks, L elements of a
block, Q queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.attention_weights import AttentionBackbone
from wmcli.backbones.base import BackboneSettings, BackboneSize, cache_dtype, for_each_block
from wmcli.errors import UsageError
from wmcli.kernels.attention import masked_attention
from wmcli.nn.attention_prior import (
    AnyAttentionPrior,
    AttentionPrior,
    NoPriorSettings,
    PriorSettings,
    scaled_attention,
    spread,
)
from wmcli.nn.dropout import dropout

INIT_STD = 0.02
CHUNK = 128  # queries attended together: a long sequence costs T (W + CHUNK), not T (W + T)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class TransformerXLSettings(BackboneSettings):
    """Settings of the Transformer-XL backbone."""

    kind: Literal["transformer-xl"] = "transformer-xl"
    """Attention with relative positions over a memory (TSSM-XL)."""
    heads: int = Field(default=8, ge=1)
    """Attention heads. [heads]"""
    head_width: int = Field(default=0, ge=0)
    """Width of a head; 0 divides the backbone's width among the heads. [features]"""
    ffn: int = Field(default=2, ge=1)
    """Width of the feed-forward layer. [backbone widths]"""
    activation: Literal["gelu", "relu"] = "gelu"
    """Activation of the feed-forward layer."""
    memory_length: int = Field(default=128, ge=1)
    """Earlier elements that each layer attends to, before the element or its segment. [elements]"""
    segment_length: int = Field(default=0, ge=0)
    """Length of a segment, with earlier segments as constants (the paper); 0 slides the memory with gradients.
    [elements]"""
    prior: AnyAttentionPrior = NoPriorSettings()
    """Prior of each head over distances, in addition to the relative scores."""

    @property
    def window(self) -> int:
        """W, the largest number of earlier elements that an element attends to."""
        return self.memory_length + max(self.segment_length - 1, 0)

    @property
    def size_note(self) -> str:
        return f"window of {self.window} elements"

    @property
    def width_step(self) -> int:
        return 1 if self.head_width else self.heads


class Memory(NamedTuple):
    """The state: keys and values that the next elements attend to, the newest last."""

    layers: tuple[Tensor, ...]  # one (B, 2, H, W, K) per layer, keys first
    length: Tensor  # (B,) int64: elements since the last reset; the last W of them are stored


class KeyRange(NamedTuple):
    """Keys visible to T queries, by index: from `begin` to the query's own."""

    begin: Tensor  # (B, T)
    own: Tensor | None  # (B, T): first key of the query's segment, with constants before it; None without segments


class TransformerXL(AttentionBackbone):
    """Transformer-XL whose state is a `Memory`. No call writes in place: old states always stay valid."""

    layers: Any  # nn.ModuleList of TransformerXLLayer
    prior: AttentionPrior | None

    def __init__(self, settings: TransformerXLSettings, size: BackboneSize) -> None:
        super().__init__()
        if not settings.head_width and size.width % settings.heads:
            raise UsageError(
                f"backbone.heads = {settings.heads}: must divide backbone.width = {size.width}, or set "
                "backbone.head_width."
            )
        self.width, self.max_length = size.width, None
        self.heads, self.head_width = settings.heads, settings.head_width or size.width // settings.heads
        self.memory, self.segment, self.window = settings.memory_length, settings.segment_length, settings.window
        self.layers = nn.ModuleList(TransformerXLLayer(settings, size, self.head_width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.prior = None
        if not isinstance(settings.prior, NoPriorSettings):
            self.prior = _prior(settings, settings.prior, size.layers)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def initial_state(self, batch: int) -> Memory:
        weight = self.norm.weight
        shape = (batch, 2, self.heads, self.window, self.head_width)
        # Zeros, not empty: an unused slot has weight 0 in attention, but 0 * NaN would be NaN.
        layers = tuple(torch.zeros(shape, device=weight.device, dtype=cache_dtype(weight)) for _ in self.layers)
        return Memory(layers, torch.zeros(batch, device=weight.device, dtype=torch.int64))

    def forward(self, x: Tensor, state: Memory | None, reset: Tensor | None = None) -> tuple[Tensor, Memory | None]:
        start = self._start(x, state, reset)
        stored = 0 if state is None else self.window
        visible = None if start is None else self._visible(start, x.shape[1], stored + x.shape[1])
        table = self._table()
        after = []
        for index, (layer, row) in enumerate(zip(self.layers, self._rows(), strict=True)):
            q, kv, fixed = layer.project(x, None if state is None else state.layers[index])
            y = layer.attend(q, kv, fixed, table, visible, row)
            if self.watch is not None:
                self.watch(index, partial(_attend_values, layer, q, kv[:, 0], table, visible, row), kv[:, 1])
            x = layer.finish(x, y)
            after.append(kv)
        return self.norm(x), self._remember(state, after, start)

    def step(self, x: Tensor, state: Memory | None, reset: Tensor | None = None) -> tuple[Tensor, Memory | None]:
        if reset is not None and state is not None:
            state = state._replace(length=state.length.masked_fill(reset, 0))
        y, state = self.forward(x[:, None], state)
        return y[:, 0], state

    def fork(self, x: Tensor, queries: Tensor, state: Memory | None) -> tuple[Tensor, Tensor, Memory | None]:
        (blocks, block), count = x.shape[1:3], queries.shape[-2]
        queries = for_each_block(queries, x).flatten(0, 1)  # (B N, Q, D)
        x = x.flatten(1, 2)
        # Every block's end needs a full window before it, of unused slots if necessary.
        before = self.initial_state(len(x)) if state is None else state
        start = self._start(x, before, None)
        assert start is not None
        visible = self._visible(start, x.shape[1], self.window + x.shape[1])
        # The state at the end of each block is the window of W keys that ends there. Its keys count from there.
        ends = block * torch.arange(1, blocks + 1, device=x.device)
        query_visible = self._visible((start - ends).flatten()[:, None], count, self.window + count)
        table = self._table()
        after = []

        def behind_each_block(kv: Tensor, new: Tensor) -> Tensor:
            windows = kv[:, :, :, block:].unfold(3, self.window, block).permute(0, 3, 1, 2, 5, 4)  # (B, N, 2, H, W, K)
            return torch.cat((windows, new.unflatten(0, (-1, blocks))), 4).flatten(0, 1)

        for old, layer, row in zip(before.layers, self.layers, self._rows(), strict=True):
            q, kv, fixed = layer.project(x, old)
            query_q, new, new_fixed = layer.project(queries)
            query_kv = behind_each_block(kv, new)
            query_fixed = query_kv if fixed is kv else behind_each_block(fixed, new_fixed)
            y = layer.attend(q, kv, fixed, table, visible, row)
            if layer is self.layers[-1]:  # other outputs of a block are not needed
                x, y = x[:, block - 1 :: block], y[:, :, block - 1 :: block]
            x = layer.finish(x, y)
            y = layer.attend(query_q, query_kv, query_fixed, table, query_visible, row)
            queries = layer.finish(queries, y)
            after.append(kv)
        answers = self.norm(queries).unflatten(0, (-1, blocks))
        return self.norm(x), answers, self._remember(state, after, start)

    def prior_matrix(self, count: int) -> Tensor:
        place = torch.arange(count, device=self.norm.weight.device)
        offset = place[:, None] - place
        visible = (offset >= 0) & (offset <= self.window)
        if self.segment:
            visible &= place >= (place - place % self.segment - self.memory)[:, None]
        if self.prior is None:
            values = torch.zeros(len(self.layers), self.heads, count, count, device=place.device)
        else:
            values = torch.cat([spread(row, offset.clamp(max=self.window)) for row in self.prior()])
        return values.masked_fill(~visible, float("nan"))

    def _start(self, x: Tensor, state: Memory | None, reset: Tensor | None) -> Tensor | None:
        """Return the index of the key at which each element's episode began, (B, T) or (B, 1).

        Keys are those of the state, then those of x (B, T, D). Episodes that began before them have negative indices.
        None if every episode began with the first element of x.
        """
        start = None if state is None else self.window - state.length[:, None]
        if reset is None:
            return start
        stored = 0 if state is None else self.window
        place = torch.arange(stored, stored + x.shape[1], device=x.device)
        return torch.where(reset, place, 0 if start is None else start).cummax(1).values

    def _visible(self, start: Tensor, queries: int, keys: int) -> KeyRange:
        """Return the keys visible to the elements of the last `queries` keys, whose episodes began at `start`."""
        start = start.expand(-1, queries)
        if not self.segment:
            return KeyRange(start, None)
        place = torch.arange(keys - queries, keys, device=start.device)
        own = place - (place - start) % self.segment
        return KeyRange(torch.maximum(start, own - self.memory), own)

    def _table(self) -> Tensor:
        """Return the sinusoids of the distances W ... 0: (W + 1, D)."""
        weight = self.norm.weight
        return _sinusoids(self.window, self.width, weight.device, weight.dtype)

    def _rows(self) -> list[Tensor] | list[None]:
        """Return each layer's prior by distance, W ... 0 like the table: (H, W + 1); None without a prior."""
        return [None] * len(self.layers) if self.prior is None else list(self.prior().flip(2))

    def _remember(self, state: Memory | None, after: list[Tensor], start: Tensor | None) -> Memory | None:
        if state is None:
            return None
        assert start is not None
        dtype = state.layers[0].dtype
        layers = tuple(kv[:, :, :, -self.window :].to(dtype) for kv in after)
        return Memory(layers, after[0].shape[3] - start[:, -1])


class TransformerXLLayer(nn.Module):
    """Relative attention and a feed-forward layer, each with a LayerNorm before it and a residual."""

    def __init__(self, settings: TransformerXLSettings, size: BackboneSize, head_width: int) -> None:
        super().__init__()
        width, inner, hidden = size.width, settings.heads * head_width, settings.ffn * size.width
        self.heads, self.dropout = settings.heads, size.dropout
        self.memory, self.segment, self.window = settings.memory_length, settings.segment_length, settings.window
        self.activation = ACTIVATIONS[settings.activation]
        self.scales = settings.prior.multiplies
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)  # query, key and value in one product
        self.distance = nn.Linear(width, inner, bias=False)  # W_r
        # Biases of the heads, flat as biases are, so that weight decay skips them.
        self.u = nn.Parameter(torch.empty(inner).normal_(std=INIT_STD))
        self.v = nn.Parameter(torch.empty(inner).normal_(std=INIT_STD))
        self.out = nn.Linear(inner, width, bias=False)
        self.ffn_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def project(self, x: Tensor, old: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to queries, keys and values.

        Args:
            x: (B, T, D).
            old: Keys and values of the state, (B, 2, H, W, K), or None.

        Returns:
            Queries (B, H, T, K); keys and values behind the old ones (B, 2, H, S, K); the same for later segments, with
            x and `old` as constants. The last two are one tensor where their gradients do not differ.
        """
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(0, 2, 3, 1, 4)
        q, kv = qkv[:, 0], qkv[:, 1:]
        kv = kv if old is None else _behind(old, kv)
        if not (self.segment and kv.requires_grad):
            return q, kv, kv
        weight = self.qkv.weight[self.out.in_features :]
        fixed = F.linear(self.attention_norm(constant(x)), weight).unflatten(-1, (2, self.heads, -1))
        fixed = fixed.permute(0, 2, 3, 1, 4)
        return q, kv, fixed if old is None else _behind(constant(old), fixed)

    def attend(
        self, q: Tensor, kv: Tensor, fixed: Tensor, table: Tensor, visible: KeyRange | None, row: Tensor | None = None
    ) -> Tensor:
        """Attend to the W keys before each query and to its own, as far as they are visible.

        Args:
            q: (B, H, T, K).
            kv: Keys and values (B, 2, H, S, K). The last T belong to the queries.
            fixed: `kv` as constants, or `kv` itself.
            table: Sinusoids, (W + 1, D).
            visible: Visible keys; None for T keys of episodes that began with the first key.
            row: The prior (H, W + 1), the farthest distance first, or None.

        Returns:
            (B, H, T, K).
        """
        first = kv.shape[3] - q.shape[2]  # the key of the first query
        u, v = (bias.unflatten(0, (self.heads, 1, -1)) for bias in (self.u, self.v))
        scores = self._distance_scores(q + v, table[max(self.window + 1 - kv.shape[3], 0) :])
        if row is not None:
            row = row[:, None, -scores.shape[3] :]  # (H, 1, distances)
            scores = (scores * row if self.scales else scores + row).to(scores.dtype)
        drop = self.dropout if self.training else 0.0
        outputs = []
        q = (q + u).to(q.dtype)
        for begin, end, low, own in self._parts(first, q.shape[2], visible is None):
            part, last = q[:, :, begin:end], first + end
            near = kv[:, :, :, low:last]
            bias = band(scores[:, :, begin:end])[..., low - last :]  # (B, H, queries, keys)
            weight = None
            if row is not None and self.scales:
                weight = band(row.expand(-1, end - begin, -1), 0.0)[..., low - last :]  # (H, queries, keys)
            if visible is not None:
                key = torch.arange(low, last, device=q.device)
                bias = bias.masked_fill((key < visible.begin[:, begin:end, None])[:, None], -math.inf)
            if visible is None and fixed is not kv:
                near = torch.cat((fixed[:, :, :, low:own], kv[:, :, :, own:last]), 3)
            elif visible is not None and visible.own is not None and fixed is not kv:
                # A key may be a constant for one query and not for the next. So all keys occur as constants, and those
                # that may be in a query's segment occur a second time as variables.
                apart = (key < visible.own[:, begin:end, None])[:, None]
                near = torch.cat((fixed[:, :, :, low:last], kv[:, :, :, own:last]), 3)
                variable = bias.masked_fill(apart, -math.inf)[..., own - last :]
                bias = torch.cat((bias.masked_fill(~apart, -math.inf), variable), 3)
                weight = None if weight is None else torch.cat((weight, weight[..., own - last :]), 2)
            if weight is not None:
                outputs.append(scaled_attention(part, near[:, 0], near[:, 1], weight, bias, drop))
            elif drop:
                outputs.append(F.scaled_dot_product_attention(part, near[:, 0], near[:, 1], bias, drop))
            else:
                outputs.append(masked_attention(part, near[:, 0], near[:, 1], bias))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _parts(self, first: int, count: int, aligned: bool) -> Iterator[tuple[int, int, int, int]]:
        """Yield ranges of queries that are attended together.

        Args:
            first: Index of the first query's key.
            count: Number of queries.
            aligned: Segments begin at the first key in every row.

        Yields:
            Begin and end of the queries, their first visible key, and the first key that may be in their own segment.
        """
        segment = self.segment if aligned and self.segment else max(count, 1)
        for start in range(0, count, segment):
            stop = min(start + segment, count)
            for begin in range(start, stop, CHUNK):
                low, own = first + begin - self.window, first + begin - self.segment + 1
                if aligned and self.segment:
                    low, own = start - self.memory, start
                yield begin, min(begin + CHUNK, stop), max(low, 0), max(own, 0)

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Apply the rest of the layer to x (B, T, D) and its attention y (B, H, T, K)."""
        x = x + self._drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self._drop(self.down(self.activation(self.up(self.ffn_norm(x)))))

    def _distance_scores(self, q: Tensor, table: Tensor) -> Tensor:
        """Return q W_r R_d / sqrt(K) for q (B, H, T, K) and each distance of the table (distances, D)."""
        weight = self.distance.weight.unflatten(0, (self.heads, -1))  # (H, K, D)
        (batch, _, count, k), (distances, width) = q.shape, table.shape
        q = q * k**-0.5
        # For a few queries (a step) it is cheaper to multiply them by W_r, for many to multiply the table.
        if batch * count * width * (k + distances) < k * distances * (width + batch * count):
            return (q @ weight) @ table.T
        return q @ (weight @ table.T)

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


def _attend_values(
    layer: TransformerXLLayer,
    q: Tensor,
    k: Tensor,
    table: Tensor,
    visible: KeyRange | None,
    row: Tensor | None,
    v: Tensor,
) -> Tensor:
    kv = torch.stack((k, v), 1)
    return layer.attend(q, kv, kv, table, visible, row)


def band(scores: Tensor, around: float = -math.inf) -> Tensor:
    """Shift each row of scores one column further right than the row above, and fill the rest with `around`.

    (..., T, W) -> (..., T, W - 1 + T): row i, column i + c of the result is row i, column c of the scores. So scores by
    distance, the farthest first, become scores by key, masked outside the window. This is the relative shift of
    Transformer-XL.
    """
    count, wide = scores.shape[-2], scores.shape[-1] - 1 + scores.shape[-2]
    # Rows are padded to one more than the result's length. Read in rows of that length, each starts one column later.
    padded = F.pad(scores, (0, count), value=around).flatten(-2)
    return padded[..., : count * wide].unflatten(-1, (count, wide))


def _prior(settings: TransformerXLSettings, prior: PriorSettings, layers: int) -> AttentionPrior:
    key = "backbone.prior"
    if prior.unit == "step":
        raise UsageError(f"{key}.unit = step: the memory knows distances, not where blocks begin; set it to token.")
    if prior.leaks:
        raise UsageError(f"{key}.leak = true: it reproduces code with the backbone transformer; set it to false.")
    return AttentionPrior(prior, layers, settings.heads, settings.window + 1, key)


def _behind(old: Tensor, new: Tensor) -> Tensor:
    """Return keys and values (B, 2, H, T, K) appended to those of the state (B, 2, H, W, K)."""
    return torch.cat((old.to(new.dtype), new), 3)


def constant(x: Tensor) -> Tensor:
    """Return x without a gradient, as a segment's constant. Tests of derivatives replace it by the identity."""
    return x.detach()


@functools.cache
def _sinusoids(reach: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return (reach + 1, width): for the distances reach ... 0, sines and then cosines of falling frequency."""
    with torch.inference_mode(False):  # the cached table must not depend on the first caller's mode
        distance = torch.arange(reach, -1, -1, device=device, dtype=torch.float64)
        frequency = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
        angle = distance[:, None] * frequency
        return torch.cat((angle.sin(), angle.cos()), 1)[:, :width].to(dtype)
