"""One-hot latents: exact values, gradients, and the numbers of Drama's sheet of self-checks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.nn.categorical import (
    draw_one_hot,
    entropy,
    kl_divergence,
    mixed_log_probabilities,
    one_hot,
    straight_through,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def saturated(*classes: int, size: int = 32) -> torch.Tensor:
    logits = torch.full((len(classes), size), -1000.0)
    logits[range(len(classes)), list(classes)] = 1000.0
    return logits


def test_unimix_bounds_probabilities_and_nothing_is_impossible():
    p = mixed_log_probabilities(saturated(3), 0.01).exp()
    assert_close(p.max(), torch.tensor(0.9903125))
    assert_close(p.min(), torch.tensor(0.0003125))
    assert_close(p.sum(), torch.tensor(1.0))


def test_unimix_is_the_mixture():
    logits = 3 * torch.randn(4, 5, 7, dtype=torch.float64)
    assert_close(mixed_log_probabilities(logits, 0.25).exp(), 0.75 * logits.softmax(-1) + 0.25 / 7)
    assert_close(mixed_log_probabilities(logits, 0.0), logits.log_softmax(-1))


def test_unimix_is_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert mixed_log_probabilities(torch.randn(2, 3, 4).bfloat16(), 0.01).dtype == torch.float32


def test_kl_of_saturated_distributions():
    one, other, flat = (mixed_log_probabilities(x, 0.01) for x in (saturated(3), saturated(4), torch.zeros(1, 32)))
    assert_close(kl_divergence(one, other), torch.tensor(7.980560), atol=1e-5, rtol=0)
    assert_close(kl_divergence(one.expand(32, 32), other.expand(32, 32)), torch.tensor(255.3779), atol=1e-3, rtol=0)
    assert_close(kl_divergence(one, flat), torch.tensor(3.377909), atol=1e-5, rtol=0)
    assert kl_divergence(one, one) == 0
    assert_close(entropy(flat), torch.tensor(math.log(32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_exactly_zero_and_one(dtype):
    p = mixed_log_probabilities(torch.randn(50, 6, 32), 0.01).exp().to(dtype).requires_grad_()
    z = straight_through(p)
    assert set(z.detach().unique().tolist()) == {0.0, 1.0}
    assert (z.sum(-1) == 1).all()


def test_the_gradient_of_a_draw_is_that_of_the_probabilities():
    p = torch.rand(3, 4, 5, requires_grad=True)
    weight = torch.randn(3, 4, 5)
    (straight_through(p) * weight).sum().backward()
    assert_close(p.grad, weight)


def test_draws_follow_the_probabilities():
    p = torch.tensor([[0.5, 0.2, 0.3, 0.0]])
    z = draw_one_hot(p.expand(100_000, 1, 4))
    assert_close(z.mean(0), p, atol=3 * (0.25 / 100_000) ** 0.5, rtol=0)
    assert (z[..., 3] == 0).all()


def test_a_drawn_latent_is_drawn_again_as_itself():
    z = draw_one_hot(torch.rand(200, 3, 9))
    assert torch.equal(draw_one_hot(z), z)


def test_the_numbers_given_decide_alone():
    p, uniforms = torch.rand(5, 3, 9), torch.rand(5, 3)
    before = torch.get_rng_state()
    z = draw_one_hot(p, uniforms)
    assert torch.equal(torch.get_rng_state(), before)
    below = (p.cumsum(-1) / p.sum(-1, keepdim=True) <= uniforms[..., None]).sum(-1)
    assert torch.equal(z, F.one_hot(below, 9).float())
    assert not torch.equal(z, draw_one_hot(p, 1 - uniforms))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_hot_is_torchs(dtype):
    index = torch.randint(4, (3, 5))
    assert torch.equal(one_hot(index, 4, dtype), F.one_hot(index, 4).to(dtype))
