"""The state-space layer of S4 (Gu et al. 2022, arXiv 2111.00396): one linear system per channel.

    x' = A x + B u,  y = 2 Re(C x),  A = diag(Lambda) - P P^*        in continuous time, state in conjugate pairs
    x_t = Abar x_{t-1} + Bbar u_t,   y_t = 2 Re(C x_t)               bilinear, step size dt
    y = K * u,  K_l = 2 Re(C Abar^l Bbar)                            the same as a convolution

Of each conjugate pair one half is stored, and P^* x means 2 Re(sum conj(P) x): the half state is only real-linear, so
states and all that acts on them as matrices are real, with (re, im) side by side: N numbers for N / 2 pairs. In them A
is a rotation and a decay for each pair less twice an outer product p p^T, so Abar never lengthens a state.

What is learned is not C but C~ = C (I - Abar^L) for one fixed kernel length L: then the kernel's spectrum at the L-th
roots of unity is a handful of Cauchy sums. `reference` is the definition, `kernel` the Cauchy form, `convolve` the
convolution, `Recurrence` the same system with a state. The skip connection (the paper's D) is left to the caller.

Everything is float32 (float64 for float64 parameters) also under autocast. Intermediate results that are larger than
what goes in and comes out are computed again in the backward pass, not kept.

Axes: B batch, T time, H channels, N numbers of a channel's state, J C chunks and the elements in them, F frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 64  # elements: inside a chunk the cost grows with its length, between chunks it falls
RESET_CHUNK = 16  # elements: with resets the inside of a chunk takes one pass over the whole for each of them
CAUCHY_ELEMENTS = 1 << 22  # of the tensor (H, N / 2, F) that exists at a time
KEPT_CHUNKS = 4  # lengths of chunks whose operators a recurrence keeps


class System(NamedTuple):
    """H systems in continuous time, complex tensors of one half of each pair."""

    dt: Tensor
    """(H,) real, positive."""
    poles: Tensor
    """Lambda, (H or 1, N / 2), real parts negative."""
    p: Tensor
    """P, (H or 1, N / 2)."""
    b: Tensor
    """B, (H or 1, N / 2)."""


def reference(system: System, c: Tensor, length: int) -> Tensor:
    """The kernel (H, length) by its definition: powers of the discretised matrix, both halves of each pair.

    c (H, N / 2) is C, not C~.
    """
    dt = system.dt[:, None, None]
    poles, p, b, c = (torch.cat((part, part.conj()), -1) for part in (*system[1:], c))
    a = torch.diag_embed(poles) - p[..., :, None] * p.conj()[..., None, :]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    abar = torch.linalg.solve(one - dt / 2 * a, one + dt / 2 * a)
    x = torch.linalg.solve(one - dt / 2 * a, dt * b[..., None])
    values = []
    for _ in range(length):
        values.append((c[..., None, :] @ x)[..., 0, 0].real)
        x = abar @ x
    return torch.stack(values, 1)


# -- the convolution ---------------------------------------------------------------------------------------------------


def kernel(system: System, c_tilde: Tensor, length: int) -> Tensor:
    """The kernel (H, length) from C~ (H, N / 2), which must be that of the same length. A shorter kernel is its start.

    The truncated generating function at exp(-i theta) is, with c = cos(theta / 2) and s = sin(theta / 2),

        exp(i theta / 2) (k(C~ B) - c k(C~ P) k(P^* B) / (1 + c k(P^* P)))
        k(v) = sum_n (-2 c Re(v_n w_n^*) + 4 i s Re v_n) / (c^2 |w_n|^2 - 4 s^2 - 4 i s c Re w_n),  w = dt Lambda, v dt

    which is the paper's Cauchy kernel with the poles of each pair put together and multiplied by c: finite at theta =
    pi, where the paper's form is not, and real up to the last line.
    """
    with torch.autocast(c_tilde.device.type, enabled=False):
        dt = system.dt[:, None]
        w = dt * system.poles
        p, b = dt * system.p, system.b
        v = torch.stack(torch.broadcast_tensors(dt * c_tilde * b, c_tilde * p, p.conj() * b, p.conj() * system.p), 1)
        weights = torch.cat(((v * w.conj()[:, None]).real, v.real), 1)  # (H, 8, N / 2)
        size = w.real.square() + w.imag.square()
        # In float64: rounded, the angles alone would cost two digits of the kernel.
        half = torch.arange(length // 2 + 1, dtype=torch.float64, device=w.device) * (math.pi / length)
        cos, sin = half.cos().to(weights.dtype), half.sin().to(weights.dtype)
        step = max(1, CAUCHY_ELEMENTS // w.numel())
        nodes = torch.stack((cos, sin)).split(step, 1)
        sums = [_again(_cauchy, weights, w.real, size, *each) for each in nodes]
        k00, k01, k10, k11 = torch.cat(sums, -1).unbind(1)
        spectrum = torch.complex(cos, sin) * (k00 - cos * k01 * k10 / (1 + cos * k11))
        return torch.fft.irfft(spectrum, length)


def _cauchy(weights: Tensor, real: Tensor, size: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The four k(v) of `kernel`, (H, 4, F): weights (H, 8, N / 2) are Re(v w^*) and Re v, real Re w, size |w|^2."""
    re = cos.square() * size[..., None] - 4 * sin.square()  # (H, N / 2, F)
    im = -4 * sin * cos * real[..., None]
    scale = 1 / (re.square() + im.square())
    a_re, b_re = (weights @ (re * scale)).chunk(2, 1)
    a_im, b_im = (weights @ (im * scale)).chunk(2, 1)
    return torch.complex(4 * sin * b_im - 2 * cos * a_re, 4 * sin * b_re + 2 * cos * a_im)


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """y_t = sum_l kernel_l u_{t - l} by FFT, in the kernel's dtype: u (B, T, H), kernel (H, L), T <= L."""
    time = u.shape[1]
    assert time <= kernel.shape[1]
    with torch.autocast(u.device.type, enabled=False):
        size = 1 << (2 * time - 2).bit_length()  # nothing wraps around
        spectrum = torch.fft.rfft(kernel[:, :time], size).mT
        return torch.fft.irfft(torch.fft.rfft(u.to(kernel.dtype), size, dim=1) * spectrum, size, dim=1)[:, :time]


