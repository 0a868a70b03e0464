"""S4's kernel and recurrence against powers of the discretized matrix, golden values of HiPPO-LegS systems, and the
Triton forms against the definitions.

Axes: B batch, T time, H channels, N numbers of a channel's state, M = N / 2 pairs, J blocks, C elements of a block.
"""

from __future__ import annotations

import math

import pytest
import torch
from gpus import DEVICE
from torch.testing import assert_close

from wmcli.backbones.s4 import hippo_legs
from wmcli.kernels import s4
from wmcli.kernels.dispatch import using
from wmcli.kernels.s4 import Resets, System, Systems, convolve, discretize, kernel, output_numbers, reference

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
    numbers = s4.truncation(discretize(system), length) @ output_numbers(c)[..., None]
    return torch.view_as_complex(numbers.squeeze(-1).unflatten(-1, (-1, 2)) / 2).conj().resolve_conj()


def single(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.to(torch.complex64 if each.is_complex() else torch.float32) for each in tensors]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error of any channel (rows), in units of the channel's largest value."""
    return ((got.double() - want).abs().amax(1) / want.abs().amax(1)).max().item()


# -- golden values -----------------------------------------------------------------------------------------------------


def test_golden_discretization():
    system, vectors = legs(4, 0.1)
    discrete = discretize(system)
    back = output_numbers(vectors)  # (N, N): from the state's numbers to the states of LegS itself
    abar = back @ s4.transition(discrete)[0].mT @ torch.linalg.inv(back)
    assert abar.diagonal().tolist() == pytest.approx([0.904761905, 0.818181818, 0.739130435, 0.666666667], abs=1e-9)
    assert abar.triu(1).abs().max() < 1e-12
    bbar = back @ torch.view_as_real(discrete.input[0]).flatten()
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
    system = random_system(3, 6)
    c_tilde, weight = draw(system), torch.randn(3, 12, dtype=torch.float64)
    whole = kernel(system, c_tilde, 12)
    monkeypatch.setattr(s4, "CACHED_ELEMENTS", 2 * 3 * 7)  # two channels at a time
    assert_close(kernel(system, c_tilde, 12), whole)
    leaves = [each.requires_grad_() for each in (*system, c_tilde)]
    assert torch.autograd.gradcheck(lambda *parts: kernel(System(*parts[:4]), parts[4], 12), leaves)

    got = torch.autograd.grad((kernel(system, c_tilde, 12) * weight).sum(), leaves)
    numbers = torch.linalg.solve(s4.truncation(discretize(system), 12), output_numbers(c_tilde)[..., None])
    c = torch.view_as_complex(numbers.squeeze(-1).unflatten(-1, (-1, 2)) / 2).conj()
    assert_close(got, torch.autograd.grad((reference(system, c, 12) * weight).sum(), leaves))


