"""The state-space layer of S4: one linear system per channel.

    x' = A x + B u,  y = 2 Re(C x),  A = diag(Lambda) - P P^*        in continuous time, state in conjugate pairs
    x_t = Abar x_{t-1} + Bbar u_t,   y_t = 2 Re(C x_t)               bilinear, step size dt
    y = K * u,  K_l = 2 Re(C Abar^l Bbar)                            the same as a convolution

Only one half of each conjugate pair is stored, and P^* x means 2 Re(sum conj(P) x). The half state is only real-linear.
So states and their matrices are real, with (re, im) side by side: N numbers for M = N / 2 pairs. In these numbers A
rotates and decays each pair, less twice an outer product p p^T. So Abar never lengthens a state.

The learned parameter is not C but C~ = C (I - Abar^L) for one fixed kernel length L. Then the kernel's spectrum at the
L-th roots of unity is a few Cauchy sums. `reference` is the definition and `kernel` the Cauchy form. `Systems` runs the
systems of several layers over sequences, as a convolution or with a state. The Cauchy sums and the step have Triton
forms; all other work on a GPU is a few large products. The caller adds the skip connection (the paper's D).

All arithmetic is float32 (float64 for float64 parameters), also under autocast. Powers of Abar are float64, because
decays are close to 1. The backward pass recomputes the prepared operators instead of storing them. First derivatives
only.

Axes: S layers, B batch, T time, H channels, N state numbers, M pairs, J chunks, C elements of a chunk, R rows, F
frequencies.

Source: S4 (Gu et al. 2022, arXiv 2111.00396).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from wmcli.kernels.dispatch import jit, on_triton, tl, triton

CHUNK = 64  # elements: the cost inside chunks grows with their length, that between chunks falls
NEAR, PARTS = 16, 8  # with resets: elements of the smallest parts of a convolution, and parts of a whole
STORED_CHUNKS = 4  # chunk lengths whose operators are stored
PREPARED_ELEMENTS = 1 << 23  # of the largest tensor while several layers are prepared together
CACHED_ELEMENTS = 1 << 19  # of (H, M, F) at a time in the torch form of the Cauchy sums, for the processor's cache
FREQUENCIES = 128  # per Triton program of the Cauchy sums
PAIRS, PAIR_FREQUENCIES = 16, 64  # per Triton program of their gradients, and frequencies at a time
STEP_CHANNELS, STEP_PROGRAMS = 16, 1024  # channels per Triton program of the step; enough programs for a GPU
STEP_NUMBERS = 1 << 17  # state numbers that a step without gradients updates at a time, for the processor's cache


class System(NamedTuple):
    """Continuous-time systems: complex tensors of one half of each pair. More axes may come first."""

    dt: Tensor
    """(H,) real, positive."""
    poles: Tensor
    """Lambda, (H or 1, M), real parts negative."""
    p: Tensor
    """P, (H or 1, M)."""
    b: Tensor
    """B, (H or 1, M)."""


def reference(system: System, c: Tensor, length: int) -> Tensor:
    """Compute the kernel (H, length) by its definition, from C (H, M), not C~.

    It takes powers of the discretized matrix, on both halves of each pair.
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


# -- the kernel --------------------------------------------------------------------------------------------------------


