"""The stack of S4 layers of S4WM.

A block is two S4 layers and an MLP, each after a LayerNorm and inside a residual connection. A last LayerNorm follows
the last block. An S4 layer filters each channel with its own linear system, then mixes channels. From a zero state a
whole sequence is one convolution, by FFT if nothing resets it. Otherwise the same systems run as recurrences. S4D and
S5 are the same stack with other systems.

Axes: B batch, T time (elements), D width, N state numbers per channel: N / 2 conjugate pairs, real and imaginary part
side by side. J blocks of the contract, L elements of one, Q queries.

Source: S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064), S4 (Gu et al. 2022, arXiv 2111.00396).
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

from wmcli.backbones.base import Backbone, BackboneSettings, BackboneSize, for_each_block
from wmcli.errors import UsageError
from wmcli.kernels import s4 as kernels
from wmcli.nn.dropout import dropout
from wmcli.nn.initialize import fan_average

INPUT_LIMIT = 2.0  # of the imaginary part of LegS's B
LEARNING_RATE_LIMIT = 1e-3  # for step sizes and systems; they also take no weight decay
LONGEST_WITH_RESETS = 512  # elements: with resets the cost of a convolution grows with the square of its length


class StackSettings(BackboneSettings):
    """Settings of the stacks of S4 and its variants. A layer is a block of two state-space layers and an MLP."""

    ffn: int = Field(default=4, ge=0)
    """Width of the MLP; 0 omits it (S4WM-No-MLP). [backbone widths]"""
    glu: bool = True
    """Mix channels by a gated linear unit instead of a plain linear layer, which the paper's Figure 1 shows."""
    dt_min: float = Field(default=1e-3, gt=0)
    """Shortest step size at initialization. A system with step size dt covers on the order of 1 / dt elements."""
    dt_max: float = Field(default=1e-1, gt=0)
    """Longest step size at initialization. Step sizes are log-uniform between the two."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Constant added to the variance in all LayerNorms."""


class S4Settings(StackSettings):
    """Settings of the S4 backbone. A layer is a block of two S4 layers and an MLP."""

    kind: Literal["s4"] = "s4"
    """S4: state spaces with diagonal-plus-low-rank matrices (S4WM)."""
    state_size: int = Field(default=64, ge=2, multiple_of=2)
    """State size of one channel. [numbers]"""
    tied: bool = True
    """Share Lambda, P and B among the channels of a layer (n_ssm = 1 in the S4 code)."""


class S4State(NamedTuple):
    """State after the elements so far. Old states stay valid until the weights change."""

    layers: tuple[Tensor, ...]
    """(B, D, N) for each S4 layer, two per block; in S5 (B, N)."""
    systems: kernels.Systems | None = None
    """Prepared systems for the next calls; None before the first call and in a frozen stack, which stores them."""