def sums(channels: int, pairs: int, length: int) -> list[torch.Tensor]:
    """Operands of Cauchy sums as `kernel` makes them: weights, Re w, |w|^2, cosines and sines."""
    torch.manual_seed(0)
    w = torch.complex(-0.1 * torch.rand(channels, pairs).double() - 0.01, torch.randn(channels, pairs).double())
    half = torch.arange(length // 2 + 1, dtype=torch.float64) * (math.pi / length)
    weights = torch.randn(channels, 8, pairs, dtype=torch.float64)
    return [each.to(DEVICE) for each in (weights, w.real, w.abs().square(), half.cos(), half.sin())]


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize(("channels", "pairs", "length"), [(2, 3, 8), (1, 17, 301), (3, 1, 1)])
def test_cauchy_sums(implementation, channels, pairs, length):
    """And their gradients, against autograd of the definition. Even lengths have a node where the cosine is 0."""
    operands = sums(channels, pairs, length)
    single_ = [each.float() for each in operands]
    # What float32 makes of the operands is given to both.
    wide = [each.double().requires_grad_() for each in single_[:3]] + [each.double() for each in single_[3:]]
    want = s4.cauchy_reference(*wide)
    weight = torch.randn(want.shape, dtype=want.dtype, device=DEVICE)
    want_gradients = torch.autograd.grad((want * weight.conj()).real.sum(), wide[:3])
    leaves = [each.requires_grad_() for each in single_[:3]]
    with using(implementation):
        got = s4.cauchy(*leaves, *single_[3:])
        gradients = torch.autograd.grad((got * weight.conj()).real.sum().float(), leaves)
    for got_, want_ in zip((got, *gradients), (want, *want_gradients), strict=True):
        assert got_.dtype in (torch.float32, torch.complex64)
        assert (got_ - want_).abs().max() <= 5e-5 * want_.abs().max()


def test_the_kernel_in_triton():
    """Values and gradients of a whole kernel, with leading axes."""
    torch.manual_seed(0)
    system, _ = legs(8, *DT)
    c_tilde = draw(system)
    results = []
    for wide in (True, False):
        parts = [each if wide else single(each)[0] for each in (*system, c_tilde)]
        leaves = [each.detach().to(DEVICE).requires_grad_() for each in parts]
        stacked = [torch.stack((each, 0.9 * each)) for each in leaves]
        with using("triton"):  # which leaves float64 to torch
            made = kernel(System(*stacked[:4]), stacked[4], 41)
        results.append((made, *torch.autograd.grad(made.square().sum(), leaves)))
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() < 2e-5 * want.abs().max()


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
    matrix = s4.transition(discretize(system))
    assert torch.linalg.eigvals(matrix).abs().max() < 1
    assert torch.linalg.matrix_norm(matrix, 2).max() < 1 + 1e-12


class Recurrence:
    """The systems of a single layer as a recurrence."""

    def __init__(self, system: System, c_tilde: torch.Tensor, length: int) -> None:
        parameters = [[each] for each in (*system, c_tilde)]
        self.systems = Systems(lambda *parts: (System(*parts[:4]), parts[4]), parameters, length)

    def step(self, u, state, reset=None):
        return self.systems.step(0, u, state, reset)

    def run(self, u, state, reset=None):
        return self.systems.run(0, u, state, None if reset is None else Resets(reset))

    def fork(self, u, block, state):
        return self.systems.fork(0, u, block, state)


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


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 100])
def test_c_of_c_tilde(length):
    system = random_system(5, 6)
    c = draw(system)
    assert_close(s4.output(discretize(system), truncated(system, c, length), length), c, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("size", "reach", "rest"), [(1, 1, 0), (5, 5, 3), (5, 9, 0), (64, 64, 63)])
def test_chunks_equal_powers(size, reach, rest):
    """A chunk's matrices, whose power, input and output go through the powers of the transition."""
    system = random_system(3, 6)
    discrete, c = discretize(system), draw(system)
    matrix, into = s4.transition(discrete), torch.view_as_real(discrete.input).flatten(-2)
    power = [torch.linalg.matrix_power(matrix, count) for count in range(reach + 1)]
    chunk = s4.chunk_operators(discrete, c, torch.float64, size, reach, rest)
    assert_close(chunk.power, power[size], rtol=0, atol=1e-12)
    inputs = torch.stack([(into[:, None] @ power[size - 1 - n])[:, 0] for n in range(size)], 1)
    assert_close(chunk.inputs, inputs, rtol=0, atol=1e-12)
    outputs = torch.stack([(power[n + 1] @ output_numbers(c)[..., None])[..., 0] for n in range(reach)], 2)
    assert_close(chunk.outputs, outputs, rtol=0, atol=1e-12)
    want = reference(system, c, reach)
    assert_close(chunk.kernel, want, rtol=0, atol=1e-12)
    for n in range(reach):
        assert_close(chunk.inside[:, n, n:], want[:, : reach - n], rtol=0, atol=1e-12)
        assert not chunk.inside[:, n, :n].any()
    if rest:
        assert_close(chunk.rest, power[rest], rtol=0, atol=1e-12)


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
    """Steps and chunks in float32 against the convolution in float64, as initialized and after some learning."""
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
    recurrence, system, _ = made()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    want = torch.einsum("bhn,hnm->bhm", x, s4.transition(discretize(system)))
    assert_close(s4.advance(recurrence.systems.step_operators(0), x), want)


