"""S4's kernel and recurrence against powers of the discretised matrix, and golden values of HiPPO-LegS systems.

Axes: B batch, T time, H channels, N numbers of a channel's state, J blocks, C elements of a block.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close
from wmcli.kernels import s4
from wmcli.kernels.s4 import Recurrence, System, advance, convolve, discretise, kernel, output_numbers, reference

from wmcli.backbones.s4 import hippo_legs

DT = (1e-3, 1e-2, 1e-1)


def legs(state: int, *dt: float) -> tuple[System, torch.Tensor]:
    """HiPPO-LegS with these step sizes, and the eigenvectors that lead back to its own basis."""
    poles, p, vectors = hippo_legs(state)
    return System(torch.tensor(dt, dtype=torch.float64), poles[None], p[None], math.sqrt(2) * p[None]), vectors


def random_system(channels: int, state: int, seed: int = 0) -> System:
    torch.manual_seed(seed)
    shape = (channels, state // 2)
    poles = torch.complex(-torch.rand(shape, dtype=torch.float64) - 0.1, 5 * torch.randn(shape, dtype=torch.float64))
    p, b = torch.randn(2, *shape, dtype=torch.complex128)
    return System(0.02 + 0.3 * torch.rand(channels, dtype=torch.float64), poles, p, b)


def draw(system: System) -> torch.Tensor:
    """C at random."""
    return torch.randn(len(system.dt), system.poles.shape[1], dtype=torch.complex128)


def truncated(system: System, c: torch.Tensor, length: int) -> torch.Tensor:
    """C~ of C."""
    numbers = s4.truncation(discretise(system), length) @ output_numbers(c)[..., None]
    return torch.view_as_complex(numbers.squeeze(-1).unflatten(-1, (-1, 2)) / 2).conj().resolve_conj()


def single(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.to(torch.complex64 if each.is_complex() else torch.float32) for each in tensors]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error of any channel (rows), in units of the channel's largest value."""
    return ((got.double() - want).abs().amax(1) / want.abs().amax(1)).max().item()


# -- golden values -----------------------------------------------------------------------------------------------------


def test_golden_discretisation():
    system, vectors = legs(4, 0.1)
    discrete = discretise(system)
    back = output_numbers(vectors)  # (N, N): from the state's numbers to the states of LegS itself
    abar = back @ s4.transition(discrete)[0].mT @ torch.linalg.inv(back)
    assert abar.diagonal().tolist() == pytest.approx([0.904761905, 0.818181818, 0.739130435, 0.666666667], abs=1e-9)
    assert abar.triu(1).abs().max() < 1e-12
    bbar = back @ discrete.input[0]
    assert bbar.tolist() == pytest.approx([0.095238095, 0.149961109, 0.159929575, 0.141923419], abs=1e-9)


KERNELS = {
    (4, 0.1): [
        *(0.547052198, 0.223439368, 0.063993929, -0.004599419),
        *(-0.025621550, -0.023929161, -0.013252275, -0.000736758),
    ],
    (64, 1e-3): [0.238281904, -0.025653580, -0.018988918, 0.023274270],
    (64, 1e-2): [0.461186109, -0.230314242, 0.288055299, -0.201670889],
    (64, 1e-1): [0.819074727, -0.414644001, 0.506281861, -0.365914405],
}


@pytest.mark.parametrize(("state", "dt"), KERNELS)
def test_golden_kernels(state, dt):
    system, vectors = legs(state, dt)
    c = vectors.sum(0, keepdim=True)  # ones in the basis of LegS
    want = KERNELS[state, dt]
    assert reference(system, c, len(want))[0].tolist() == pytest.approx(want, abs=1e-9)
    assert kernel(system, truncated(system, c, 50), 50)[0, : len(want)].tolist() == pytest.approx(want, abs=1e-9)


def test_golden_gain():
    """A constant input: the kernel sums to -C A^-1 B, which is 1 for C of ones."""
    system, vectors = legs(64, 0.1)
    total = kernel(system, truncated(system, vectors.sum(0, keepdim=True), 1000), 1000).sum()
    assert total.item() == pytest.approx(1, abs=1e-11)


def test_golden_diagonal_system():
    """S4D-Lin (Gu et al. 2022, arXiv 2206.11893) is the case P = 0."""
    poles = torch.tensor([[-0.5, -0.5 + 1j * math.pi]], dtype=torch.complex128)
    one = torch.ones_like(poles)
    system = System(torch.tensor([0.1], dtype=torch.float64), poles, torch.zeros_like(poles), one)
    want = [0.385766598, 0.349877232, 0.301444902, 0.245362496, 0.186828387, 0.130826824]
    assert kernel(system, truncated(system, one, 40), 40)[0, :6].tolist() == pytest.approx(want, abs=1e-9)


