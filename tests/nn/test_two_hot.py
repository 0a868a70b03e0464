"""Two-hot codes of scalars: values worked out by hand, the way there and back, and where gradients go."""

from __future__ import annotations

import math

import pytest
import torch

from wmcli.nn import two_hot


def as_logits(x: torch.Tensor) -> torch.Tensor:
    """Logits whose softmax is the code of x."""
    return two_hot.encode(x).log()


@pytest.mark.parametrize(
    ("number", "below", "weights"),
    [
        (1.0, 131, (0.598515, 0.401485)),
        (-1.0, 122, (0.401485, 0.598515)),
        (10.0, 142, (0.773365, 0.226635)),
        (100.0, 156, (0.693985, 0.306015)),
        (0.0, 127, (1.0, 0.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(number, below, weights, dtype):
    got = two_hot.encode(torch.tensor(number, dtype=dtype))
    want = torch.zeros(255, dtype=dtype)
    want[below : below + 2] = torch.tensor(weights, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
    if number == 0:
        assert torch.equal(got, want)


def test_there_and_back():
    size = torch.logspace(-6, 8, 400)
    numbers = torch.cat([-size, torch.zeros(1), size])
    weights = two_hot.encode(numbers)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(numbers))
    assert int((weights > 0).sum(-1).max()) == 2
    torch.testing.assert_close(two_hot.decode(as_logits(numbers)), numbers, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("number", [math.exp(20), 1e12, 3e38])
def test_numbers_out_of_reach_go_to_the_last_bins(number):
    weights = two_hot.encode(torch.tensor([number, -number]))
    assert weights[0, 254] == 1 and weights[1, 0] == 1
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))
    back = two_hot.decode(as_logits(torch.tensor([number, -number])))
    torch.testing.assert_close(back, torch.tensor([1.0, -1.0]) * math.expm1(20))


def test_no_opinion_is_zero():
    """Exactly as many bins on either side, so a new critic expects nothing."""
    assert float(two_hot.decode(torch.zeros(255)).abs()) < 1e-6


def test_decode_is_the_mean_in_symlog_space():
    logits = torch.randn(4, 255, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row in logits:
        probability = row.exp() / row.exp().sum()
        mean = sum(float(p) * (-20 + 40 * i / 254) for i, p in enumerate(probability))
        assert float(two_hot.decode(row)) == pytest.approx(math.copysign(math.expm1(abs(mean)), mean))


def test_the_loss_is_a_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 255, dtype=torch.float64, generator=generator)
    target = 50 * torch.randn(3, 2, dtype=torch.float64, generator=generator)
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), two_hot.encode(target).flatten(0, 1), reduction="none"
    )
    torch.testing.assert_close(two_hot.loss(logits, target).flatten(), want)
    best = two_hot.loss(as_logits(target).clamp(min=-1e4), target)  # its own code: the entropy of two bins is left
    assert bool((best <= math.log(2) + 1e-9).all()) and bool((best < two_hot.loss(logits, target)).all())


def test_gradients_reach_the_logits_only():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 255, dtype=torch.float64, generator=generator).requires_grad_()
    target = torch.tensor([3.0, -70.0], dtype=torch.float64, requires_grad=True)
    two_hot.loss(logits, target).sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - two_hot.encode(target.detach()))
    assert target.grad is None


def test_symlog_and_its_inverse():
    numbers = torch.tensor([-1e6, -1.0, -1e-9, 0.0, 1e-9, 2.0, 1e6], dtype=torch.float64)
    torch.testing.assert_close(two_hot.symexp(two_hot.symlog(numbers)), numbers, rtol=1e-12, atol=0)
    assert float(two_hot.symlog(torch.tensor(math.e - 1, dtype=torch.float64))) == pytest.approx(1)


def test_precise_under_autocast():
    """In bfloat16 a value of 100 would be off by a percent or two."""
    numbers = torch.tensor([100.0, -3.7, 0.01])
    logits = as_logits(numbers).clamp(min=-50)
    want = two_hot.loss(logits, numbers)
    with torch.autocast("cpu", torch.bfloat16):
        back, losses = two_hot.decode(logits), two_hot.loss(logits, numbers)
    assert back.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(back, numbers, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, want)
    assert two_hot.decode(logits.bfloat16()).dtype == torch.float32


# -- divided and averaged in the space of the numbers ---


def test_symexp_there_and_back():
    size = torch.logspace(-6, 8, 400, dtype=torch.float64)
    numbers = torch.cat([-size, torch.zeros(1), size])
    weights = two_hot.encode(numbers, "symexp")
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(numbers))
    assert int((weights > 0).sum(-1).max()) == 2
    torch.testing.assert_close(two_hot.decode(weights.log(), "symexp"), numbers, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symexp_bins_belong_to_themselves(dtype):
    bins = two_hot.symexp(torch.arange(-127, 128, dtype=dtype) * (20 / 127))
    assert torch.equal(two_hot.encode(bins, "symexp"), torch.eye(255, dtype=dtype))
    beyond = two_hot.encode(torch.tensor([-3e38, 3e38]), "symexp")
    assert beyond[0, 0] == 1 and beyond[1, 254] == 1


def test_a_symexp_mean_is_that_of_the_numbers():
    """Half 0 and half 100 is 50; the mean in symlog space is 9."""
    numbers = torch.tensor([0.0, 100.0], dtype=torch.float64)
    both = {kind: two_hot.encode(numbers, kind).mean(0).log() for kind in ("symlog", "symexp")}
    assert float(two_hot.decode(both["symexp"], "symexp")) == pytest.approx(50)
    assert float(two_hot.decode(both["symlog"], "symlog")) == pytest.approx(math.sqrt(101) - 1)


def test_symexp_of_no_opinion_is_exactly_zero():
    assert not two_hot.decode(torch.zeros(3, 255), "symexp").any()
    assert not two_hot.decode(torch.zeros(3, 255, dtype=torch.bfloat16), "symexp").any()


def test_the_symexp_loss_is_the_cross_entropy():
    logits, target = torch.randn(7, 255, dtype=torch.float64), 30 * torch.randn(7, dtype=torch.float64)
    want = -(two_hot.encode(target, "symexp") * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(two_hot.loss(logits, target, "symexp"), want)
