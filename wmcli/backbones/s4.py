"""The stack of S4 layers of S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064).

A block is two S4 layers (Gu et al. 2022, arXiv 2111.00396) and an MLP, each with LayerNorm before and a residual
around; a last LayerNorm follows the last block. An S4 layer filters each channel with a linear system of its own, then
mixes channels. From nothing a whole sequence is one convolution, by FFT where nothing resets it; otherwise the same
systems run as recurrences. S4D and S5 are the same stack with other systems.

Axes: B batch, T time (elements), D width, N numbers of a channel's state (N / 2 conjugate pairs, real and imaginary
part side by side), J blocks of the contract, L elements of one, Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, BackboneSettings, Size, for_each_block
from wmcli.errors import UsageError
from wmcli.kernels import s4 as kernels
from wmcli.nn.dropout import dropout
from wmcli.nn.initialize import fan_average

INPUT_LIMIT = 2.0  # of the imaginary part of LegS's B
LEARNING_RATE_LIMIT = 1e-3  # for step sizes and systems; they also take no weight decay
LONGEST_WITH_RESETS = 512  # elements: with resets the cost of a convolution grows with the square of its length


class StackSettings(BackboneSettings):
    """What the stacks of S4 and of its variants share. Their layers are blocks of two state-space layers and an MLP."""

    ffn: int = Field(default=4, ge=0)
    """Width of the MLP, in multiples of the backbone's width; 0 leaves it out (S4WM-No-MLP)."""
    glu: bool = True
    """Whether channels are mixed by a gated linear unit or by a plain linear layer, as Figure 1 prints it."""
    dt_min: float = Field(default=1e-3, gt=0)
    """Shortest step size at initialization. With a step size dt a system looks back on the order of 1 / dt elements."""
    dt_max: float = Field(default=1e-1, gt=0)
    """Longest step size at initialization. All are drawn log-uniformly between the two."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Of all LayerNorms."""


class S4Settings(StackSettings):
    """What is particular to the S4 backbone, whose layers are blocks of two S4 layers and an MLP."""

    kind: Literal["s4"] = "s4"
    """S4: state spaces with diagonal-plus-low-rank matrices (S4WM)."""
    state_size: int = Field(default=64, ge=2, multiple_of=2)
    """Numbers of a channel's state."""
    tied: bool = True
    """Whether the channels of a layer share Lambda, P and B (n_ssm = 1 in the S4 code) or each learns its own."""


class S4State(NamedTuple):
    """What the elements so far have left. Old states stay valid until the weights change."""

    layers: tuple[Tensor, ...]
    """(B, D, N) for each S4 layer, two per block; in S5 (B, N)."""
    systems: kernels.Systems | None = None
    """The prepared systems, for the next calls; None before the first call and in a frozen stack, which holds them."""