def test_only_a_few_lengths_of_chunks_are_kept():
    recurrence, _, _ = made()
    state = torch.zeros(1, 3, 6, dtype=torch.float64)
    recurrence.step(torch.ones(1, 3, dtype=torch.float64), state)
    for time in range(1, 12):
        recurrence.run(torch.ones(1, time, 3, dtype=torch.float64), state)
    assert list(recurrence.systems._cache) == ["step", *((time, time, 0) for time in (8, 9, 10, 11))]


def test_what_a_recorded_graph_reads_is_kept(monkeypatch):
    recurrence, _, _ = made()
    state = torch.zeros(1, 3, 6, dtype=torch.float64)
    for recording, times in ((False, [5]), (True, [3, 5]), (False, range(6, 12))):
        monkeypatch.setattr(s4, "_recording", lambda recording=recording: recording)
        for time in times:
            recurrence.run(torch.ones(1, time, 3, dtype=torch.float64), state)
    assert list(recurrence.systems._cache) == [(time, time, 0) for time in (5, 3, 8, 9, 10, 11)]


# -- several layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 2, 3], ids=lambda count: f"{count} together")
def test_layers_are_each_for_themselves(monkeypatch, together):
    """Prepared together or not, what each layer does is what it does alone, and so are the gradients."""
    monkeypatch.setattr(s4, "PREPARED_ELEMENTS", together * 2 * 4 * 4)
    systems = [random_system(2, 4, seed) for seed in range(3)]
    leaves = [[each.requires_grad_() for each in (*system, draw(system))] for system in systems]

    def build(*parts):
        return System(*parts[:4]), parts[4]

    def everything(systems: Systems, layer: int) -> torch.Tensor:
        torch.manual_seed(layer)
        u, state = torch.randn(2, 5, 2, dtype=torch.float64), torch.randn(2, 2, 4, dtype=torch.float64)
        y = systems.convolve(layer, u)
        z, state = systems.step(layer, u[:, 0], state)
        v, state = systems.run(layer, u[:, :3], state)
        w, state = systems.fork(layer, u[:, None], 3, state)
        return torch.cat([part.flatten() for part in (y, z, v, w, state)])

    whole = Systems(build, list(zip(*leaves, strict=True)), 9)
    together_ = [everything(whole, layer) for layer in range(3)]
    got = torch.autograd.grad(
        sum(each.square().sum() for each in together_), [each for group in leaves for each in group]
    )
    for layer, group in enumerate(leaves):
        alone = everything(Systems(build, [[each] * (layer + 1) for each in group], 9), layer)
        assert_close(together_[layer], alone)
        want = torch.autograd.grad(alone.square().sum(), group)
        assert_close(list(got[5 * layer : 5 * layer + 5]), list(want))


# -- segments ----------------------------------------------------------------------------------------------------------


def resets(rows: int, time: int) -> torch.Tensor:
    torch.manual_seed(time)
    chance = torch.tensor([0.0, 0.03, 0.3, 1.0]).repeat(rows)[:rows]
    return torch.rand(rows, time) < chance[:, None]


@pytest.mark.parametrize("time", [1, 2, 15, 16, 17, 31, 100, 128, 129, 300])
def test_a_convolution_stays_in_its_segment(time):
    u, reset, k = (
        torch.randn(2, 4, time, dtype=torch.float64),
        resets(4, time),
        torch.randn(2, 310, dtype=torch.float64),
    )
    segments = Resets(reset).segments(0, time, time, torch.float64)
    number = reset.long().cumsum(1)
    same = (number[:, :, None] == number[:, None, :]).double()  # (R, T, T)
    lag = torch.arange(time)[:, None] - torch.arange(time)
    matrix = torch.where(lag >= 0, k[:, lag.clamp(min=0)], 0.0)  # (H, T, T)
    want = torch.einsum("hts,rts,hrs->hrt", matrix, same, u)
    assert_close(s4.convolve_segments(u, k, segments), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("time", [1, 7, 20, 40])
def test_gradients_of_a_convolution_in_segments(monkeypatch, time):
    monkeypatch.setattr(s4, "NEAR", 4)
    monkeypatch.setattr(s4, "PARTS", 3)  # so that there are several levels
    segments = Resets(resets(3, time)).segments(0, time, time, torch.float64)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, time), (2, time + 3))]
    run = torch.autograd.gradcheck(lambda u, k: s4.convolve_segments(u, k, segments), leaves, fast_mode=True)
    assert run


