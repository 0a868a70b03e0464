"""Causal attention with learned absolute positions, or with rotary ones (Su et al. 2021, arXiv 2104.09864).

The defaults are the GPT of IRIS (Micheli et al. 2023, arXiv 2209.00588). The transformer of STORM (Zhang et al. 2023,
arXiv 2310.09615) has `heads = 8`, `ffn = 2`, `norm = "post"`, `activation = "relu"`, `attention_bias = false`,
`embedding_norm = true`, `norm_eps = 1e-6` and `initialization = "torch"`. STORM has no dropout after the positions. The
transformer of UniZero (Pu et al. 2024, arXiv 2406.10667) has `heads = 8` and `activation = "gelu_tanh"`. De Dios
Allegue et al. (2025, arXiv 2511.06946) added a `prior` to it.

Axes: B batch, T time (elements), D width, H heads, K width of a head, S slots of the key/value cache, N blocks, L
elements of a block, Q queries, R offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.attention_weights import AttentionBackbone
from wmcli.backbones.base import BackboneSettings, BackboneSize, cache_dtype, for_each_block, replace_rows
from wmcli.errors import UsageError
from wmcli.kernels.attention import attention, masked_attention
from wmcli.nn.attention_prior import AnyAttentionPrior, AttentionPrior, NoPriorSettings, scaled_attention, spread
from wmcli.nn.dropout import dropout

INIT_STD = 0.02
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class TransformerSettings(BackboneSettings):
    """Settings of the transformer backbone."""

    kind: Literal["transformer"] = "transformer"
    """Attention over learned or rotary positions (IRIS, STORM, UniZero)."""
    heads: int = Field(default=4, ge=1)
    """Attention heads. [heads]"""
    positions: Literal["learned", "rotary"] = "learned"
    """Add a learned vector to each element, or rotate queries and keys by angles that grow with the position, so that
    attention depends on distances alone."""
    ffn: int = Field(default=4, ge=1)
    """Width of the feed-forward layer. [backbone widths]"""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Activation of the feed-forward layer; gelu_tanh approximates gelu by a tanh."""
    norm: Literal["pre", "post"] = "pre"
    """LayerNorm before each sublayer and once at the end (pre), or after each sublayer's residual (post)."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Constant added to the variance in each LayerNorm."""
    embedding_norm: bool = False
    """Apply a LayerNorm after the positions are added, before the dropout."""
    attention_bias: bool = True
    """Use biases in the input and output projections of attention."""
    initialization: Literal["gpt", "torch"] = "gpt"
    """Initialization: normal with deviation 0.02 and zero biases (gpt), or torch's defaults."""
    prior: AnyAttentionPrior = NoPriorSettings()
    """Prior of each head over distances."""

    @property
    def width_step(self) -> int:
        return self.heads


class Cache(NamedTuple):
    """The state: keys and values in slots of a fixed number, and how many of them are in use.

    The host counts `filled`, so attention reads only the slots in use and nothing waits for the device. It is an upper
    bound of `length`, and equals it in every row while `equal_lengths`.
    """

    layers: tuple[Tensor, ...]  # one (B, 2, H, max_length, K) per layer, keys first
    length: Tensor  # (B,) int64
    filled: int
    equal_lengths: bool


# Puts the new keys and values (B, 2, H, T, K) of a layer into its part of the cache. Returns the keys and values to
# attend to, and the layer's new part.
Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Maps a layer's queries (B, H, T, K), keys and values (B, H, S, K), and its row (H, R) of the prior's table, if any, to
# the outputs of attention (B, H, T, K).
Attend = Callable[..., Tensor]