# -- the recurrence ----------------------------------------------------------------------------------------------------


class Discrete(NamedTuple):
    """x_t = diagonal x - column (row . x) + input u,  y = output . x: bilinear, Abar is diagonal but for rank one."""

    diagonal: Tensor
    """(H, N / 2) complex, on the pairs."""
    column: Tensor
    """(H, N), as the others."""
    row: Tensor
    input: Tensor


class Chunk(NamedTuple):
    """What C elements do at once. States are rows: after C elements without input a state x is x @ power."""

    power: Tensor
    """(H, N, N)."""
    inputs: Tensor
    """(H, C, N): what each element leaves in the state after the chunk."""
    outputs: Tensor
    """(H, N, C): what the state before the chunk is worth to each element."""
    inside: Tensor
    """(H, C, C): what each element (second axis) is worth to each element (last axis)."""


def discretise(system: System) -> Discrete:
    """Bilinear, by the matrix inversion lemma; in float64 whatever the system's dtype, for decays close to 1."""
    wide = System(*(part.to(torch.promote_types(part.dtype, torch.float64)) for part in system))
    half = wide.dt[:, None] / 2
    inverse = 1 / (1 - half * wide.poles)
    column, row = inverse * wide.p, inverse * wide.p.conj()
    # 1 / (1 + P^* inverse P dt / 2); twice the real part, for both halves of each pair.
    correction = 1 / (1 + 2 * half * (row * wide.p).sum(-1, keepdim=True).real)
    into = 2 * half * (inverse * wide.b - column * (2 * half * correction * (row * wide.b).sum(-1, keepdim=True).real))
    discrete = Discrete(2 * inverse - 1, _numbers(column), output_numbers(2 * half * correction * row), _numbers(into))
    return Discrete(*(part.to(system.poles.dtype if part.is_complex() else system.dt.dtype) for part in discrete))