def kernel(system: System, c_tilde: Tensor, length: int) -> Tensor:
    """Return the kernel (..., H, length) from C~ (..., H, M), which must belong to the same length.

    The truncated generating function at exp(-i theta) is, with c = cos(theta / 2) and s = sin(theta / 2),

        exp(i theta / 2) (k(C~ B) - c k(C~ P) k(P^* B) / (1 + c k(P^* P)))
        k(v) = sum_n (-2 c Re(v_n w_n^*) + 4 i s Re v_n) / (c^2 |w_n|^2 - 4 s^2 - 4 i s c Re w_n),  w = dt Lambda, v dt

    This is the paper's Cauchy kernel with the poles of each pair combined and multiplied by c. It is finite at theta =
    pi, unlike the paper's form, and real up to the last line. A shorter kernel is the start of a longer one.
    """
    with torch.autocast(c_tilde.device.type, enabled=False):
        dt = system.dt[..., None]
        w = dt * system.poles
        p, b = dt * system.p, system.b
        v = torch.stack(torch.broadcast_tensors(dt * c_tilde * b, c_tilde * p, p.conj() * b, p.conj() * system.p), -2)
        weights = torch.cat(((v * w.conj()[..., None, :]).real, v.real), -2)  # (..., H, 8, M)
        size = w.real.square() + w.imag.square()
        # In float64: rounded, the angles alone would cost two digits of the kernel.
        half = torch.arange(length // 2 + 1, dtype=torch.float64, device=w.device) * (math.pi / length)
        cos, sin = half.cos().to(weights.dtype), half.sin().to(weights.dtype)
        k00, k01, k10, k11 = cauchy(weights, w.real, size, cos, sin).unbind(-2)
        spectrum = torch.complex(cos, sin) * (k00 - cos * k01 * k10 / (1 + cos * k11))
        return torch.fft.irfft(spectrum, length)


def cauchy_reference(weights: Tensor, real: Tensor, size: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `cauchy` by its definition, with every quotient in memory."""
    re = cos.square() * size[..., None] - 4 * sin.square()  # (H, M, F)
    im = -4 * sin * cos * real[..., None]
    product, v = (part[..., None] for part in weights.chunk(2, -2))  # (H, 4, M, 1)
    return (torch.complex(-2 * cos * product, 4 * sin * v) / torch.complex(re, im)[..., None, :, :]).sum(-2)


def cauchy(weights: Tensor, real: Tensor, size: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the four k(v) of `kernel` at F nodes. Not all quotients (H, M, F) exist at a time.

    Args:
        weights: (..., H, 8, M), the four Re(v w^*) and then the four Re v. Can be differentiated.
        real: (..., H, M), Re w. Can be differentiated.
        size: (..., H, M), |w|^2. Can be differentiated.
        cos: (F,), cos(theta / 2).
        sin: (F,), sin(theta / 2).

    Returns:
        (..., H, 4, F), complex.
    """
    flat = weights.flatten(0, -3), real.flatten(0, -2), size.flatten(0, -2)
    sums = torch.view_as_complex(_Cauchy.apply(*(each.contiguous() for each in flat), cos, sin))
    return sums.view(*weights.shape[:-2], 4, len(cos))


class _Cauchy(torch.autograd.Function):
    """The sums as (H, 4, F, 2), real and imaginary parts."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, real: Tensor, size: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(weights, real, size, cos, sin)
        (channels, pairs), nodes = real.shape, len(cos)
        sums = weights.new_empty(channels, 4, nodes, 2)
        if on_triton(weights):
            grid = (channels, triton.cdiv(nodes, FREQUENCIES))
            _cauchy_forward[grid](weights, real, size, cos, sin, sums, pairs, nodes, TILE=FREQUENCIES, num_warps=4)
            return sums
        for part in _parts(channels, pairs * nodes):
            _, quotients = _quotients(real[part], size[part], cos, sin)
            # (H, 4, 2 F): of the real and of the imaginary parts
            of_product, of_v = (weights[part] @ quotients).chunk(2, 1)
            torch.sub(4 * sin * of_v[..., nodes:], 2 * cos * of_product[..., :nodes], out=sums[part, ..., 0])
            torch.add(4 * sin * of_v[..., :nodes], 2 * cos * of_product[..., nodes:], out=sums[part, ..., 1])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, real, size, cos, sin = ctx.saved_tensors
        (channels, pairs), nodes = real.shape, len(cos)
        grad_weights, grad_real, grad_size = (torch.empty_like(each) for each in (weights, real, size))
        if on_triton(weights):
            tile = min(PAIRS, triton.next_power_of_2(pairs))
            _cauchy_backward[(channels, triton.cdiv(pairs, tile))](
                weights, real, size, cos, sin, gradient.contiguous(), grad_weights, grad_real, grad_size,
                pairs, nodes, PAIRS=tile, TILE=PAIR_FREQUENCIES, num_warps=4,
            )  # fmt: skip
            return grad_weights, grad_real, grad_size, None, None
        for part in _parts(channels, pairs * nodes):
            scale, quotients = _quotients(real[part], size[part], cos, sin)
            grad_re, grad_im = gradient[part].unbind(-1)  # (H, 4, F)
            of_re = torch.cat((-2 * cos * grad_re, 4 * sin * grad_im), 1)
            of_im = torch.cat((2 * cos * grad_im, 4 * sin * grad_re), 1)
            grad_sums = torch.cat((of_re, of_im), 2)  # (H, 8, 2 F)
            torch.bmm(grad_sums, quotients.mT, out=grad_weights[part])
            re, im = quotients.unflatten(2, (2, nodes)).unbind(2)
            of_re, of_im = (weights[part].mT @ grad_sums).unflatten(2, (2, nodes)).unbind(2)  # (H, M, F)
            twice = torch.addcmul(of_re * re, of_im, im).mul_(2)
            of_re = of_re.mul(scale).addcmul_(re, twice, value=-1)
            of_im = of_im.mul(scale).addcmul_(im, twice, value=-1)
            grad_size[part], grad_real[part] = of_re @ cos.square(), of_im @ (-4 * sin * cos)
        return grad_weights, grad_real, grad_size, None, None


def _quotients(real: Tensor, size: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / |d|^2 (H, M, F) for the denominators d of `kernel`; Re d / |d|^2, then Im d / |d|^2 (H, M, 2 F)."""
    nodes = len(cos)
    parts = real.new_empty(*real.shape, 2 * nodes)
    re, im = parts[..., :nodes], parts[..., nodes:]
    torch.mul(size[..., None], cos.square(), out=re).sub_(4 * sin.square())
    torch.mul(real[..., None], -4 * sin * cos, out=im)
    scale = re.square().addcmul_(im, im).reciprocal_()
    re.mul_(scale)
    im.mul_(scale)
    return scale, parts


def _parts(rows: int, elements: int) -> list[slice]:
    """Slice rows of `elements` each, as many at a time as stay in the processor's cache."""
    step = max(1, CACHED_ELEMENTS // elements)
    return [slice(start, start + step) for start in range(0, rows, step)]


@jit
def _cauchy_forward(weights, real, size, cos, sin, sums, pairs, nodes, TILE: tl.constexpr):
    """Sum over the pairs of one channel, for a tile of frequencies."""
    channel = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = node < nodes
    c, s = tl.load(cos + node, mask=inside, other=1.0), tl.load(sin + node, mask=inside, other=0.0)
    weights += channel * 8 * pairs
    real += channel * pairs
    size += channel * pairs
    re0, re1, re2, re3 = tl.zeros_like(c), tl.zeros_like(c), tl.zeros_like(c), tl.zeros_like(c)
    im0, im1, im2, im3 = tl.zeros_like(c), tl.zeros_like(c), tl.zeros_like(c), tl.zeros_like(c)
    for pair in range(pairs):
        re = c * c * tl.load(size + pair) - 4 * s * s
        im = -4 * s * c * tl.load(real + pair)
        scale = 1 / (re * re + im * im)
        re *= scale
        im *= scale
        # (-2 c product + 4 i s v) (re - i im)
        a_re, a_im, v_re, v_im = -2 * c * re, 2 * c * im, 4 * s * im, 4 * s * re
        product, v = tl.load(weights + pair), tl.load(weights + 4 * pairs + pair)
        re0 += product * a_re + v * v_re
        im0 += product * a_im + v * v_im
        product, v = tl.load(weights + pairs + pair), tl.load(weights + 5 * pairs + pair)
        re1 += product * a_re + v * v_re
        im1 += product * a_im + v * v_im
        product, v = tl.load(weights + 2 * pairs + pair), tl.load(weights + 6 * pairs + pair)
        re2 += product * a_re + v * v_re
        im2 += product * a_im + v * v_im
        product, v = tl.load(weights + 3 * pairs + pair), tl.load(weights + 7 * pairs + pair)
        re3 += product * a_re + v * v_re
        im3 += product * a_im + v * v_im
    sums += (channel * 4 * nodes + node) * 2
    tl.store(sums, re0, mask=inside)
    tl.store(sums + 1, im0, mask=inside)
    tl.store(sums + 2 * nodes, re1, mask=inside)
    tl.store(sums + 2 * nodes + 1, im1, mask=inside)
    tl.store(sums + 4 * nodes, re2, mask=inside)
    tl.store(sums + 4 * nodes + 1, im2, mask=inside)
    tl.store(sums + 6 * nodes, re3, mask=inside)
    tl.store(sums + 6 * nodes + 1, im3, mask=inside)


@jit
def _cauchy_backward(
    weights, real, size, cos, sin, gradient, grad_weights, grad_real, grad_size, pairs, nodes,
    PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum over all frequencies, tile by tile, for a tile of pairs of one channel."""
    channel = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    valid = pair < pairs
    real_ = tl.load(real + channel * pairs + pair, mask=valid, other=-1.0)[:, None]
    size_ = tl.load(size + channel * pairs + pair, mask=valid, other=1.0)[:, None]
    row = tl.arange(0, 8)  # of the weights
    place = (channel * 8 + row[:, None]) * pairs + pair[None, :]
    of_weights = tl.zeros((8, PAIRS), tl.float32)
    of_real, of_size = tl.zeros((PAIRS,), tl.float32), tl.zeros((PAIRS,), tl.float32)
    for start in range(0, nodes, TILE):
        node = start + tl.arange(0, TILE)
        inside = node < nodes
        c, s = tl.load(cos + node, mask=inside, other=1.0), tl.load(sin + node, mask=inside, other=0.0)
        re = (c * c)[None, :] * size_ - (4 * s * s)[None, :]
        im = (-4 * s * c)[None, :] * real_
        scale = 1 / (re * re + im * im)
        re *= scale
        im *= scale
        from_re, from_im = tl.zeros((PAIRS, TILE), tl.float32), tl.zeros((PAIRS, TILE), tl.float32)
        for v in tl.static_range(4):
            at = gradient + ((channel * 4 + v) * nodes + node) * 2
            g_re, g_im = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
            product_re, product_im, v_re, v_im = -2 * c * g_re, 2 * c * g_im, 4 * s * g_im, 4 * s * g_re
            of_product = tl.sum(product_re[None, :] * re + product_im[None, :] * im, 1)
            of_v = tl.sum(v_re[None, :] * re + v_im[None, :] * im, 1)
            of_weights += tl.where(row == v, 1.0, 0.0)[:, None] * of_product[None, :]
            of_weights += tl.where(row == v + 4, 1.0, 0.0)[:, None] * of_v[None, :]
            own = weights + (channel * 8 + v) * pairs + pair
            product = tl.load(own, mask=valid, other=0.0)[:, None]
            value = tl.load(own + 4 * pairs, mask=valid, other=0.0)[:, None]
            from_re += product * product_re[None, :] + value * v_re[None, :]
            from_im += product * product_im[None, :] + value * v_im[None, :]
        twice = 2 * (from_re * re + from_im * im)
        of_size += tl.sum((from_re * scale - re * twice) * (c * c)[None, :], 1)
        of_real += tl.sum((from_im * scale - im * twice) * (-4 * s * c)[None, :], 1)
    tl.store(grad_weights + place, of_weights, mask=valid[None, :])
    tl.store(grad_real + channel * pairs + pair, of_real, mask=valid)
    tl.store(grad_size + channel * pairs + pair, of_size, mask=valid)


# -- the discretized system --------------------------------------------------------------------------------------------


class Discrete(NamedTuple):
    """Discrete-time systems x_t = diagonal x - 2 column Re(row . x) + input u, complex, on the pairs."""

    diagonal: Tensor
    """(..., H, M), as the others."""
    column: Tensor
    row: Tensor
    input: Tensor


class Step(NamedTuple):
    """Operators of one element: x_t = diagonal x - column (row . x) + input u,  y = output . x."""

    diagonal: Tensor
    """(H, M) complex, on the pairs."""
    column: Tensor
    """(H, N), as the others."""
    row: Tensor
    input: Tensor
    output: Tensor


class Chunk(NamedTuple):
    """Operators of C elements at once. States are rows: after C elements without input a state x is x @ power."""

    power: Tensor
    """(H, N, N)."""
    inputs: Tensor
    """(H, C, N): the contribution of each element to the state after the chunk."""
    outputs: Tensor
    """(H, N, reach): the contribution of the state before the chunk to each output; reach may exceed C."""
    kernel: Tensor
    """(H, reach)."""
    inside: Tensor
    """(H, reach, reach): the contribution of each element (second axis) to each output (last axis)."""
    rest: Tensor | None = None
    """(H, N, N): the power of a shorter chunk; None without one."""


def discretize(system: System) -> Discrete:
    """Discretize bilinearly, by the matrix inversion lemma: Abar is diagonal plus rank one. Computed in float64."""
    wide = _double(system)
    half = wide.dt[..., None] / 2
    inverse = 1 / (1 - half * wide.poles)
    column, row = inverse * wide.p, inverse * wide.p.conj()
    # 1 / (1 + P^* inverse P dt / 2); twice the real part, for both halves of each pair.
    correction = 1 / (1 + 2 * half * (row * wide.p).sum(-1, keepdim=True).real)
    into = 2 * half * (inverse * wide.b - column * (2 * half * correction * (row * wide.b).sum(-1, keepdim=True).real))
    discrete = Discrete(2 * inverse - 1, column, 2 * half * correction * row, into)
    return Discrete(*(part.to(system.poles.dtype) for part in discrete))


def _double(system: System) -> System:
    """Convert to float64, for powers."""
    return System(*(part.to(torch.promote_types(part.dtype, torch.float64)) for part in system))


def output(discrete: Discrete, c_tilde: Tensor, length: int) -> Tensor:
    """Return C (..., H, M) from C~ = C (I - Abar^length), for a system in float64.

    At the roots of unity z of that length, C~ (I - z Abar)^-1 is the spectrum of C Abar^l, l < length. The first
    element of that series is C. By the matrix inversion lemma the spectrum is, with G = (I - z diagonal)^-1,

        C~ G - z (C~ G column) / (1 + z row G column) row G

    Numbers like row G column are the spectrum of a series row diagonal^l column / (1 - diagonal^length). A product with
    G is again a sum over such powers. For length = J C a power is a product of one of J and one of C powers.
    """
    diagonal, column, row, _ = discrete
    size = 1 << math.isqrt(length - 1).bit_length()
    near, step = _powers(diagonal, size)  # (..., H, C, M)
    far, _ = _powers(step, length // size + 1)
    wrapped = 1 / (1 - far[..., length // size, :] * near[..., length % size, :])
    numbers = _numbers(near)
    weights = torch.stack((c_tilde * column, row * column), -2) * wrapped[..., None, :]
    spread = output_numbers(weights[..., None, :] * far[..., None, :, :])  # (..., H, 2, J, N)
    series = (spread.flatten(-3, -2) @ numbers.mT).unflatten(-2, (2, -1)).flatten(-2)[..., :length]
    of_c, of_row = torch.fft.rfft(series).unbind(-2)
    angle = torch.arange(length // 2 + 1, dtype=series.dtype, device=series.device) * (-2 * math.pi / length)
    fed_back = torch.fft.irfft(of_c / (1 + torch.polar(torch.ones_like(angle), angle) * of_row), length).flip(-1)
    fed_back = F.pad(fed_back, (0, -length % size)).unflatten(-1, (-1, size))
    sums = _pairs(fed_back @ numbers) * far[..., : fed_back.shape[-2], :]
    return wrapped * (c_tilde - row * sums.sum(-2))


def step_operators(discrete: Discrete, c: Tensor, dtype: torch.dtype) -> Step:
    """Return the operators of one element in a real dtype, with C (..., H, M)."""
    diagonal, column, row, into = discrete
    parts = _numbers(column), output_numbers(row), _numbers(into), output_numbers(c)
    return Step(diagonal.to(dtype.to_complex()), *(part.to(dtype) for part in parts))


def chunk_operators(discrete: Discrete, c: Tensor, dtype: torch.dtype, size: int, reach: int, rest: int = 0) -> Chunk:
    """Return the operators of chunks in a real dtype, for a system in float64.

    Let f_l = row . x_l be the feedback of the rank-one part. Then x_l is a sum of powers of the diagonal over earlier
    input and feedback. The feedback of a series is its value without feedback, filtered by the inverse of a lower
    Toeplitz matrix. The matrix has the first column 1, row column, row diagonal column, and so on.

    Args:
        discrete: The system, float64.
        c: C, (..., H, M).
        dtype: The real dtype of the operators.
        size: Elements of a chunk.
        reach: Elements with an output, at least `size`; see `Chunk`.
        rest: Elements of a shorter chunk whose power is needed too; 0: none.
    """
    powers, _ = _powers(discrete.diagonal, reach + 1)
    powers, column, row, into, c = (each.to(dtype.to_complex()) for each in (powers, *discrete[1:], c))
    first = powers[..., :-1, :]
    inputs, columns = _numbers(first * into[..., None, :]), _numbers(first * column[..., None, :])  # (..., H, reach, N)
    rows, outputs = output_numbers(first * row[..., None, :]), output_numbers(powers * c[..., None, :])
    into, column = (_numbers(each)[..., None, :] for each in (into, column))
    feedback = _toeplitz(F.pad((rows * column).sum(-1)[..., :-1], (1, 0), value=1.0))
    start = F.pad(feedback.new_ones(*feedback.shape[:-2], 1, 1), (0, 0, 0, reach - 1))
    feedback = _toeplitz(torch.linalg.solve_triangular(feedback, start, upper=False).squeeze(-1))
    unfed = torch.stack(((rows * into).sum(-1), (outputs[..., :-1, :] * column).sum(-1)), -2)
    of_input, of_output = (unfed @ feedback.mT).unbind(-2)  # row Abar^l input, and the output's share of the feedback
    inputs = inputs - _toeplitz(F.pad(of_input[..., :-1], (1, 0))) @ columns
    outputs = outputs[..., 1:, :] - _toeplitz(of_output) @ rows
    rows = feedback @ rows  # row Abar^l
    kernel = (inputs * output_numbers(c)[..., None, :]).sum(-1)
    power, *shorter = (
        _turn(powers[..., count, :]) - rows[..., :count, :].mT @ columns[..., :count, :].flip(-2)
        for count in (size, rest)
        if count
    )
    parts = inputs[..., :size, :].flip(-2), outputs.mT, kernel, _toeplitz(kernel).mT
    return Chunk(power, *(part.contiguous() for part in parts), *shorter)


def advance(step: Step, x: Tensor) -> Tensor:
    """Return states x (..., H, N) one element later, without input: O(N) per channel."""
    turned = _numbers(step.diagonal * _pairs(x))
    return turned.addcmul_(step.column, (step.row * x).sum(-1, keepdim=True), value=-1)


def transition(discrete: Discrete) -> Tensor:
    """Return the matrices (..., H, N, N) with x @ matrix = state x one element later, without input."""
    row, column = output_numbers(discrete.row), _numbers(discrete.column)
    return _turn(discrete.diagonal) - row[..., :, None] * column[..., None, :]


def truncation(discrete: Discrete, length: int) -> Tensor:
    """Return I - Abar^length as matrices (..., H, N, N): C~ is this times C, both as columns of `output_numbers`."""
    matrix = transition(discrete)
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return one - torch.linalg.matrix_power(matrix, length)


def _numbers(x: Tensor) -> Tensor:
    """Return half a complex vector (..., M) as N numbers."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2)


def _pairs(x: Tensor) -> Tensor:
    """Return N numbers as half a complex vector (..., M), the inverse of `_numbers`."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def output_numbers(c: Tensor) -> Tensor:
    """Return C (..., M), complex, as N numbers w with w . x = 2 Re(C x)."""
    return 2 * _numbers(c.conj())


def _powers(base: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the powers 0 .. count - 1 of base (..., M) as (..., count, M), and the next one.

    The next one is right only if count is a power of two.
    """
    powers, factor = torch.ones_like(base)[..., None, :], base[..., None, :]
    while powers.shape[-2] < count:
        powers = torch.cat((powers, powers * factor), -2)
        factor = factor * factor
    return powers[..., :count, :], factor.squeeze(-2)


def _toeplitz(x: Tensor) -> Tensor:
    """Return the lower triangular Toeplitz matrices (..., C, C) with first column x (..., C)."""
    return F.pad(x, (x.shape[-1] - 1, 0)).unfold(-1, x.shape[-1], 1).flip(-1)


def _turn(diagonal: Tensor) -> Tensor:
    """Return the matrices (..., N, N) with x @ matrix = diagonal x, for states as numbers."""
    one = torch.eye(2 * diagonal.shape[-1], dtype=diagonal.real.dtype, device=diagonal.device)
    return _numbers(_pairs(one) * diagonal[..., None, :])


# -- convolution -------------------------------------------------------------------------------------------------------


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """Return y_t = sum_l kernel_l u_{t - l} of u (B, T, H) and kernel (H, L), T <= L, by FFT in the kernel's dtype."""
    time = u.shape[1]
    assert time <= kernel.shape[1]
    with torch.autocast(u.device.type, enabled=False):
        size = 1 << (2 * time - 2).bit_length()  # nothing wraps around
        spectrum = torch.fft.rfft(kernel[:, :time], size).mT
        return torch.fft.irfft(torch.fft.rfft(u.to(kernel.dtype), size, dim=1) * spectrum, size, dim=1)[:, :time]


def convolve_segments(u: Tensor, kernel: Tensor, segments: Segments) -> Tensor:
    """Return y (H, R, C), each segment of the rows u (H, R, C) convolved with the kernel (H, C or longer)."""
    return _Segmented.apply(u.contiguous(), kernel[:, : u.shape[2]], segments)


class Segments:
    """Rows (R, C) cut by resets into independent segments, and the masks of a convolution.

    A row is cut into parts, in several levels if it is long. Inside the smallest parts each element sees its few
    neighbors. Everything that reaches a part from earlier ones passes the end of the part before. It comes from the
    segment at that end and goes to the remainder of that segment. So one product with a Toeplitz matrix, the same for
    all rows, suffices between two masks.
    """

    def __init__(self, number: Tensor, dtype: torch.dtype) -> None:
        """Prepare the masks.

        Args:
            number: (R, C), the count of resets in each row so far.
            dtype: Dtype of the masks, which are factors.
        """
        self.number, self.dtype = number, dtype
        time = number.shape[1]
        parts = -(-time // NEAR)
        self.near = length = -(-time // parts)
        self.levels: list[tuple[int, int]] = []
        """The length of a whole, and of its parts, at each level."""
        while parts > 1:
            wholes = -(-parts // PARTS)
            size = length * -(-parts // wholes)
            self.levels.append((size, length))
            parts, length = wholes, size
        self.padding = length - time
        padded = F.pad(number, (0, self.padding))
        own = padded.view(-1, self.near)
        own = own + torch.arange(len(own), device=own.device)[:, None] * (time + 1)  # no number twice in two parts
        self.neighbors = (_neighbors(own.view(1, -1), self.near, -1) == own.view(-1)).to(dtype)  # (1, near, R C)
        self.borders = []
        for size, length in self.levels:
            cut = padded.view(-1, size // length, length)
            end = cut[:, :-1, -1:]
            passes = _windows(padded.view(-1, size), length) == end, cut[:, 1:] == end
            self.borders.append([each.to(dtype) for each in passes])

    @cached_property
    def reversed(self) -> Segments:
        """Return the same segments from the last element to the first."""
        return Segments(self.number.flip(1), self.dtype)

    @cached_property
    def lost(self) -> Tensor:
        """Return (R, C) bool: a later reset clears the element."""
        return self.number != self.number[:, -1:]

    @cached_property
    def fresh(self) -> Tensor:
        """Return (R, C) bool: a reset precedes the element, or is at it."""
        return self.number > 0


class Resets:
    """Resets (B, T) bool of rows, each before an element; their segments are computed once for all layers."""

    def __init__(self, reset: Tensor) -> None:
        self.reset = reset
        self._cache: dict[Any, Segments] = {}

    def segments(self, start: int, stop: int, size: int, dtype: torch.dtype) -> Segments:
        """Return the segments of the elements from `start` to `stop`, in rows of `size`."""
        key = start, stop, size, dtype
        if key not in self._cache:
            self._cache[key] = Segments(self.reset[:, start:stop].reshape(-1, size).long().cumsum(1), dtype)
        return self._cache[key]


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Tensor, segments: Segments) -> Tensor:
        ctx.save_for_backward(u, kernel)
        ctx.segments = segments
        return _segmented(u, kernel, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (u, kernel), segments = ctx.saved_tensors, ctx.segments
        grad_u = grad_kernel = None
        if ctx.needs_input_grad[0]:  # the same from the last element to the first
            grad_u = _segmented(gradient.flip(2), kernel, segments.reversed).flip(2)
        if ctx.needs_input_grad[1]:
            channels = len(u)
            u, gradient = (F.pad(each, (0, segments.padding)).contiguous() for each in (u, gradient))
            grad_kernel = u.new_zeros(channels, u.shape[2])
            near = _neighbors(u.view(channels, -1), segments.near) * segments.neighbors
            grad_kernel[:, : segments.near] = (gradient.view(channels, 1, -1) @ near.mT).squeeze(1).flip(1)
            for (size, length), (leaves, enters) in zip(segments.levels, segments.borders, strict=True):
                past = (_windows(u.view(channels, -1, size), length) * leaves).flatten(1, 2)
                heard = gradient.view(channels, -1, size // length, length)[:, :, 1:] * enters
                products = (past.mT @ heard.flatten(1, 2)).flip(1)  # (H, size - length, length): lag 1 + row + column
                # Each row begins one element further right than the one above: columns are lags.
                slanted = F.pad(products, (0, size - length)).flatten(1)[:, : (size - length) * (size - 1)]
                grad_kernel[:, 1:size] += slanted.unflatten(1, (-1, size - 1)).sum(1)
            grad_kernel = grad_kernel[:, : kernel.shape[1]]
        return grad_u, grad_kernel, None


def _segmented(u: Tensor, kernel: Tensor, segments: Segments) -> Tensor:
    """Compute `convolve_segments`."""
    channels, _, time = u.shape
    u, kernel = (F.pad(each, (0, segments.padding)).contiguous() for each in (u, kernel))
    near = _neighbors(u.view(channels, -1), segments.near) * segments.neighbors
    y = (kernel[:, None, : segments.near].flip(2) @ near).view(u.shape)
    for (size, length), (leaves, enters) in zip(segments.levels, segments.borders, strict=True):
        past = _windows(u.view(channels, -1, size), length) * leaves  # (H, R, parts - 1, size - length)
        lags = kernel[:, 1:size].unfold(1, length, 1).flip(1)  # (H, size - length, length): the last is the nearest
        heard = (past.flatten(1, 2) @ lags).view(*past.shape[:3], length).mul_(enters)
        y.view(channels, -1, size // length, length)[:, :, 1:] += heard
    return y[..., :time]


def _neighbors(x: Tensor, near: int, nothing: float = 0.0) -> Tensor:
    """Return the `near` elements up to each element of x (..., n), oldest first: (..., near, n)."""
    return F.pad(x, (near - 1, 0), value=nothing).unfold(-1, x.shape[-1], 1)


def _windows(x: Tensor, length: int) -> Tensor:
    """Return the elements of x (..., size) before each part of `length` but the first, padded with zeros in front.

    The shape is (..., parts - 1, size - length).
    """
    before = x.shape[-1] - length
    return F.pad(x[..., :before], (before - length, 0)).unfold(-1, before, length)


# -- the systems of several layers -------------------------------------------------------------------------------------


class Systems:
    """The systems of several layers, for one version of their parameters, run over sequences.

    Operators that follow from the parameters alone are prepared at their first use, for several layers together. They
    may become part of any number of graphs. States are (B, H, N).
    """

    def __init__(
        self,
        build: Callable[..., tuple[Any, ...]],
        parameters: Sequence[Sequence[Tensor]],
        length: int,
        *,
        graph: bool = True,
    ) -> None:
        """Store the parameters without computing anything.

        Args:
            build: Makes systems and C~ (S, H, M) of the stacked groups.
            parameters: Groups of one tensor per layer, the last of them those of C~.
            length: The kernel length of C~.
            graph: Whether gradients flow to the parameters.
        """
        self.build, self.parameters, self.length = build, parameters, length
        self.graph = graph
        self._cache: dict[Any, list[tuple[Tensor, ...]]] = {}
        self._recorded: set[Any] = set()  # keys that a recorded CUDA graph reads at every replay

    def convolve(self, layer: int, u: Tensor, resets: Resets | None = None) -> Tensor:
        """Run from a zero state: u (B, T, H), T <= length, to y (B, T, H)."""
        (kernel,) = self._prepared("kernel", _kernel)[layer]
        if resets is None:
            return convolve(u, kernel)
        time = u.shape[1]
        with torch.autocast(u.device.type, enabled=False):
            u = u.to(kernel.dtype).permute(2, 0, 1)
            return convolve_segments(u, kernel, resets.segments(0, time, time, u.dtype)).permute(1, 2, 0)

    def step(self, layer: int, u: Tensor, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run one element u (B, H), reset (B,) bool. Return y (B, H) and the new state."""
        operators = self.step_operators(layer)
        with torch.autocast(u.device.type, enabled=False):
            return run_step(operators, u, state, reset)

    def run(self, layer: int, u: Tensor, state: Tensor, resets: Resets | None = None) -> tuple[Tensor, Tensor]:
        """Run all of u (B, T, H) at once. Return y (B, T, H) and the state after the last element."""
        time = u.shape[1]
        size = -(-time // -(-time // CHUNK))  # equal chunks, not full ones and a short rest
        rest = time % size
        chunk = self.chunk_operators(layer, size, size, rest)
        parts = [(0, time - rest, chunk)] + ([(time - rest, time, _shorter(chunk, rest))] if rest else [])
        outputs = []
        with torch.autocast(u.device.type, enabled=False):
            u, state = u.to(state.dtype).permute(2, 0, 1).contiguous(), state.transpose(0, 1)
            for start, stop, chunk in parts:
                length = chunk.inputs.shape[1]
                segments = None if resets is None else resets.segments(start, stop, length, u.dtype)
                part = u[:, :, start:stop].unflatten(2, (-1, length))  # (H, B, J, C)
                states = _states(chunk, part, state, segments)
                rows, before = part.flatten(1, 2), torch.stack(states[:-1], 2).flatten(1, 2)
                if segments is None:
                    y = torch.baddbmm(before @ chunk.outputs, rows, chunk.inside)
                else:
                    y = (before @ chunk.outputs).masked_fill(segments.fresh, 0.0)
                    y = y + convolve_segments(rows, chunk.kernel, segments)
                outputs.append(y.view(*part.shape[:2], -1))
                state = states[-1]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return y.permute(1, 2, 0), state.transpose(0, 1)

    def fork(self, layer: int, u: Tensor, block: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run u (B, J, C, H), J blocks of which only the first `block` elements enter the state.

        The other elements depend on everything up to the end of their block's first part, and on one another causally.
        They do not enter the state. Return y (B, J, C, H) and the state after the last block.
        """
        count = u.shape[2] - block
        chunk = self.chunk_operators(layer, block, max(block, count))
        with torch.autocast(u.device.type, enabled=False):
            u = u.to(state.dtype).permute(3, 0, 1, 2).contiguous()  # (H, B, J, C)
            states = _states(chunk, u[..., :block], state.transpose(0, 1))
            borders, rows = torch.stack(states, 2), u.flatten(1, 2)
            before = (borders.flatten(1, 2) @ chunk.outputs).unflatten(1, borders.shape[1:3])  # (H, B, J + 1, reach)
            before = torch.cat((before[:, :, :-1, :block], before[:, :, 1:, :count]), 3)
            own = rows[..., :block] @ chunk.inside[:, :block, :block]
            others = rows[..., block:] @ chunk.inside[:, :count, :count]
            y = before + torch.cat((own, others), 2).view_as(before)
        return y.permute(1, 2, 3, 0), states[-1].transpose(0, 1)

    def step_operators(self, layer: int) -> Step:
        """Return the operators of `step`."""
        return Step(*self._prepared("step", _step)[layer])

    def chunk_operators(self, layer: int, size: int, reach: int, rest: int = 0) -> Chunk:
        """Return the operators of `run` and `fork`; see the function `chunk_operators`."""
        key = size, reach, rest
        if _recording():
            self._recorded.add(key)
        chunks = [other for other in self._cache if isinstance(other, tuple) and other not in self._recorded]
        if key not in self._cache and len(chunks) >= STORED_CHUNKS:
            self._cache.pop(chunks[0])
        return Chunk(*self._prepared(key, partial(_chunk, size=size, reach=reach, rest=rest), reach)[layer])

    def _prepared(
        self, key: Any, function: Callable[..., tuple[Tensor, ...]], reach: int = 1
    ) -> list[tuple[Tensor, ...]]:
        """Return the results of `function` on systems, C~ and length, one tuple per layer."""
        if key not in self._cache:
            c = self.parameters[-1][0]
            elements = c.numel() * (2 if c.is_complex() else 1)  # H N
            count = max(1, PREPARED_ELEMENTS // (elements * max(elements // len(c), reach)))
            function = partial(_from_parameters, self.build, partial(function, length=self.length))
            operators: list[tuple[Tensor, ...]] = []
            # The results must not depend on the modes of the first caller, because later callers use them too.
            with torch.inference_mode(False), torch.set_grad_enabled(self.graph):
                for start in range(0, len(self.parameters[0]), count):
                    groups = [group[start : start + count] for group in self.parameters]
                    layers = len(groups[0])
                    results = _Prepared.apply(function, layers, *(each for group in groups for each in group))
                    operators += [results[layer::layers] for layer in range(layers)]
            self._cache[key] = operators
        return self._cache[key]


def _recording() -> bool:
    """Return whether a CUDA graph is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Prepared(torch.autograd.Function):
    """function(stacked parameters), each result as one tensor per layer.

    Only the parameters are saved for the backward pass, as they were. So any number of backward passes may come
    through.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], layers: int, *parameters: Tensor) -> Any:
        ctx.function, ctx.layers = function, layers
        ctx.groups = [torch.stack(parameters[i : i + layers]) for i in range(0, len(parameters), layers)]
        ctx.set_materialize_grads(False)
        return _by_layer(function(*ctx.groups))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            groups = [group.detach().requires_grad_() for group in ctx.groups]
            results = _by_layer(ctx.function(*groups))
        pairs = [pair for pair in zip(results, gradients, strict=True) if pair[1] is not None]
        grads = torch.autograd.grad(
            [result for result, _ in pairs], groups, [gradient for _, gradient in pairs], allow_unused=True
        )
        return (
            None,
            None,
            *(each for group in grads for each in ([None] * ctx.layers if group is None else group.unbind())),
        )


def _by_layer(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each for result in results for each in result.unbind())


def _from_parameters(
    build: Callable[..., tuple[Any, ...]], function: Callable[..., tuple[Tensor, ...]], *groups: Tensor
) -> tuple[Tensor, ...]:
    """Apply `function` to the built systems without autocast, in the backward pass as well."""
    with torch.autocast(groups[0].device.type, enabled=False):
        return function(*build(*groups))


def _kernel(system: System, c_tilde: Tensor, length: int) -> tuple[Tensor, ...]:
    return (kernel(system, c_tilde, length),)


def _step(system: System, c_tilde: Tensor, length: int) -> tuple[Tensor, ...]:
    discrete = discretize(_double(system))
    return step_operators(discrete, output(discrete, c_tilde, length), system.dt.dtype)


def _chunk(system: System, c_tilde: Tensor, length: int, size: int, reach: int, rest: int) -> tuple[Tensor, ...]:
    discrete = discretize(_double(system))
    chunk = chunk_operators(discrete, output(discrete, c_tilde, length), system.dt.dtype, size, reach, rest)
    return tuple(part for part in chunk if part is not None)


def _shorter(chunk: Chunk, size: int) -> Chunk:
    """Return the operators of the remaining `size` elements, fewer than a chunk's."""
    assert chunk.rest is not None
    inside = chunk.inside[:, :size, :size]
    return Chunk(chunk.rest, chunk.inputs[:, -size:], chunk.outputs[..., :size], chunk.kernel[:, :size], inside)


def _states(chunk: Chunk, u: Tensor, state: Tensor, segments: Segments | None = None) -> list[Tensor]:
    """Return the states (H, B, N) before, between and after J chunks u (H, B, J, C) with segments."""
    rows = u.flatten(1, 2)
    if segments is not None:
        rows = rows.masked_fill(segments.lost, 0.0)
        cleared = segments.fresh[:, -1].view(-1, u.shape[2], 1)
    added = (rows @ chunk.inputs).unflatten(1, u.shape[1:3])  # (H, B, J, N)
    states = [state]
    for j, own in enumerate(added.unbind(2)):
        before = states[-1] if segments is None else states[-1].masked_fill(cleared[:, j], 0.0)
        states.append(torch.baddbmm(own, before, chunk.power))
    return states


# -- one element -------------------------------------------------------------------------------------------------------


def run_step(operators: Step, u: Tensor, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run one element.

    The Triton form is a single launch, for use without gradients, as in imagination. With gradients the PyTorch form
    runs.

    Args:
        operators: From `step_operators`.
        u: (B, H).
        state: (B, H, N).
        reset: (B,) bool. True clears the state before the element.

    Returns:
        y (B, H) and the new state.
    """
    graph = torch.is_grad_enabled() and any(each.requires_grad for each in (u, state, *operators))
    if on_triton(state) and not graph:
        return _fused_step(operators, u, state, reset)
    if reset is not None:
        state = state.masked_fill(reset[:, None, None], 0.0)
    driven = u.to(state.dtype)[..., None]
    if graph or state.device.type != "cpu" or state.numel() <= STEP_NUMBERS:
        state = advance(operators, state).addcmul_(operators.input, driven)
        return (operators.output * state).sum(-1), state
    before, state, y = state, torch.empty_like(state), torch.empty_like(u, dtype=state.dtype)
    rows = max(1, STEP_NUMBERS // state[0].numel())
    for driven_, before_, state_, y_ in zip(*(x.split(rows) for x in (driven, before, state, y)), strict=True):
        torch.mul(operators.diagonal, _pairs(before_), out=_pairs(state_))
        state_.addcmul_(operators.column, (operators.row * before_).sum(-1, keepdim=True), value=-1)
        state_.addcmul_(operators.input, driven_)
        torch.sum(operators.output * state_, -1, out=y_)
    return y, state


def _fused_step(operators: Step, u: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    diagonal, *others = operators
    state = state.contiguous()
    y, after = state.new_empty(u.shape), torch.empty_like(state)
    if reset is not None:
        reset = reset.contiguous().view(torch.uint8)
    (rows, channels), pairs = u.shape, diagonal.shape[1]
    tiles = triton.cdiv(channels, STEP_CHANNELS)
    each = max(1, rows * tiles // STEP_PROGRAMS)  # rows of a program, which reads the operators once
    _step_forward[(tiles, triton.cdiv(rows, each))](
        torch.view_as_real(diagonal).contiguous(), *(other.contiguous() for other in others), u, state, reset, y, after,
        rows, channels, pairs, *u.stride(), each,
        CHANNELS=STEP_CHANNELS, PAIRS=triton.next_power_of_2(pairs), num_warps=4,
    )  # fmt: skip
    return y, after


@jit
def _step_forward(
    diagonal, column, row, into, output, u, state, reset, y, after,
    rows, channels, pairs, u_row, u_channel, each, CHANNELS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Step a tile of channels for `each` rows of the batch.

    Even numbers of a channel's N are real parts, odd ones imaginary.
    """
    channel, pair = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PAIRS)
    there = channel < channels
    inside = there[:, None] & (pair < pairs)[None, :]
    re = (channel.to(tl.int64) * 2 * pairs)[:, None] + (2 * pair)[None, :]
    im = re + 1
    diagonal_re = tl.load(diagonal + re, mask=inside, other=0.0)
    diagonal_im = tl.load(diagonal + im, mask=inside, other=0.0)
    column_re, column_im = tl.load(column + re, mask=inside, other=0.0), tl.load(column + im, mask=inside, other=0.0)
    row_re, row_im = tl.load(row + re, mask=inside, other=0.0), tl.load(row + im, mask=inside, other=0.0)
    into_re, into_im = tl.load(into + re, mask=inside, other=0.0), tl.load(into + im, mask=inside, other=0.0)
    output_re, output_im = tl.load(output + re, mask=inside, other=0.0), tl.load(output + im, mask=inside, other=0.0)
    first = tl.program_id(1).to(tl.int64) * each
    for step in range(tl.minimum(each, rows - first)):
        b = first + step
        place = b * channels * 2 * pairs
        x_re = tl.load(state + place + re, mask=inside, other=0.0)
        x_im = tl.load(state + place + im, mask=inside, other=0.0)
        if reset is not None:  # chosen, not multiplied: 0 * inf would be NaN
            cleared = tl.load(reset + b) != 0
            x_re, x_im = tl.where(cleared, 0.0, x_re), tl.where(cleared, 0.0, x_im)
        driving = tl.load(u + b * u_row + channel.to(tl.int64) * u_channel, mask=there, other=0.0)
        driven = driving.to(tl.float32)[:, None]
        fed_back = tl.sum(row_re * x_re + row_im * x_im, 1)[:, None]
        new_re = diagonal_re * x_re - diagonal_im * x_im - column_re * fed_back + into_re * driven
        new_im = diagonal_re * x_im + diagonal_im * x_re - column_im * fed_back + into_im * driven
        tl.store(after + place + re, new_re, mask=inside)
        tl.store(after + place + im, new_im, mask=inside)
        out = tl.sum(output_re * new_re + output_im * new_im, 1)
        tl.store(y + b * channels + channel, out, mask=there)
