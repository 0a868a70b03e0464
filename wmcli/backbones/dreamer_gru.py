"""The recurrence of Dreamer's RSSM: gated recurrent units with a LayerNorm before the gates.

    r, c, u = LayerNorm(W [h; x])        r = sigmoid(r)        c = tanh(r c)        u = sigmoid(u - 1)
    h <- u c + (1 - u) h

As in DreamerV2 and DreamerV3 (Hafner et al. 2021, arXiv 2010.02193; 2023, arXiv 2301.04104): one matrix W without bias
for all three, one norm over all 3 D, and an update gate biased toward the old state. The output is h, without a
residual. Several layers form a stack, with dropout between them.

Axes: B batch, T time (elements), D width, I input width, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, BackboneSettings, BackboneSize, cache_dtype, for_each_block
from wmcli.nn.dropout import dropout
from wmcli.nn.initialize import fan_average


class DreamerGRUSettings(BackboneSettings):
    """Settings of the GRU of Dreamer."""

    kind: Literal["dreamer-gru"] = "dreamer-gru"
    """The GRU of Dreamer's RSSM, with LayerNorm."""
    input_width: int = Field(default=0, ge=0)
    """Width of the input elements; 0 is the backbone's width. [features]"""
    norm_eps: float = Field(default=1e-3, gt=0)
    """Constant added to the variance in the LayerNorm."""

    def resized(self, layers: int, width: int) -> Self:
        """Return these settings in another size, the input width included."""
        return self.model_copy(update={"layers": layers, "width": width, "input_width": 0})


class DreamerGRU(Backbone):
    """Dreamer's GRU, whose state is a tuple with one (B, D) tensor per layer. Old states always stay valid.

    Under autocast the products have its precision, except that a single element is multiplied in the precision of the
    weights. Sums, norm, gates and state are float32 (float64 in a float64 model). First derivatives only.
    """

    cells: Any  # nn.ModuleList of DreamerCell

    def __init__(self, settings: DreamerGRUSettings, size: BackboneSize) -> None:
        super().__init__()
        self.width, self.max_length, self.dropout = size.width, None, size.dropout
        widths = [settings.input_width or size.width] + [size.width] * (size.layers - 1)
        self.cells = nn.ModuleList(DreamerCell(width, size.width, settings.norm_eps) for width in widths)
        fan_average(self)

    @property
    def inputs(self) -> int:
        return self.cells[0].gates.in_features - self.width

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(cell.norm.weight.new_zeros(batch, self.width) for cell in self.cells)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        after = []
        for index, cell in enumerate(self.cells):
            x = cell(self._drop(x, index), None if state is None else state[index], reset)
            after.append(x[:, -1])
        return x, None if state is None else tuple(after)

    def step(
        self, x: Tensor, state: tuple[Tensor, ...] | None, reset: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        y, state = self.forward(x[:, None], state, None if reset is None else reset[:, None])
        return y[:, 0], state

    def fork(
        self, x: Tensor, queries: Tensor, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...] | None]:
        (blocks, block), after = x.shape[1:3], []
        answers = for_each_block(queries, x).flatten(0, 1)  # (B N, Q, I)
        x = x.flatten(1, 2)
        for index, cell in enumerate(self.cells):
            x = cell(self._drop(x, index), None if state is None else state[index])
            after.append(x[:, -1])
            # The queries of all blocks in one batch, each from the state at its block's end.
            answers = cell(self._drop(answers, index), x[:, block - 1 :: block].flatten(0, 1))
        answers = answers.unflatten(0, (-1, blocks))
        return x[:, block - 1 :: block], answers, None if state is None else tuple(after)

    def _drop(self, x: Tensor, index: int) -> Tensor:
        """Apply dropout to the input of every cell but the first."""
        return dropout(x, self.dropout, self.training) if index else x