# -- the kernel --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 1000, 1001, 2000])  # even ones have a node at -1
def test_kernel_equals_powers(length):
    torch.manual_seed(0)
    system, _ = legs(64, *DT)
    c = draw(system)
    want, c_tilde = reference(system, c, length), truncated(system, c, length)
    assert relative(kernel(system, c_tilde, length), want) < 1e-12
    narrow, narrow_c = System(*single(*system)), single(c_tilde)[0]
    got = kernel(narrow, narrow_c, length)
    assert got.dtype == torch.float32
    assert relative(got, want) < 5e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel(narrow, narrow_c, length), got)


@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_kernel_of_any_system(length):
    system = random_system(5, 6)
    c = draw(system)
    assert_close(kernel(system, truncated(system, c, length), length), reference(system, c, length))


def test_a_shorter_kernel_is_the_start_of_a_longer_one():
    torch.manual_seed(0)
    system, _ = legs(64, *DT)
    c = draw(system)
    long, short = (kernel(system, truncated(system, c, length), length) for length in (2000, 1000))
    assert relative(long[:, :1000], short) < 1e-12


def test_gradients_of_the_kernel(monkeypatch):
    """By finite differences in several pieces, and against autograd through powers of the matrix."""
    system = random_system(2, 6)
    c_tilde, weight = draw(system), torch.randn(2, 12, dtype=torch.float64)
    whole = kernel(system, c_tilde, 12)
    monkeypatch.setattr(s4, "CAUCHY_ELEMENTS", 2 * 3 * 2)  # two frequencies at a time
    assert_close(kernel(system, c_tilde, 12), whole)
    leaves = [each.requires_grad_() for each in (*system, c_tilde)]
    assert torch.autograd.gradcheck(lambda *parts: kernel(System(*parts[:4]), parts[4], 12), leaves)

    got = torch.autograd.grad((kernel(system, c_tilde, 12) * weight).sum(), leaves)
    numbers = torch.linalg.solve(s4.truncation(discretise(system), 12), output_numbers(c_tilde)[..., None])
    c = torch.view_as_complex(numbers.squeeze(-1).unflatten(-1, (-1, 2)) / 2).conj()
    assert_close(got, torch.autograd.grad((reference(system, c, 12) * weight).sum(), leaves))


@pytest.mark.parametrize("time", [1, 2, 7, 8, 9])
def test_convolution(time):
    torch.manual_seed(0)
    u, k = torch.randn(2, time, 3, dtype=torch.float64), torch.randn(3, 9, dtype=torch.float64)
    want = torch.stack([sum(k[:, lag] * u[:, t - lag] for lag in range(t + 1)) for t in range(time)], 1)
    assert_close(convolve(u, k), want, rtol=0, atol=1e-12)


# -- the recurrence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_states_do_not_grow(seed):
    """P P^* only takes away: with poles in the left half plane nothing is unstable, whatever else is learned."""
    system = random_system(20, 8, seed)
    system = system._replace(dt=10 * system.dt, p=3 * system.p)
    matrix = s4.transition(discretise(system))
    assert torch.linalg.eigvals(matrix).abs().max() < 1
    assert torch.linalg.matrix_norm(matrix, 2).max() < 1 + 1e-12


def made(channels: int = 3, state: int = 6, length: int = 40) -> tuple[Recurrence, System, torch.Tensor]:
    system = random_system(channels, state)
    c = draw(system)
    return Recurrence(system, truncated(system, c, length), length), system, c


def by_steps(recurrence, u, state, reset=None):
    outputs = []
    for t in range(u.shape[1]):
        y, state = recurrence.step(u[:, t], state, None if reset is None else reset[:, t])
        outputs.append(y)
    return torch.stack(outputs, 1), state


def test_steps_equal_the_convolution():
    torch.manual_seed(0)
    recurrence, system, c = made()
    u = torch.randn(2, 100, 3, dtype=torch.float64)  # longer than the length that C~ is for
    y, _ = by_steps(recurrence, u, torch.zeros(2, 3, 6, dtype=torch.float64))
    assert_close(y, convolve(u, reference(system, c, 100)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 130, 193])