class StateSpaceStack(Backbone):
    """Blocks of two state-space layers and an MLP, and a last LayerNorm. The state is an `S4State`.

    Kernels cover sequences of up to `BackboneSize.max_length` elements and are truncated for shorter ones. Longer
    sequences run as recurrences, whose memory is unlimited.

    Preparation of the systems costs more than a short call. A state carries them to the next call, so that a loss or a
    rollout prepares them once. A frozen stack prepares them once for all calls.
    """

    blocks: Any  # nn.ModuleList of S4Block

    def __init__(
        self,
        settings: StackSettings,
        size: BackboneSize,
        system: Callable[[], nn.Module],
        prepare: Callable[..., kernels.Systems],
    ) -> None:
        """Build the stack.

        Args:
            settings: Settings of the stack.
            size: Sizes of every backbone.
            system: Builds the systems of one layer: a module with `tensors`, its parameters, and `shape`, that of one
                row's state.
            prepare: Makes `kernels.Systems` of the parameters of all layers.

        Raises:
            UsageError: The settings do not fit together.
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
        outputs: slice | None = None,
    ) -> tuple[Tensor, S4State | None]:
        """Run all blocks with a state.

        Args:
            x: (..., D).
            state: The state before x; None starts from zeros.
            systems: The prepared systems.
            advance: From layer, u and the layer's state to the outputs of its systems and its new state.
            outputs: As in `_run`.

        Returns:
            The outputs, and the new state; None if `state` is.
        """
        before = (self.initial_state(len(x)) if state is None else state).layers
        after = []

        def mix(layer: int, u: Tensor) -> Tensor:
            y, new = advance(layer, u, before[layer])
            after.append(new)
            return y

        y = self._run(x, mix, outputs)
        return y, None if state is None else S4State(tuple(after), None if systems is self.frozen else systems)

    def _run(self, x: Tensor, mix: Callable[[int, Tensor], Tensor], outputs: slice | None = None) -> Tensor:
        """Run all blocks.

        Args:
            x: (..., D).
            mix: From layer and u (..., D) to the outputs of its systems.
            outputs: Elements of x (..., T, D) whose outputs are needed; after the last systems no others are computed.
        """
        last = 2 * len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            for layer, module in enumerate(block.layers, 2 * index):
                u = module.norm(x)
                y = mix(layer, u)
                if outputs is not None and layer == last:
                    x, u, y = (part[..., outputs, :] for part in (x, u, y))
                x = module(x, u, y)
            x = block.feed_forward(x)
        return self.norm(x)

    def freeze(self) -> None:
        """Prepare the systems of the current weights for all later calls."""
        self.frozen = self._prepare(self._parameters_of_systems(), self.kernel_length, graph=False)

    def _systems(self, state: S4State | None) -> kernels.Systems:
        """Return the prepared systems: those of a frozen stack, those of the state, or new ones."""
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


class S4(StateSpaceStack):
    """The stack of S4 layers.

    The kernels are learned for one length, `BackboneSize.max_length`, which is saved with the weights. A model of
    another length does not load them (UsageError).
    """

    def __init__(self, settings: S4Settings, size: BackboneSize) -> None:
        super().__init__(settings, size, lambda: StateSpace(settings, size), partial(kernels.Systems, build_system))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.kernel_length)

    def set_extra_state(self, state: Tensor) -> None:
        if int(state) != self.kernel_length:
            raise UsageError(
                f"backbone.kind = s4: these weights were learned for sequences of up to {int(state)} elements, this "
                f"model is built for {self.kernel_length}; do not change dynamics.sequence_length or the elements of a "
                "step."
            )


class S4Block(nn.Module):
    """Two state-space layers and an MLP."""

    layers: Any  # nn.ModuleList of S4Layer

    def __init__(self, settings: StackSettings, size: BackboneSize, system: Callable[[], nn.Module]) -> None:
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
    """Systems over time, per channel (S5: one for all channels), then a mixture of channels per element."""

    def __init__(self, settings: StackSettings, size: BackboneSize, system: nn.Module) -> None:
        super().__init__()
        self.glu, self.dropout = settings.glu, size.dropout
        self.norm = nn.LayerNorm(size.width, eps=settings.norm_eps)
        self.system = system
        self.skip = nn.Parameter(torch.randn(size.width))
        self.out = nn.Linear(size.width, (2 if settings.glu else 1) * size.width)

    def forward(self, x: Tensor, u: Tensor, y: Tensor) -> Tensor:
        """Mix channels.

        Args:
            x: (..., D), the input of the layer.
            u: (..., D), norm(x).
            y: (..., D), the outputs of the systems for u.
        """
        y = dropout(F.gelu(torch.addcmul(y.to(u.dtype), self.skip, u)), self.dropout, self.training)
        y = self.out(y)
        return x + (F.glu(y) if self.glu else y)


class StateSpace(nn.Module):
    """D linear systems, one per channel. Complex parameters are stored as (..., 2), real part first."""

    def __init__(self, settings: S4Settings, size: BackboneSize) -> None:
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
            # C is drawn, with unit variance; C~ of this kernel length is stored.
            c = torch.randn(size.width, settings.state_size // 2, dtype=torch.complex64)
            self.c_tilde = nn.Parameter(torch.view_as_real(c))
            system, _ = build_system(*self.tensors())
            shortened = kernels.truncation(kernels.discretize(system), size.max_length)
            c = shortened @ kernels.output_numbers(c)[..., None]
            self.c_tilde = nn.Parameter(c.view(*c.shape[:-2], -1, 2) / c.new_tensor([2, -2]))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the parameters in the order of `build_system`."""
        return self.log_dt, self.log_decay, self.frequency, self.p, self.b, self.c_tilde


def build_system(
    log_dt: Tensor, log_decay: Tensor, frequency: Tensor, p: Tensor, b: Tensor, c_tilde: Tensor
) -> tuple[kernels.System, Tensor]:
    """Return system and C~ of one layer's parameters, or of several layers' stacked on a first axis."""
    dtype = wide(log_dt.dtype)
    log_dt, log_decay, frequency, p, b, c_tilde = (
        each.to(dtype) for each in (log_dt, log_decay, frequency, p, b, c_tilde)
    )
    p, b, c_tilde = (torch.view_as_complex(each.contiguous()) for each in (p, b, c_tilde))
    return kernels.System(log_dt.exp(), torch.complex(-log_decay.exp(), frequency), p, b), c_tilde


def draw_log_dt(settings: StackSettings, count: int) -> Tensor:
    """Draw the logarithms of `count` step sizes, log-uniform between the limits of the settings."""
    low, high = math.log(settings.dt_min), math.log(settings.dt_max)
    return low + (high - low) * torch.rand(count)


def learn_slowly(*parameters: nn.Parameter) -> None:
    """Mark parameters of step sizes and systems: no weight decay, a limited learning rate."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]
        parameter._learning_rate_limit = LEARNING_RATE_LIMIT  # type: ignore[attr-defined]


def hippo_legs(state: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return HiPPO-LegS of N = `state` as diagonal minus rank one, in float64.

    A = V (diag(Lambda) - P P^*) V^* over both halves of each pair, and B = sqrt(2) P. An eigenvector's phase is free.
    Its first component is made real and positive: the same on every machine, and as in S4's public code but for signs.

    Returns:
        Lambda (N / 2,), P (N / 2,) and the eigenvectors V (N, N / 2) of the half with negative imaginary parts.

    Source: HiPPO (Gu et al. 2020, arXiv 2008.07669).
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
    """Return B of HiPPO-LegS from its P, with the imaginary part clipped at +-2.

    Without the limit that part is nearly all of B, and grows with the state.

    Source: The initialization of S4's public code (state-spaces/s4, `nplr`).
    """
    b = math.sqrt(2) * p
    return torch.complex(b.real, b.imag.clamp(-INPUT_LIMIT, INPUT_LIMIT))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and systems for parameters of `dtype`."""
    return torch.promote_types(dtype, torch.float32)