# -- the step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [1, 2 * 3 * 8, 1000])
def test_a_step_without_gradients_equals_one_with_them(monkeypatch, numbers):
    monkeypatch.setattr(s4, "STEP_NUMBERS", numbers)  # of several parts, the last one smaller, or of one
    torch.manual_seed(0)
    operators = s4.Step(torch.randn(3, 4, dtype=torch.complex128), *torch.randn(4, 3, 8, dtype=torch.float64))
    u = torch.randn(3, 5, dtype=torch.float64).mT  # not contiguous
    state = torch.randn(3, 5, 8, dtype=torch.float64).transpose(0, 1)
    for reset in (None, torch.tensor([False, True, False, False, True])):
        want, before = s4.run_step(operators, u.clone().requires_grad_(), state, reset), state.clone()
        got = s4.run_step(operators, u, state, reset)
        assert_close(got, tuple(each.detach() for each in want), rtol=0, atol=1e-12)
        assert torch.equal(state, before)


# -- the step in Triton ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "channels", "state"), [(1, 3, 2), (5, 19, 6), (3, 16, 8)])
@pytest.mark.parametrize("reset", [True, False])
def test_the_step_in_triton(monkeypatch, batch, channels, state, reset):
    monkeypatch.setattr(s4, "STEP_PROGRAMS", 3)  # so that a program takes several rows
    torch.manual_seed(0)
    shape = channels, state
    diagonal = torch.randn(channels, state // 2, dtype=torch.complex64)
    operators = s4.Step(*(each.to(DEVICE) for each in (diagonal, *(torch.randn(shape) for _ in range(4)))))
    u = torch.randn(channels, batch, device=DEVICE).mT  # not contiguous
    before = torch.randn(channels, batch, state, device=DEVICE).transpose(0, 1)
    clear = None
    if reset:
        clear = torch.arange(batch, device=DEVICE) % 2 == 0
        before[clear] = torch.inf  # nothing of it may be left
    wide = s4.Step(*(each.to(torch.complex128 if each.is_complex() else torch.float64) for each in operators))
    want = s4.run_step(wide, u.double(), before.double(), clear)
    with using("triton"):
        got = s4.run_step(operators, u, before, clear)
        low = s4.run_step(operators, u.bfloat16(), before, clear)
    for got_, want_ in zip(got, want, strict=True):
        assert got_.dtype == torch.float32
        assert_close(got_.double(), want_, rtol=1e-5, atol=1e-5)
    want = s4.run_step(wide, u.bfloat16().double(), before.double(), clear)
    for got_, want_ in zip(low, want, strict=True):
        assert_close(got_.double(), want_, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_the_step_can_be_differentiated(implementation):
    system = System(*(each.to(DEVICE) for each in single(*random_system(3, 6))))
    c_tilde = torch.randn(3, 3, dtype=torch.complex64, device=DEVICE)
    leaves = [torch.randn(shape, device=DEVICE) for shape in ((2, 3), (2, 3, 6))]
    leaves = [each.requires_grad_() for each in (*leaves, *system, c_tilde)]
    with using(implementation):
        y, after = Recurrence(System(*leaves[2:6]), leaves[6], 20).step(*leaves[:2])
        gradients = torch.autograd.grad(y.sum() + after.square().sum(), leaves)
    assert all(gradient.abs().max() > 0 for gradient in gradients)
