"""Simplicial normalization: what stays of a latent, and the divergence of two."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from wmcli.nn.simnorm import divergence, simnorm


def test_neighbors_share_one():
    x = 10 * torch.randn(3, 5, 768)
    z = simnorm(x, 8)
    assert_close(z.unflatten(-1, (96, 8)).sum(-1), torch.ones(3, 5, 96))
    assert_close(z.sum(-1), torch.full((3, 5), 96.0))
    size = z.norm(dim=-1)
    assert bool((size >= math.sqrt(12) - 1e-4).all() and (size <= math.sqrt(96) + 1e-4).all())
    assert_close(z[0, 0, 8:16], x[0, 0, 8:16].exp() / x[0, 0, 8:16].exp().sum())
    assert_close(simnorm(torch.zeros(16), 8), torch.full((16,), 1 / 8))


def test_golden_divergence():
    certain = torch.eye(8, dtype=torch.float64)[:3].flatten()
    uniform = torch.full((24,), 1 / 8, dtype=torch.float64)
    assert float(divergence(certain, uniform, 8)) == pytest.approx(2.07935, abs=5e-6)  # ln 8, less what 1e-6 takes
    assert float(divergence(uniform, uniform, 8)) == 0


def test_the_divergence_is_the_mean_over_groups_and_teaches_the_prediction_alone():
    torch.manual_seed(0)
    target, predicted = (simnorm(torch.randn(4, 12, dtype=torch.float64), 4).requires_grad_() for _ in range(2))
    got = divergence(target, predicted, 4)
    want = torch.zeros(4, dtype=torch.float64)
    for group in range(3):
        p, q = (each[:, 4 * group : 4 * group + 4].detach() for each in (target, predicted))
        want += (p * (p / q).log()).sum(-1) / 3
    assert_close(got, want, rtol=0, atol=1e-4)
    got.sum().backward()
    assert target.grad is None and predicted.grad is not None


def test_float32_under_autocast():
    x = torch.randn(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        z = simnorm(x.bfloat16(), 8)
        assert z.dtype == divergence(z, z, 8).dtype == torch.float32