def advance(discrete: Discrete, x: Tensor) -> Tensor:
    """States x (..., H, N) one element on, without input: O(N) per channel."""
    turned = discrete.diagonal * torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(turned).flatten(-2) - discrete.column * (discrete.row * x).sum(-1, keepdim=True)


def transition(discrete: Discrete) -> Tensor:
    """The matrices (H, N, N) with x @ matrix = advance(x) on rows."""
    size = discrete.row.shape[-1]
    one = torch.eye(size, dtype=discrete.row.dtype, device=discrete.row.device)
    return advance(discrete, one[:, None].expand(-1, len(discrete.row), -1)).transpose(0, 1)


def truncation(discrete: Discrete, length: int) -> Tensor:
    """I - Abar^length as matrices (H, N, N): C~ is this times C, both as columns of `output_numbers`."""
    matrix = transition(discrete)
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return one - torch.linalg.matrix_power(matrix, length)


def output_numbers(c: Tensor) -> Tensor:
    """C of half the pairs (..., N / 2), complex, as N numbers w with w . x = 2 Re(C x)."""
    return 2 * _numbers(c.conj().resolve_conj())


class Recurrence:
    """A system with a state, for one version of its parameters.

    To prepare it costs several products of (H, N, N) matrices and a solve, and so does each new length of chunk: where
    parameters stand still, make it once. States are (B, H, N).
    """

    def __init__(self, system: System, c_tilde: Tensor, length: int) -> None:
        """`length` is the kernel length that C~ (H, N / 2) is for."""
        with torch.autocast(c_tilde.device.type, enabled=False):
            self.discrete, self.output = _again(_prepare, system, c_tilde, length)
        self.chunks: dict[int, Chunk] = {}

    def step(self, u: Tensor, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One element u (B, H), reset (B,) bool. Returns y (B, H) and the new state."""
        if reset is not None:
            state = state.masked_fill(reset[:, None, None], 0.0)
        with torch.autocast(u.device.type, enabled=False):
            state = advance(self.discrete, state) + self.discrete.input * u.to(state.dtype)[..., None]
            return (self.output * state).sum(-1), state

    def run(self, u: Tensor, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All of u (B, T, H) at once; reset (B, T) bool clears a row's state before that element.

        Returns y (B, T, H) and the state after the last element.
        """
        time, longest = u.shape[1], CHUNK if reset is None else RESET_CHUNK
        size = -(-time // -(-time // longest))  # equal chunks, not full ones and a short rest
        whole = time - time % size
        outputs = []
        for start, stop in ((0, whole), (whole, time)):
            if start == stop:
                continue
            shape = (-1, min(size, stop - start))
            clear = None if reset is None else reset[:, start:stop].unflatten(1, shape)
            y, states = self._chunks(u[:, start:stop].unflatten(1, shape), state, clear)
            outputs.append(y.flatten(1, 2))
            state = states[-1]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state

    def fork(self, u: Tensor, block: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """u (B, J, C, H) is J blocks whose first `block` elements enter the state and whose other elements do not.

        Those others see everything up to their block's end and themselves, causally, and leave no trace. Returns y (B,
        J, C, H) and the state after the last block.
        """
        y, states = self._chunks(u[:, :, :block], state, None)
        if block == u.shape[2]:
            return y, states[-1]
        ends = torch.stack(states[1:], 1).flatten(0, 1)
        answers, _ = self._chunks(u[:, :, block:].flatten(0, 1)[:, None], ends, None)
        return torch.cat((y, answers.view(*u.shape[:2], -1, u.shape[3])), 2), states[-1]

    def _chunks(self, u: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """u (B, J, C, H) in J chunks, reset (B, J, C). Returns y and the states before, between and after them."""
        with torch.autocast(u.device.type, enabled=False):
            chunk = self._chunk(u.shape[2])
            u = u.to(state.dtype).permute(3, 0, 1, 2)  # (H, B, J, C)
            entering, last = u, None
            if reset is not None:
                segment = reset.long().cumsum(-1)  # resets so far inside the chunk
                last = segment[..., -1:]
                entering = u.masked_fill(segment != last, 0.0)
            added = (entering.flatten(1, 2) @ chunk.inputs).unflatten(1, u.shape[1:3])  # (H, B, J, N)
            states = [state.transpose(0, 1)]
            for j in range(u.shape[2]):
                kept = states[-1] if last is None else states[-1].masked_fill(last[:, j] > 0, 0.0)
                states.append(torch.baddbmm(added[:, :, j], kept, chunk.power))
            y = (torch.stack(states[:-1], 2).flatten(1, 2) @ chunk.outputs).view(u.shape)
            if reset is None:
                y = y + (u.flatten(1, 2) @ chunk.inside).view(u.shape)
            else:
                y = y.masked_fill(segment > 0, 0.0) + _again(_within_segments, u, chunk.inside[:, 0], segment)
            return y.permute(1, 2, 3, 0), [each.transpose(0, 1) for each in states]

    def _chunk(self, size: int) -> Chunk:
        if size not in self.chunks:
            if len(self.chunks) == KEPT_CHUNKS:
                self.chunks.pop(next(iter(self.chunks)))
            with torch.inference_mode(False):  # the first caller's mode must not stick to what later ones use
                self.chunks[size] = Chunk(*_again(_operators, self.discrete, self.output, size))
        return self.chunks[size]


def _prepare(system: System, c_tilde: Tensor, length: int) -> tuple[Discrete, Tensor]:
    discrete = discretise(system)
    # The variant that does not look whether it succeeded, which would wait for the device.
    output, _ = torch.linalg.solve_ex(truncation(discrete, length), output_numbers(c_tilde)[..., None])
    return discrete, output.squeeze(-1)


def _operators(discrete: Discrete, output: Tensor, size: int) -> Chunk:
    """By doubling, from the highest bit of `size` on."""
    matrix = transition(discrete)
    first, last = discrete.input[:, None], matrix @ output[..., None]
    power, inputs, outputs = matrix, first, last
    for bit in bin(size)[3:]:
        inputs = torch.cat((inputs @ power, inputs), 1)
        outputs = torch.cat((outputs, power @ outputs), 2)
        power = power @ power
        if bit == "1":
            inputs = torch.cat((first @ power, inputs), 1)
            outputs = torch.cat((outputs, power @ last), 2)
            power = power @ matrix
    backwards = (inputs * output[:, None]).sum(-1)  # (H, C): the kernel, its last element first
    inside = F.pad(backwards, (0, size - 1)).unfold(1, size, 1).flip(2)
    return Chunk(power, inputs, outputs, inside)


def _within_segments(u: Tensor, kernel: Tensor, segment: Tensor) -> Tensor:
    """u (H, B, J, C) convolved with the kernel (H, C), by itself in each segment (B, J, C) of a chunk."""
    y = kernel[:, None, None, :1] * u
    for lag in range(1, u.shape[3]):
        # A matrix for each row would be as exact but C times as large: the rows' segments differ.
        near = u[..., :-lag].masked_fill(segment[..., :-lag] != segment[..., lag:], 0.0)
        y[..., lag:] += kernel[:, None, None, lag, None] * near
    return y


def _numbers(column: Tensor) -> Tensor:
    """Half a complex vector (..., N / 2) as N numbers."""
    return torch.view_as_real(column).flatten(-2)


def _again(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), whose inner results are computed again in the backward pass instead of kept."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
