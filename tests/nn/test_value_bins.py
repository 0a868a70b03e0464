"""Categorical values over squashed bins: values of the sources, the way there and back, and where gradients go."""

from __future__ import annotations

import math

import pytest
import torch

from wmcli.nn import value_bins
from wmcli.nn.value_bins import bins, decode, encode, loss, squash, stretch

BOUNDS = [50, 300]


def as_logits(x: torch.Tensor, bound: int) -> torch.Tensor:
    """Logits whose softmax is the code of x."""
    return encode(x, bound).log()


@pytest.mark.parametrize(
    ("x", "h"), [(1.0, 0.415214), (0.5, 0.225245), (21.0, 3.711416), (100.0, 9.149876), (-2.3, -0.818890)]
)
def test_golden_squash(x, h):
    got = squash(torch.tensor(x, dtype=torch.float64))
    assert float(got) == pytest.approx(h, abs=1e-6)
    assert float(got) == pytest.approx(math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x, abs=1e-12)


def test_golden_reach():
    assert float(squash(torch.tensor(2500.0))) == pytest.approx(51.51, abs=5e-3)
    far = torch.tensor([2500.0, -2500.0], dtype=torch.float64)
    torch.testing.assert_close(decode(as_logits(far, 50)), far.sign() * 2364.42, rtol=0, atol=5e-3)
    assert float(stretch(torch.tensor(300.0, dtype=torch.float64))) == pytest.approx(58705.6, abs=0.05)


@pytest.mark.parametrize(
    ("x", "weights"),
    [
        (1.0, {50: 0.584786, 51: 0.415214}),
        (-2.3, {49: 0.818890, 50: 0.181110}),
        (0.0, {50: 1.0}),
        (2500.0, {100: 1.0}),
        (-1e9, {0: 1.0}),
    ],
)
def test_golden_codes(x, weights):
    want = torch.zeros(101, dtype=torch.float64)
    for place, weight in weights.items():
        want[place] = weight
    torch.testing.assert_close(encode(torch.tensor(x, dtype=torch.float64), 50), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_whole_number_is_one_bin(bound):
    places = torch.arange(-bound, bound + 1, dtype=torch.float64)
    code = encode(stretch(places), bound)
    torch.testing.assert_close(code, torch.eye(bins(bound), dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squash_and_stretch_are_inverse_even_of_the_smallest(dtype):
    size = torch.logspace(-12, 6, 300, dtype=dtype)
    numbers = torch.cat((-size, torch.zeros(1, dtype=dtype), size))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(stretch(squash(numbers)), numbers, rtol=tolerance, atol=0)


@pytest.mark.parametrize("bound", BOUNDS)
def test_there_and_back(bound):
    size = torch.logspace(-6, 3, 200)
    numbers = torch.cat((-size, torch.zeros(1), size))
    weights = encode(numbers, bound)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(numbers))
    assert int((weights > 0).sum(-1).max()) == 2
    torch.testing.assert_close(decode(as_logits(numbers, bound)), numbers, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_opinion_is_zero_and_costs_the_logarithm_of_the_bins(bound):
    logits = torch.zeros(3, bins(bound))
    assert float(decode(logits).abs().max()) < 1e-4
    want = torch.full((3,), math.log(2 * bound + 1))
    torch.testing.assert_close(loss(logits, torch.tensor([0.3, -7.0, 1e5])), want)


def test_the_loss_is_a_cross_entropy_and_gradients_reach_the_logits_only():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 601, dtype=torch.float64, generator=generator).requires_grad_()
    target = (50 * torch.randn(4, dtype=torch.float64, generator=generator)).requires_grad_()
    code = encode(target.detach(), 300)
    losses = loss(logits, target)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, code, reduction="none"))
    losses.sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - code)
    assert target.grad is None


def test_precise_under_autocast():
    numbers = torch.tensor([100.0, -3.7, 0.01])
    logits = as_logits(numbers, 50).clamp(min=-50)
    want = value_bins.loss(logits, numbers)
    with torch.autocast("cpu", torch.bfloat16):
        back, losses = decode(logits), value_bins.loss(logits, numbers)
    assert back.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(back, numbers, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, want)
    assert decode(logits.bfloat16()).dtype == torch.float32