class Stack(Backbone):
    """Blocks of two state-space layers and an MLP, and a last LayerNorm. The state is an `S4State`.

    Kernels are made for sequences of up to `Size.max_length` elements and cut for shorter ones; longer ones run as
    recurrences, with a memory without limit.
    """

    blocks: Any  # nn.ModuleList of S4Block

    def __init__(
        self,
        settings: StackSettings,
        size: Size,
        system: Callable[[], nn.Module],
        prepare: Callable[..., kernels.Systems],
    ) -> None:
        """system() makes what one layer learns: `tensors`, its parameters, and the `shape` of one row's state.

        `prepare` is `kernels.Systems` or the like, given all but the parameters of all layers. Raises UsageError when
        the settings do not fit together.
        """
        super().__init__()
        if settings.dt_min > settings.dt_max:
            raise UsageError(
                f"backbone.dt_min = {settings.dt_min}: must not be above backbone.dt_max = {settings.dt_max}."
            )
        self.width, self.max_length, self.kernel_length = size.width, None, size.max_length
        self.blocks = nn.ModuleList(S4Block(settings, size, system) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, eps=settings.norm_eps)
        self._prepare = prepare
        self.frozen: kernels.Systems | None = None
        fan_average(self)

    def initial_state(self, batch: int) -> S4State:
        weight = self.norm.weight
        zeros = partial(torch.zeros, device=weight.device, dtype=wide(weight.dtype))
        return S4State(tuple(zeros((batch, *layer.system.shape)) for block in self.blocks for layer in block.layers))

    def forward(self, x: Tensor, state: S4State | None, reset: Tensor | None = None) -> tuple[Tensor, S4State | None]:
        systems, time = self._systems(state), x.shape[1]
        resets = None if reset is None else kernels.Resets(reset)
        if state is None and time <= self.kernel_length and (reset is None or time <= LONGEST_WITH_RESETS):
            return self._run(x, lambda layer, u: systems.convolve(layer, u, resets)), None
        return self._carry(x, state, systems, lambda layer, u, before: systems.run(layer, u, before, resets))

    def step(self, x: Tensor, state: S4State | None, reset: Tensor | None = None) -> tuple[Tensor, S4State | None]:
        systems = self._systems(state)
        return self._carry(x, state, systems, lambda layer, u, before: systems.step(layer, u, before, reset))

    def fork(self, x: Tensor, queries: Tensor, state: S4State | None) -> tuple[Tensor, Tensor, S4State | None]:
        block, systems = x.shape[2], self._systems(state)
        x = torch.cat((x, for_each_block(queries, x)), 2)  # (B, J, L + Q, D)
        y, state = self._carry(
            x, state, systems, lambda layer, u, before: systems.fork(layer, u, block, before), slice(block - 1, None)
        )
        return y[:, :, 0], y[:, :, 1:], state

    def _carry(
        self,
        x: Tensor,
        state: S4State | None,
        systems: kernels.Systems,
        advance: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
        wanted: slice | None = None,
    ) -> tuple[Tensor, S4State | None]:
        """`_run` with a state: advance(layer, u, state of the layer) returns what its systems make of u, and the new
        state."""
        before = (self.initial_state(len(x)) if state is None else state).layers
        after = []

        def mix(layer: int, u: Tensor) -> Tensor:
            y, new = advance(layer, u, before[layer])
            after.append(new)
            return y

        y = self._run(x, mix, wanted)
        return y, None if state is None else S4State(tuple(after), None if systems is self.frozen else systems)

    def _run(self, x: Tensor, mix: Callable[[int, Tensor], Tensor], wanted: slice | None = None) -> Tensor:
        """All blocks on x (..., D); mix(layer, u) is what the systems of a layer make of its inputs u (..., D).

        Of x (..., T, D) only the outputs at `wanted` elements; behind the last systems no others are computed.
        """
        last = 2 * len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            for layer, module in enumerate(block.layers, 2 * index):
                u = module.norm(x)
                y = mix(layer, u)
                if wanted is not None and layer == last:
                    x, u, y = (part[..., wanted, :] for part in (x, u, y))
                x = module(x, u, y)
            x = block.feed_forward(x)
        return self.norm(x)

    def freeze(self) -> None:
        self.frozen = self._prepare(self._parameters_of_systems(), self.kernel_length, graph=False)

    def _systems(self, state: S4State | None) -> kernels.Systems:
        """Return the prepared systems: those of a frozen stack, those that came with the state, or new ones."""
        if self.frozen is not None:
            return self.frozen
        parameters = self._parameters_of_systems()
        graph = torch.is_grad_enabled() and any(each.requires_grad for group in parameters for each in group)
        if state is not None and state.systems is not None and (state.systems.graph or not graph):
            return state.systems
        return self._prepare(parameters, self.kernel_length, graph=graph)

    def _parameters_of_systems(self) -> list[tuple[Tensor, ...]]:
        """Return groups of one tensor for each layer."""
        spaces = [layer.system for block in self.blocks for layer in block.layers]
        return list(zip(*(space.tensors() for space in spaces), strict=True))


class S4(Stack):
    """The stack of S4 layers.

    The kernels are learned for one length, `Size.max_length`. It belongs to the weights: it is saved with them, and
    loading them into a model of another length raises UsageError.
    """

    def __init__(self, settings: S4Settings, size: Size) -> None:
        super().__init__(settings, size, lambda: StateSpace(settings, size), partial(kernels.Systems, build_system))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.kernel_length)

    def set_extra_state(self, state: Tensor) -> None:
        if int(state) != self.kernel_length:
            raise UsageError(
                f"backbone.kind = s4: these weights were learned for sequences of up to {int(state)} elements, this "
                f"model is built for {self.kernel_length}; keep dynamics.sequence_length and the elements of a step."
            )


class S4Block(nn.Module):
    """Two state-space layers and an MLP."""

    layers: Any  # nn.ModuleList of S4Layer

    def __init__(self, settings: StackSettings, size: Size, system: Callable[[], nn.Module]) -> None:
        super().__init__()
        hidden = settings.ffn * size.width
        self.dropout = size.dropout
        self.layers = nn.ModuleList(S4Layer(settings, size, system()) for _ in range(2))
        if hidden:
            self.norm = nn.LayerNorm(size.width, eps=settings.norm_eps)
            self.up = nn.Linear(size.width, hidden)
            self.down = nn.Linear(hidden, size.width)
        self.hidden = hidden

    def feed_forward(self, x: Tensor) -> Tensor:
        if not self.hidden:
            return x
        return x + self.down(dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training))


class S4Layer(nn.Module):
    """Systems over time, channel by channel (S5: one for all), then a mixture of channels, element by element."""

    def __init__(self, settings: StackSettings, size: Size, system: nn.Module) -> None:
        super().__init__()
        self.glu, self.dropout = settings.glu, size.dropout
        self.norm = nn.LayerNorm(size.width, eps=settings.norm_eps)
        self.system = system
        self.skip = nn.Parameter(torch.randn(size.width))
        self.out = nn.Linear(size.width, (2 if settings.glu else 1) * size.width)

    def forward(self, x: Tensor, u: Tensor, y: Tensor) -> Tensor:
        """x (..., D), u = norm(x), and y, what the systems make of u."""
        y = dropout(F.gelu(torch.addcmul(y.to(u.dtype), self.skip, u)), self.dropout, self.training)
        y = self.out(y)
        return x + (F.glu(y) if self.glu else y)


