"""The scan in chunks, by steps and in Triton against the definition; Vandermonde kernels against powers.

Axes: B batch, T time, P numbers of the state, H channels, M numbers of a channel's state; complex ones as pairs.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from gpus import DEVICE
from torch.testing import assert_close

from wmcli.kernels import diagonal_scan as module
from wmcli.kernels.diagonal_scan import diagonal_scan, diagonal_scan_step, reference, vandermonde
from wmcli.kernels.dispatch import using

B, P = 3, 5


def operands(length: int, width: int = P, batch: int = B) -> list[torch.Tensor]:
    """a, b and the state; a decays slowly, so that all elements count."""
    torch.manual_seed(0)
    a = torch.polar(1 - 0.1 * torch.rand(width, dtype=torch.float64), 3 * torch.randn(width, dtype=torch.float64))
    b, state = (torch.randn(*shape, width, 2, dtype=torch.float64) for shape in ((batch, length), (batch,)))
    return [torch.view_as_real(a), b, state]


def resets(length: int) -> torch.Tensor:
    """Row 0 is never reset, row 1 now and then, row 2 often and at once."""
    torch.manual_seed(length)
    reset = torch.rand(B, length) < torch.tensor([0.0, 0.05, 0.4])[:, None]
    reset[2, 0] = True
    return reset


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 300])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("with_reset", [False, True])
def test_chunks_equal_the_definition(length, with_state, with_reset):
    a, b, state = operands(length)
    rest = state if with_state else None, resets(length) if with_reset else None
    assert_close(diagonal_scan(a, b, *rest), reference(a, b, *rest), rtol=0, atol=1e-12)


def test_chunks_of_chunks_equal_the_definition(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    for length in (26, 27, 28, 100):
        arguments = *operands(length), resets(length)
        assert_close(diagonal_scan(*arguments), reference(*arguments), rtol=0, atol=1e-12)


def test_steps_equal_the_definition():
    a, b, state = operands(20)
    want, _ = reference(a, b, state, resets(20))
    for t in range(20):
        state = diagonal_scan_step(a, b[:, t], state, resets(20)[:, t])
        assert_close(state, want[:, t], rtol=0, atol=1e-12)
    assert_close(diagonal_scan_step(a, b[:, 0], state), reference(a, b[:, :1], state)[1], rtol=0, atol=1e-12)


def test_any_bracketing_of_the_associative_operator_gives_the_last_state():
    """An element is (a, b), with a = 0 where it is reset; (a, b) then (c, d) is (a c, c b + d)."""
    a, b, state = (torch.view_as_complex(each) for each in operands(40))
    reset = resets(40)
    numbers = random.Random(0)
    for row in range(B):
        elements = [(a * ~reset[row, t], b[row, t]) for t in range(40)]
        elements[0] = elements[0][0], elements[0][1] + elements[0][0] * state[row]
        while len(elements) > 1:
            n = numbers.randrange(len(elements) - 1)
            (first, before), (second, after) = elements[n : n + 2]
            elements[n : n + 2] = [(first * second, second * before + after)]
        _, last = diagonal_scan(*operands(40), reset)
        assert_close(last[row], torch.view_as_real(elements[0][1]), rtol=0, atol=1e-12)


def test_a_reset_takes_everything_away(monkeypatch):
    """Even where numbers blew up before it, within a chunk and between chunks."""
    monkeypatch.setattr(module, "CHUNK", 4)
    a, b, state = operands(30)
    for at in (0, 3, 13, 16):
        reset = torch.zeros(B, 30, dtype=torch.bool)
        reset[:, at] = True
        broken = torch.full_like(state, math.inf).requires_grad_()
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_(), broken]
        states, last = diagonal_scan(*leaves, reset)
        want, _ = reference(a, b[:, at:])
        assert_close(states[:, at:], want, rtol=0, atol=1e-12)
        assert_close(last, want[:, -1], rtol=0, atol=1e-12)
        grad_b, grad_state = torch.autograd.grad(states[:, at:].square().sum(), leaves[1:])
        assert grad_b.isfinite().all() and not grad_b[:, :at].any() and not grad_state.any()


@pytest.mark.parametrize("with_reset", [False, True])
def test_gradients(with_reset, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    arguments = [each.requires_grad_() for each in operands(14, 2)]
    reset = resets(14) if with_reset else None
    assert torch.autograd.gradcheck(lambda *parts: diagonal_scan(*parts, reset), arguments)
    a, b, state = arguments
    assert torch.autograd.gradcheck(lambda a, b: diagonal_scan(a, b)[1], (a, b))
    flags = None if reset is None else reset[:, 0]
    assert torch.autograd.gradcheck(lambda *parts: diagonal_scan_step(*parts, flags), (a, b[:, 0], state))


@pytest.mark.parametrize("size", [0.9, 0.9995, 1.0])
def test_float32_is_accurate(size):
    """Over 4000 elements, against the definition in float64 of what float32 makes of the operands."""
    a, b, state = (each.float() for each in operands(4000))
    a = size * a / a.norm(dim=1, keepdim=True)
    want, _ = reference(a.double(), b.double(), state.double(), resets(4000))
    got, last = diagonal_scan(a, b, state, resets(4000))
    assert got.dtype == last.dtype == torch.float32
    assert (got - want).abs().max() < 1e-6 * want.abs().max()


def test_states_are_float32_under_autocast():
    a, b, state = (each.float().requires_grad_() for each in operands(40))
    want = diagonal_scan(a, b, state)
    gradients = torch.autograd.grad(want[0].square().sum() + want[1].sum(), (a, b, state))
    with torch.autocast("cpu", torch.bfloat16):
        got = diagonal_scan(a, b, state)
        again = torch.autograd.grad(got[0].square().sum() + got[1].sum(), (a, b, state))
    assert_close((*got, *again), (*want, *gradients), rtol=0, atol=0)
    states, last = diagonal_scan(a, b.bfloat16(), state)
    assert states.dtype == last.dtype == diagonal_scan_step(a, b[:, 0].bfloat16(), state).dtype == torch.float32
    assert_close(states, reference(a, b.bfloat16().float(), state)[0], rtol=0, atol=1e-5)


# -- Vandermonde kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 1000, 1001])
def test_vandermonde_kernels_equal_powers(length):
    torch.manual_seed(0)
    a = torch.polar(1 - 0.01 * torch.rand(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64))
    weights = torch.randn(2, 3, 4, dtype=torch.complex128)
    want, power = [], weights
    for _ in range(length):
        want.append(2 * power.real.sum(-1))
        power = power * a
    want = torch.stack(want, -1)
    operands = torch.view_as_real(a), torch.view_as_real(weights)
    assert_close(vandermonde(*operands, length), want, rtol=0, atol=1e-11)
    with torch.autocast("cpu", torch.bfloat16):
        single = vandermonde(operands[0], operands[1].float(), length)
    assert single.dtype == torch.float32
    assert (single - want).abs().max() < 5e-6 * want.abs().max()


def test_gradients_of_vandermonde_kernels():
    a, b, _ = operands(2)
    leaves = [torch.stack((a, a.flip(0))).requires_grad_(), b[0].requires_grad_()]
    assert torch.autograd.gradcheck(lambda a, weights: vandermonde(a, weights, 11), leaves)


# -- Triton ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Short chunks and few numbers to a program: few elements, and a quick test, see the borders of both."""
    monkeypatch.setattr(module, "TRITON_CHUNK", 3)
    monkeypatch.setattr(module, "LANES", 4)