class DreamerCell(nn.Module):
    """One layer, from x (B, T, I) and a state (B, D), None for zeros, to the state after each element (B, T, D)."""

    gate_offset: Tensor
    """Offset subtracted before the gates, (3 D,): 1 for u, else 0."""

    def __init__(self, inputs: int, width: int, eps: float) -> None:
        super().__init__()
        self.gates = nn.Linear(width + inputs, 3 * width, bias=False)  # of [h; x]
        self.norm = nn.LayerNorm(3 * width, eps)
        gate_offset = torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(width)
        self.register_buffer("gate_offset", gate_offset, persistent=False)

    def forward(self, x: Tensor, state: Tensor | None, reset: Tensor | None = None) -> Tensor:
        scale, shift = self.norm.weight, self.norm.bias - self.gate_offset
        if state is None:
            state = scale.new_zeros(len(x), len(scale) // 3)
        weight = self.gates.weight
        # Conversion of the weight costs more than the product with a single element.
        precision = cache_dtype(scale) if x.shape[1] > 1 else weight.dtype
        arguments = x, state, weight, scale, shift, reset, self.norm.eps, precision
        states = _DreamerRecurrence.apply(*arguments) if torch.is_grad_enabled() else _recur(*arguments)[0]
        return states.transpose(0, 1)


def _recur(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    reset: Tensor | None,
    eps: float,
    precision: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence.

    Args:
        x: (B, T, I).
        state: (B, D).
        weight: (3 D, D + I).
        scale: Scale of the norm, (3 D,).
        shift: Shift of the norm, (3 D,).
        reset: (B, T) bool.
        eps: Constant added to the variance.
        precision: Precision of the products.

    Returns:
        The state after each element (T, B, D) and the inputs of the norm (T, B, 3 D).
    """
    width = state.shape[1]
    with torch.autocast(x.device.type, enabled=False):
        weight = weight.to(precision)
        recurrent = weight[:, :width].mT
        flat = x.to(precision).transpose(0, 1).flatten(0, 1)  # a product with three axes would copy the weight T times
        sums = F.linear(flat, weight[:, width:]).to(state.dtype).unflatten(0, (-1, len(x)))
        states = torch.empty_like(sums[:, :, :width])
        clear = [None] * len(sums) if reset is None else reset[..., None].unbind(1)
        for into, new, cleared in zip(sums, states, clear, strict=True):
            if cleared is not None:
                state = state.masked_fill(cleared, 0.0)
            into += (state.to(precision) @ recurrent).to(into.dtype)
            r, c, u = F.layer_norm(into, scale.shape, scale, shift, eps).chunk(3, 1)
            state = torch.lerp(state, torch.tanh(r.sigmoid() * c), u.sigmoid(), out=new)
    return states, sums


class _DreamerRecurrence(torch.autograd.Function):
    """`_recur` with its gradient.

    Only terms that depend on the next element's gradient are computed element by element. The weight's gradient is one
    product at the end instead of a sum of one matrix per element.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        state: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        reset: Tensor | None,
        eps: float,
        precision: torch.dtype,
    ) -> Tensor:
        states, sums = _recur(x, state, weight, scale, shift, reset, eps, precision)
        ctx.save_for_backward(x, state, weight, scale, shift, reset, states, sums)
        ctx.eps, ctx.precision = eps, precision
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, state, weight, scale, shift, reset, states, sums = ctx.saved_tensors
        width = state.shape[1]
        with torch.autocast(x.device.type, enabled=False):
            weight = weight.to(ctx.precision)
            recurrent = weight[:, :width]
            before = torch.cat((state[None], states[:-1]))
            if reset is not None:
                before = before.masked_fill(reset.mT[..., None], 0.0)
            normal, mean, rstd = torch.native_layer_norm(sums, scale.shape, scale, shift, ctx.eps)
            r, c, u = normal.chunk(3, 2)
            r, u = r.sigmoid(), u.sigmoid()
            new = torch.tanh(r * c)
            slope = u * (1 - new.square())
            # Derivatives of the state with respect to the three gates' inputs.
            factors = torch.stack((slope * c * r * (1 - r), slope * r, (new - before) * u * (1 - u)), 2)  # (T, B, 3, D)
            retention = 1 - u
            norms, into_sums = torch.empty_like(sums), torch.empty_like(sums)
            carried = torch.zeros_like(state)
            for t in reversed(range(len(sums))):
                into_state = gradient[t] + carried
                torch.mul(into_state[:, None], factors[t], out=norms[t].unflatten(1, (3, width)))
                normed = norms[t], sums[t], mean[t], rstd[t]
                into_sums[t] = _norm_gradient(*normed, scale, shift, (True, False, False))[0]
                carried = into_state * retention[t] + (into_sums[t].to(ctx.precision) @ recurrent).to(state.dtype)
                if reset is not None:
                    carried = carried.masked_fill(reset[:, t, None], 0.0)
            _, into_scale, into_shift = _norm_gradient(norms, sums, mean, rstd, scale, shift, (False, True, True))
            low = into_sums.to(ctx.precision).flatten(0, 1)
            into_x = (low @ weight[:, width:]).to(x.dtype).unflatten(0, (-1, len(x))).transpose(0, 1)
            inputs = torch.cat((before.to(ctx.precision), x.transpose(0, 1).to(ctx.precision)), 2)
            into_weight = low.mT @ inputs.flatten(0, 1)
        return into_x, carried, into_weight.to(ctx.saved_tensors[2].dtype), into_scale, into_shift, None, None, None


def _norm_gradient(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    shift: Tensor,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a LayerNorm's gradients with respect to x, scale and shift, where `needed`."""
    return torch.ops.aten.native_layer_norm_backward(gradient, x, scale.shape, mean, rstd, scale, shift, needed)