class StateSpace(nn.Module):
    """D linear systems, one for each channel. Complex parameters are stored as (..., 2), real part first."""

    def __init__(self, settings: S4Settings, size: Size) -> None:
        super().__init__()
        self.shape = size.width, settings.state_size
        poles, p, _ = hippo_legs(settings.state_size)
        poles, p = (part.expand(1 if settings.tied else size.width, -1) for part in (poles, p))
        self.log_dt = nn.Parameter(draw_log_dt(settings, size.width))
        self.log_decay = nn.Parameter((-poles.real).log().float())  # Re(Lambda) = -exp(log_decay)
        self.frequency = nn.Parameter(poles.imag.float())
        self.p = nn.Parameter(torch.view_as_real(p).float())
        self.b = nn.Parameter(torch.view_as_real(legs_input(p)).float())
        learn_slowly(self.log_dt, self.log_decay, self.frequency, self.p, self.b)
        with torch.no_grad():
            # What is drawn is C, of unit variance; what is stored is C~, that of this kernel length.
            c = torch.randn(size.width, settings.state_size // 2, dtype=torch.complex64)
            self.c_tilde = nn.Parameter(torch.view_as_real(c))
            system, _ = build_system(*self.tensors())
            shortened = kernels.truncation(kernels.discretize(system), size.max_length)
            c = shortened @ kernels.output_numbers(c)[..., None]
            self.c_tilde = nn.Parameter(c.view(*c.shape[:-2], -1, 2) / c.new_tensor([2, -2]))

    def tensors(self) -> tuple[Tensor, ...]:
        """The parameters, as `build_system` takes them."""
        return self.log_dt, self.log_decay, self.frequency, self.p, self.b, self.c_tilde


def build_system(
    log_dt: Tensor, log_decay: Tensor, frequency: Tensor, p: Tensor, b: Tensor, c_tilde: Tensor
) -> tuple[kernels.System, Tensor]:
    """System and C~ of one layer's parameters, or of several layers' with an axis in front."""
    dtype = wide(log_dt.dtype)
    log_dt, log_decay, frequency, p, b, c_tilde = (
        each.to(dtype) for each in (log_dt, log_decay, frequency, p, b, c_tilde)
    )
    p, b, c_tilde = (torch.view_as_complex(each.contiguous()) for each in (p, b, c_tilde))
    return kernels.System(log_dt.exp(), torch.complex(-log_decay.exp(), frequency), p, b), c_tilde


def draw_log_dt(settings: StackSettings, count: int) -> Tensor:
    """Logarithms of `count` step sizes, log-uniform between the settings' two."""
    low, high = math.log(settings.dt_min), math.log(settings.dt_max)
    return low + (high - low) * torch.rand(count)


def learn_slowly(*parameters: nn.Parameter) -> None:
    """Mark what step sizes and systems are made of: no weight decay, a limited learning rate."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]
        parameter._learning_rate_limit = LEARNING_RATE_LIMIT  # type: ignore[attr-defined]


def hippo_legs(state: int) -> tuple[Tensor, Tensor, Tensor]:
    """HiPPO-LegS (Gu et al. 2020, arXiv 2008.07669) of N = `state` as diagonal minus rank one, in float64.

    Returns Lambda (N / 2,), P (N / 2,) and the eigenvectors V (N, N / 2) of the half with negative imaginary parts: A =
    V (diag(Lambda) - P P^*) V^* over both halves, and B = sqrt(2) P. An eigenvector's phase is free; it is chosen so
    that its first component is real and positive: the same on every machine, and as in S4's public code but for signs.
    """
    odd = 2 * torch.arange(state, dtype=torch.float64) + 1
    root = (odd[:, None] * odd).sqrt()
    skew = (root.triu(1) - root.tril(-1)) / 2  # A + P P^T + 1 / 2
    frequency, vectors = torch.linalg.eigh(-1j * skew)
    frequency, vectors = frequency[: state // 2], vectors[:, : state // 2]
    vectors = vectors * (vectors[0].conj() / vectors[0].abs())
    p = vectors.mH @ (odd / 2).sqrt().to(vectors.dtype)
    return torch.complex(torch.full_like(frequency, -0.5), frequency), p, vectors


def legs_input(p: Tensor) -> Tensor:
    """B of HiPPO-LegS from its P, the imaginary part cut at +-2, as the public code begins (state-spaces/s4, `nplr`).

    Uncut it is nearly all of B, and grows with the state.
    """
    b = math.sqrt(2) * p
    return torch.complex(b.real, b.imag.clamp(-INPUT_LIMIT, INPUT_LIMIT))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and systems for parameters of `dtype`."""
    return torch.promote_types(dtype, torch.float32)