class Transformer(AttentionBackbone):
    """Transformer whose state is a `Cache` for at most `max_length` elements.

    With gradients on, every call makes a new cache and old ones stay valid. With gradients off, a call writes the cache
    in place, behind its last element. An old state may still be read, for example by another fork. Of several
    continuations of one state only the newest is valid. After a reset of a row, its older states are invalid. Clone a
    state with `map_state` to branch it.

    Too many elements raise ValueError. After a reset rows differ in length, and only the device has the lengths: then
    torch's index check stops a row that grows past `max_length`.
    """

    max_length: int
    layers: Any  # nn.ModuleList of TransformerLayer
    prior: AttentionPrior | None

    def __init__(self, settings: TransformerSettings, size: BackboneSize) -> None:
        super().__init__()
        if size.width % settings.heads:
            raise UsageError(f"backbone.heads = {settings.heads}: must divide backbone.width = {size.width}.")
        self.width, self.max_length = size.width, size.max_length
        self.heads, self.dropout = settings.heads, size.dropout
        self.positions = nn.Embedding(size.max_length, size.width) if settings.positions == "learned" else None
        if self.positions is None and (size.width // settings.heads) % 2:
            raise UsageError(
                f"backbone.positions = 'rotary': the width of a head, {size.width} / {settings.heads}, must be even."
            )
        self.layers = nn.ModuleList(TransformerLayer(settings, size) for _ in range(size.layers))
        norm_eps = settings.norm_eps
        self.embedding_norm = nn.LayerNorm(size.width, norm_eps) if settings.embedding_norm else nn.Identity()
        self.norm = nn.LayerNorm(size.width, norm_eps) if settings.norm == "pre" else nn.Identity()
        self.prior, self.unit = None, 1  # elements
        if not isinstance(settings.prior, NoPriorSettings):
            self.unit = size.block if settings.prior.unit == "step" else 1
            reach, key = -(-size.max_length // self.unit), "backbone.prior"
            self.prior = AttentionPrior(settings.prior, size.layers, settings.heads, reach, key)
        if settings.initialization == "gpt":
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=INIT_STD)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def initial_state(self, batch: int) -> Cache:
        weight = self.layers[0].qkv.weight
        shape = (batch, 2, self.heads, self.max_length, self.width // self.heads)
        # Zeros, not empty: an unused slot has weight 0 in attention, but 0 * NaN would be NaN.
        layers = tuple(torch.zeros(shape, device=weight.device, dtype=cache_dtype(weight)) for _ in self.layers)
        return Cache(layers, torch.zeros(batch, device=weight.device, dtype=torch.int64), 0, True)

    def forward(self, x: Tensor, state: Cache | None, reset: Tensor | None = None) -> tuple[Tensor, Cache | None]:
        count = x.shape[1]
        if reset is not None:
            return self._forward_with_resets(x, state, reset)
        if state is None:
            self._check(count, 0)
            places = torch.arange(count, device=x.device)
            attend = self._masked(None, places, places, whole=True) if self._needs_mask() else attention
            return self._run(x, places, attend)
        slots, extend, used = self._append(state, count)
        attend = attention
        if self._needs_mask() or not state.equal_lengths:
            places = torch.arange(used, device=x.device)
            attend = self._masked(places <= slots[..., None], slots, places)  # (T, S) or (B, T, S)
        return self._run(x, slots, attend, _grown(state, count, used), extend)

    def read(self, x: Tensor, state: Cache | None, reset: Tensor | None = None) -> tuple[Tensor, Cache | None]:
        if reset is None:
            return super().read(x, state)
        last = torch.arange(x.shape[1] - 1, x.shape[1], device=x.device)
        y, state = self._forward_with_resets(x, state, reset, last)
        return y[:, 0], state

    def step(self, x: Tensor, state: Cache | None, reset: Tensor | None = None) -> tuple[Tensor, Cache | None]:
        if reset is not None and state is not None:
            state = state._replace(length=state.length.masked_fill(reset, 0), equal_lengths=False)
        y, state = self.forward(x[:, None], state)
        return y[:, 0], state

    def fork(self, x: Tensor, queries: Tensor, state: Cache | None) -> tuple[Tensor, Tensor, Cache | None]:
        if self.training and self._leaks():
            raise UsageError(
                "backbone.prior.leak = true: this world model answers queries in parallel, for which the "
                "leak is not defined; set it to false."
            )
        queries = for_each_block(queries, x)
        (blocks, block), count = x.shape[1:3], queries.shape[2]
        real = blocks * block
        if state is None:
            self._check(real + count, 0)
            slots, extend, used, cache = torch.arange(real, device=x.device), None, real, None
        else:
            if state.equal_lengths:
                self._check(real + count, state.filled)
            slots, extend, used = self._append(state, real)
            cache = _grown(state, real, used)
        # Each block's queries follow its last element and attend to the same keys as that element ...
        ends = slots[..., block - 1 :: block, None]  # (N, 1) or (B, N, 1)
        query_places = (ends + 1 + torch.arange(count, device=x.device)).flatten(-2)  # (N Q,) or (B, N Q)
        limit = torch.cat((slots, ends.expand(*ends.shape[:-1], count).flatten(-2)), -1)
        places = torch.arange(used, device=x.device)
        stored = places <= limit[..., None]  # (T, S) or (B, T, S), T = N L + N Q
        # ... and, causally, to each other.
        among = torch.block_diag(*torch.ones(blocks, count, count, device=x.device).tril()).bool()
        among = F.pad(among, (0, 0, real, 0)).expand(*stored.shape[:-1], -1)  # real elements attend to no query
        positions = torch.cat((slots, query_places), -1)
        elements = torch.arange(real + blocks * count, device=x.device)
        y, cache = self._run(
            torch.cat((x.flatten(1, 2), queries.flatten(1, 2)), 1),
            positions,
            self._masked(torch.cat((stored, among), -1), positions, places, query_places),
            cache,
            extend,
            torch.cat((elements[block - 1 : real : block], elements[real:])),
        )
        y, answers = y.split((blocks, blocks * count), 1)
        return y, answers.unflatten(1, (blocks, count)), cache

    def prior_matrix(self, count: int) -> Tensor:
        places = torch.arange(count, device=self.layers[0].qkv.weight.device)
        visible = places <= places[:, None]
        if self.prior is None:
            values = torch.zeros(len(self.layers), self.heads, count, count, device=places.device)
        else:
            offset = places[:, None] // self.unit - places // self.unit
            values = torch.cat([spread(row, offset) for row in self.prior()])
            if self._leaks():
                return values.masked_fill(~visible, 0.0)
        return values.masked_fill(~visible, float("nan"))

    def replace_rows(self, state: Cache, rows: Tensor, fresh: Cache) -> Cache:
        equal_lengths = state.equal_lengths and fresh.equal_lengths and state.filled == fresh.filled
        return replace_rows(state, rows, fresh)._replace(
            filled=max(state.filled, fresh.filled), equal_lengths=equal_lengths
        )

    # -- the layers ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        cache: Cache | None = None,
        extend: Extend | None = None,
        outputs: Tensor | None = None,
    ) -> tuple[Tensor, Cache | None]:
        """Run all layers on x (B, T, D) at positions (T,) or (B, T).

        `outputs` are the indices of the elements to return; None returns all T.
        """
        if self.positions is not None:
            x = x + self.positions(positions)
        turn = None if self.positions is not None else _turn(positions, self.width // self.heads)
        x = dropout(self.embedding_norm(x), self.dropout, self.training)
        parts = []
        rows = () if self.prior is None else self.prior().unbind()  # made once for all layers
        for index, layer in enumerate(self.layers):
            q, kv = layer.project(x)
            if turn is not None:
                q, kv = _rotate(q, turn), torch.stack((_rotate(kv[:, 0], turn), kv[:, 1]), 1)
            if cache is not None:
                assert extend is not None
                kv, part = extend(cache.layers[index], kv)
                parts.append(part)
            row = rows[index : index + 1]
            y = attend(q, *kv.unbind(1), *row)
            if self.watch is not None:
                self.watch(index, partial(_attend_values, attend, q, kv[:, 0], row), kv[:, 1])
            if outputs is not None and layer is self.layers[-1]:
                x, y = x[:, outputs], y[:, :, outputs]
            x = layer.finish(x, y)
        return self.norm(x), None if cache is None else cache._replace(layers=tuple(parts))

    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _leaks(self) -> bool:
        return self.prior is not None and self.prior.settings.leaks

    def _needs_mask(self) -> bool:
        """Return whether `kernels.attention`, without dropout and without most priors, does not suffice."""
        return self._drops() or (self.prior is not None and not self.prior.by_distance)

    def _masked(self, mask: Tensor | None, queries: Tensor, *keys: Tensor, whole: bool = False) -> Attend:
        """Return attention under a mask, with dropout in training.

        Args:
            mask: (T, S) or (B, T, S), True for visible keys; None is causal.
            queries: Positions of the queries, (T,) or (B, T).
            keys: Positions of the keys, S in all, each (...,) or (B, ...).
            whole: Queries and keys are all elements of a fresh sequence, in which a prior may leak.
        """
        if self.prior is not None:
            places = torch.cat([part.expand(*queries.shape[:-1], -1) for part in keys], -1)
            mask = places <= queries[:, None] if mask is None else mask
            offset = queries[..., :, None] // self.unit - places[..., None, :] // self.unit
            return partial(self._attend_under_prior, offset=offset, mask=mask, leak=whole and self._leaks())
        if mask is not None and mask.dim() == 3:
            mask = mask[:, None]  # (B, 1, T, S)
        if self._drops():
            return partial(_attention_with_dropout, mask=mask, chance=self.dropout)
        return partial(masked_attention, mask=mask)

    def _attend_under_prior(
        self, q: Tensor, k: Tensor, v: Tensor, row: Tensor, offset: Tensor, mask: Tensor, leak: bool
    ) -> Tensor:
        """Attend under a prior, as an `Attend`.

        Args:
            q: (B, H, T, K).
            k: (B, H, S, K).
            v: (B, H, S, K).
            row: The prior by offset, (H, R).
            offset: (T, S) or (B, T, S).
            mask: (T, S) or (B, T, S).
            leak: Give keys after the query the score 0 instead of a mask; needs T = S.
        """
        assert self.prior is not None
        drop = self.dropout if self._drops() else 0.0
        if mask.dim() == 3:
            mask = mask[:, None]  # (B, 1, T, S)
        values = spread(row, offset)
        if self.prior.settings.multiplies:
            if leak:
                values, mask = values.masked_fill(~mask, 0.0), mask | mask.mT
            return scaled_attention(q, k, v, values, mask, drop)
        bias = values.masked_fill(~mask, float("-inf")).to(q.dtype)
        if drop:
            return _attention_with_dropout(q, k, v, bias, drop)
        return masked_attention(q, k, v, bias)

    # -- the cache -----------------------------------------------------------------------------------------------------

    def _append(self, state: Cache, count: int) -> tuple[Tensor, Extend, int]:
        """Allot slots to `count` new elements.

        Keys and values beyond `count` belong to queries. They take part in attention but are not written.

        Returns:
            Slots (T,) or (B, T), the function that writes them, and the number of slots in use afterwards.
        """
        steps = torch.arange(count, device=state.length.device)
        if state.equal_lengths:
            self._check(count, state.filled)
            slots = steps + state.filled
        else:
            self._check(count, 0)
            slots = state.length[:, None] + steps
        rows = torch.arange(len(state.length), device=state.length.device)[:, None]
        used = min(state.filled + count, self.max_length)

        def extend(part: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
            new = kv[:, :, :, :count].to(part.dtype)
            in_place = not torch.is_grad_enabled() and not part.requires_grad
            in_place = in_place and part.is_inference() == torch.is_inference_mode_enabled()
            if not in_place:
                part = part.clone()
            if state.equal_lengths:
                part[:, :, :, state.filled : used] = new
            else:
                # By index, since torch's scatter takes many times as long in bfloat16 on a CPU.
                part[rows, :, :, slots] = new.permute(0, 3, 1, 2, 4)
            stored = part[:, :, :, :used].to(kv.dtype)
            return (stored if count == kv.shape[3] else torch.cat((stored, kv[:, :, :, count:]), 3)), part

        return slots, extend, used

    def _forward_with_resets(
        self, x: Tensor, state: Cache | None, reset: Tensor, outputs: Tensor | None = None
    ) -> tuple[Tensor, Cache | None]:
        """Run `forward` with resets. `outputs` as in `_run`."""
        count = x.shape[1]
        self._check(count, 0)
        steps = torch.arange(count, device=x.device)
        start = torch.where(reset, steps, -1).cummax(1).values  # (B, T): the last reset so far, -1 before the first
        length = torch.zeros(len(x), device=x.device, dtype=torch.int64) if state is None else state.length
        positions = torch.where(start < 0, length[:, None] + steps, steps - start)
        if state is None and not self._needs_mask():
            return self._run(x, positions, partial(attention, reset=reset), outputs=outputs)
        mask = (steps <= steps[:, None]) & (steps >= start[..., None])  # (B, T, T)
        if state is None:
            attend = self._masked(mask, positions, positions, whole=self.training)
            return self._run(x, positions, attend, outputs=outputs)
        slots = torch.arange(state.filled, device=x.device)
        stored = (slots < length[:, None])[:, None] & (start < 0)[..., None]  # (B, T, S): the cache, until a reset
        # The cache retains the elements since the last reset: slot s takes element s + T - (new length), if any.
        length = positions[:, -1] + 1
        used = min(state.filled + count, self.max_length)
        source = torch.arange(used, device=x.device) + (count - length)[:, None]  # (B, used)
        stays = (source >= 0) & (source < count)
        source, rows = source.clamp(0, count - 1), torch.arange(len(x), device=x.device)[:, None]

        def extend(part: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
            attended = torch.cat((part[:, :, :, : state.filled].to(kv.dtype), kv), 3)
            new = kv.to(part.dtype)[rows, :, :, source].permute(0, 2, 3, 1, 4)
            after = part.clone()
            after[:, :, :, :used] = torch.where(stays[:, None, None, :, None], new, part[:, :, :, :used])
            return attended, after

        cache = Cache(state.layers, length, used, False)
        attend = self._masked(torch.cat((stored, mask), -1), positions, slots, positions)
        return self._run(x, positions, attend, cache, extend, outputs)

    def _check(self, count: int, filled: int) -> None:
        if filled + count > self.max_length:
            raise ValueError(
                f"{count} elements (queries included) after {filled} do not fit: this transformer was built for "
                f"max_length = {self.max_length}."
            )


def _turn(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (1, T, K / 2) or (B, 1, T, K / 2) of the angles at positions (T,) or (B, T)."""
    rate = 10_000.0 ** -(torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angle = positions[..., None, :, None] * rate
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair of features (i, i + K / 2) of x (B, H, T, K) by its angle, at least in float32."""
    cos, sin = turn
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


def _attend_values(attend: Attend, q: Tensor, k: Tensor, row: tuple[Tensor, ...], v: Tensor) -> Tensor:
    return attend(q, k, v, *row)


def _grown(state: Cache, count: int, filled: int) -> Cache:
    return state._replace(length=state.length + count, filled=filled)


def _attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, chance: float) -> Tensor:
    """Attend with dropout of the weights.

    Args:
        q: (B, H, T, K).
        k: (B, H, S, K).
        v: (B, H, S, K).
        mask: (..., T, S), True for visible keys, or numbers added to the scores; None is causal.
        chance: Probability of dropout.

    Returns:
        (B, H, T, K).
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, mask, chance, is_causal=mask is None)
    # On a CPU torch's own attention with dropout always multiplies in float32 and draws a number for every weight.
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    with torch.autocast("cpu", enabled=False):
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        weight = (q * q.shape[3] ** -0.5 @ k.mT + mask).softmax(-1)
        return dropout(weight, chance, True) @ v


class TransformerLayer(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual and a LayerNorm before or after it."""

    def __init__(self, settings: TransformerSettings, size: BackboneSize) -> None:
        super().__init__()
        width, hidden = size.width, settings.ffn * size.width
        self.heads, self.dropout = settings.heads, size.dropout
        self.norm_first, self.activation = settings.norm == "pre", ACTIVATIONS[settings.activation]
        self.attention_norm = nn.LayerNorm(width, settings.norm_eps)
        self.qkv = nn.Linear(width, 3 * width, settings.attention_bias)  # query, key and value in one product
        self.out = nn.Linear(width, width, settings.attention_bias)
        self.ffn_norm = nn.LayerNorm(width, settings.norm_eps)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, K), and keys and values (B, 2, H, T, K), of x (B, T, D)."""
        x = self.attention_norm(x) if self.norm_first else x
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(0, 2, 3, 1, 4)
        return qkv[:, 0], qkv[:, 1:]

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Apply the rest of the layer to x (B, T, D) and its attention y (B, H, T, K)."""
        x = x + self._drop(self.out(y.transpose(1, 2).flatten(2)))
        if self.norm_first:
            return x + self._feed_forward(self.ffn_norm(x))
        x = self.attention_norm(x)
        return self.ffn_norm(x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._drop(self.down(self.activation(self.up(x))))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)
