"""The ensemble: its heads one by one, its loss and its disagreement by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from wmcli.nn.ensemble import Ensemble

E, B, T, D, V, C = 3, 2, 4, 6, 5, 7


@pytest.fixture
def ensemble() -> Ensemble:
    torch.manual_seed(0)
    return Ensemble(E, D, V, C)


def test_its_heads_predict_side_by_side_and_their_input_gets_no_gradient(ensemble):
    x = torch.randn(B, T, D, requires_grad=True)
    log_p = ensemble(x)
    assert log_p.shape == (E, B, T, V, C)
    for head, got in zip(ensemble.heads, log_p, strict=True):
        assert_close(got, head(x).unflatten(-1, (V, C)).log_softmax(-1))
    assert not torch.equal(log_p[0], log_p[1])
    ensemble.loss(x, torch.randint(C, (B, T, V))).sum().backward()
    assert x.grad is None and all(parameter.grad.any() for parameter in ensemble.parameters())


def test_the_loss_is_the_mean_cross_entropy_of_the_heads(ensemble):
    x, target = torch.randn(B, T, D), torch.randn(B, T, V, C).softmax(-1)
    want = sum(-(target * log_p).sum((-2, -1)) for log_p in ensemble(x)) / E
    assert_close(ensemble.loss(x, target), want)
    classes = torch.randint(C, (B, T, V))
    assert_close(ensemble.loss(x, classes), ensemble.loss(x, torch.nn.functional.one_hot(classes, C).float()))


def test_disagreement_is_the_divergence_of_the_heads(ensemble):
    x = torch.randn(B, T, D)
    p = ensemble(x).exp()
    mean = p.mean(0)
    want = (p * (p / mean).log()).sum(-1).mean(0).mean(-1)
    got = ensemble.disagreement(x)
    assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert (got > 0).all() and (got < math.log(E)).all() and not got.requires_grad


def test_disagreement_has_its_bounds(ensemble):
    x = torch.ones(B, D)
    with torch.no_grad():
        for index, head in enumerate(ensemble.heads):
            head[2].weight.zero_()
            head[2].bias.zero_()
            head[2].bias.view(V, C)[:, index] = 50.0  # each is sure of another class
    assert_close(ensemble.disagreement(x), torch.full((B,), math.log(E)))
    for head in ensemble.heads[1:]:
        head.load_state_dict(ensemble.heads[0].state_dict())
    assert_close(ensemble.disagreement(x), torch.zeros(B), atol=1e-6, rtol=0)


def test_classes_that_cannot_occur_have_no_part_in_loss_and_disagreement(ensemble):
    x, target = torch.randn(B, T, D), torch.randint(2, (B, T, V))
    possible = (torch.arange(C) < 2).expand(V, C)
    p = ensemble(x, possible).exp()
    assert p[..., 2:].sum() == 0
    within = ensemble(x)[..., :2].softmax(-1)
    assert_close(p[..., :2], within)
    assert_close(
        ensemble.loss(x, target, possible),
        -within.log().gather(-1, target[None, ..., None].expand(E, B, T, V, 1)).sum((-1, -2)).mean(0),
    )
    mean = within.mean(0)
    want = (within * (within / mean).log()).sum(-1).mean(0).mean(-1)
    assert_close(ensemble.disagreement(x, possible), want, rtol=1e-4, atol=1e-6)
    assert torch.equal(ensemble(x, torch.ones(V, C, dtype=torch.bool)), ensemble(x))