def agree(form, meaning, exact: list[torch.Tensor]) -> None:
    """The results of the Triton form in float32 and all gradients, those of the definition in float64."""
    exact = [each.to(DEVICE).requires_grad_() for each in exact]
    single = [each.detach().float().requires_grad_() for each in exact]
    want = meaning(*exact)
    torch.manual_seed(1)
    weights = [torch.randn_like(each) for each in want]
    want_gradients = torch.autograd.grad(want, exact, weights)
    with using("triton"):
        got = form(*single)
        gradients = torch.autograd.grad(got, single, [each.float() for each in weights])
    for got_, want_ in zip((*got, *gradients), (*want, *want_gradients), strict=True):
        assert got_.dtype == torch.float32
        assert (got_ - want_).abs().max() <= 1e-5 * want_.abs().max().clamp(min=1)


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("with_reset", [False, True])
def test_triton_equals_the_definition(length, with_reset, small):
    reset = resets(length).to(DEVICE) if with_reset else None
    agree(lambda *parts: diagonal_scan(*parts, reset), lambda *parts: reference(*parts, reset), operands(length))


def test_triton_equals_the_definition_in_programs_of_their_true_size():
    exact = operands(module.TRITON_CHUNK + 2, module.LANES + 1, 2)
    agree(diagonal_scan, reference, exact)
    agree(lambda a, b: diagonal_scan(a, b), lambda a, b: reference(a, b), exact[:2])


def test_triton_steps_equal_the_definition(small):
    reset = resets(7).to(DEVICE)[:, 3]

    def step(a, b, state):
        return (diagonal_scan_step(a, b, state, reset),)

    a, b, state = operands(1)
    agree(step, lambda a, b, state: reference(a, b[:, None], state, reset[:, None])[1:], [a, b[:, 0], state])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_reset_takes_everything_away_in_triton(small):
    a, b, state = (each.float().to(DEVICE) for each in operands(8))
    reset = torch.zeros(B, 8, dtype=torch.bool, device=DEVICE)
    reset[:, 4] = True
    leaves = [a.requires_grad_(), b.requires_grad_(), torch.full_like(state, math.inf).requires_grad_()]
    with using("triton"):
        states, _ = diagonal_scan(*leaves, reset)
        grad_b, grad_state = torch.autograd.grad(states[:, 4:].square().sum(), leaves[1:])
    assert_close(states[:, 4:], reference(a, b[:, 4:])[0], rtol=1e-5, atol=1e-5)
    assert grad_b.isfinite().all() and not grad_b[:, :4].any() and not grad_state.any()