def test_chunks_equal_steps(time):
    torch.manual_seed(0)
    recurrence, _, _ = made()
    u, state = torch.randn(2, time, 3, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    assert_close(recurrence.run(u, state), by_steps(recurrence, u, state), rtol=0, atol=1e-10)


@pytest.mark.parametrize("time", [1, 15, 16, 17, 33, 50])
def test_chunks_with_resets_equal_steps(time):
    torch.manual_seed(0)
    recurrence, _, _ = made()
    u, state = torch.randn(4, time, 3, dtype=torch.float64), torch.randn(4, 3, 6, dtype=torch.float64)
    reset = torch.rand(4, time) < torch.tensor([0.0, 0.05, 0.3, 1.0])[:, None]
    assert_close(recurrence.run(u, state, reset), by_steps(recurrence, u, state, reset), rtol=0, atol=1e-10)


def test_a_reset_takes_everything_away():
    """Two episodes in one row are two rows, even where the first one blew up."""
    torch.manual_seed(0)
    recurrence, _, _ = made()
    u, zeros = torch.randn(1, 40, 3, dtype=torch.float64), torch.zeros(1, 3, 6, dtype=torch.float64)
    reset = torch.zeros(1, 40, dtype=torch.bool)
    reset[0, 23] = True
    broken = torch.full_like(zeros, math.inf)
    y, state = recurrence.run(u, broken, reset)
    want, want_state = recurrence.run(u[:, 23:], zeros)
    assert_close(y[:, 23:], want, rtol=0, atol=1e-10)
    assert_close(state, want_state, rtol=0, atol=1e-10)
    assert not y[:, :23].isfinite().any()
    y, state = recurrence.step(u[:, 23], broken, reset[:, 23])
    assert_close(y, want[:, 0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("first", [1, 30, 100])
def test_hand_over_of_the_state(first):
    """A convolution, then its continuation from the state, is one convolution."""
    torch.manual_seed(0)
    system, _ = legs(16, *DT)
    c = draw(system)
    recurrence = Recurrence(system, truncated(system, c, 150), 150)
    u = torch.randn(2, 150, 3, dtype=torch.float64)
    want = convolve(u, reference(system, c, 150))
    head, state = recurrence.run(u[:, :first], torch.zeros(2, 3, 16, dtype=torch.float64))
    tail, _ = recurrence.run(u[:, first:], state)
    assert_close(torch.cat((head, tail), 1), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("count", "block", "queries"), [(1, 5, 3), (4, 5, 3), (4, 1, 1), (3, 3, 5), (3, 5, 0)])
def test_fork_commits_only_the_block(count, block, queries):
    torch.manual_seed(0)
    recurrence, _, _ = made()
    u, state = torch.randn(2, count, block + queries, 3, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    got, got_state = recurrence.fork(u, block, state)
    for j in range(count):
        want, _ = by_steps(recurrence, u[:, j], state)
        assert_close(got[:, j], want, rtol=0, atol=1e-10)
        _, state = by_steps(recurrence, u[:, j, :block], state)
    assert_close(got_state, state, rtol=0, atol=1e-10)


def test_gradients_of_the_recurrence():
    system = random_system(2, 4)
    c_tilde, u = draw(system), torch.randn(2, 19, 2, dtype=torch.float64)
    state, reset = torch.randn(2, 2, 4, dtype=torch.float64), torch.zeros(2, 19, dtype=torch.bool)
    reset[1, [3, 17]] = True

    def run(u, state, c_tilde, *system):
        recurrence = Recurrence(System(*system), c_tilde, 20)
        y, state = recurrence.run(u, state, reset)
        z, state = recurrence.step(u[:, 0], state)
        v, state = recurrence.run(u[:, :5], state)
        w, state = recurrence.fork(u[:, :6].unflatten(1, (2, 3)), 2, state)
        return torch.cat([part.flatten() for part in (y, z, v, w, state)])

    leaves = [each.requires_grad_() for each in (u, state, c_tilde, *system)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("learned", [False, True])
def test_float32_is_accurate(learned):
    """Steps and chunks in float32 against the convolution in float64, as initialised and after some learning."""
    torch.manual_seed(0)
    system, _ = legs(64, 1e-3, 4e-3, 1e-2, 4e-2, 1e-1)
    if learned:
        noise = [1 + 0.1 * torch.randn_like(part.real) for part in system]
        poles = torch.complex(system.poles.real * noise[1].abs(), system.poles.imag * noise[1].flip(1))
        system = System(system.dt * noise[0], poles, system.p * noise[2], system.b * noise[3])
    c = draw(system)
    u = torch.randn(3, 257, 5, dtype=torch.float64)
    want = convolve(u, reference(system, c, 257))
    c_tilde = truncated(system, c, 257)
    recurrence = Recurrence(System(*single(*system)), *single(c_tilde), 257)
    zeros = torch.zeros(3, 5, 64)
    for y, state in (by_steps(recurrence, u.float(), zeros), recurrence.run(u.float(), zeros)):
        assert y.dtype == state.dtype == torch.float32
        assert (y - want).abs().max() < 2e-5 * want.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        again = Recurrence(System(*single(*system)), *single(c_tilde), 257)
        y, state = again.run(u.float(), zeros)
        assert (y - want).abs().max() < 2e-5 * want.abs().max()
        assert again.step(u[:, 0].bfloat16(), state)[1].dtype == torch.float32


def test_advance_is_the_transition():
    recurrence, _, _ = made()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    want = torch.einsum("bhn,hnm->bhm", x, s4.transition(recurrence.discrete))
    assert_close(advance(recurrence.discrete, x), want)


def test_only_a_few_lengths_of_chunks_are_kept():
    recurrence, _, _ = made()
    state = torch.zeros(1, 3, 6, dtype=torch.float64)
    for time in range(1, 12):
        recurrence.run(torch.ones(1, time, 3, dtype=torch.float64), state)
    assert list(recurrence.chunks) == [8, 9, 10, 11]
