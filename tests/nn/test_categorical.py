"""Sampling follows the softmax, and never draws what has no probability."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from wmcli.nn.categorical import sample

LOGITS = torch.tensor([[2.0, -math.inf, 0.5, -1.0, 0.0], [-math.inf, 3.0, 0.0, 1.0, -math.inf]])


@pytest.mark.parametrize("own_generator", [False, True])
def test_samples_follow_the_softmax(own_generator):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1) if own_generator else None
    draws = sample(LOGITS.expand(20000, 2, 5), generator)
    assert draws.shape == (20000, 2)
    assert draws.dtype == torch.int64
    frequency = F.one_hot(draws, 5).float().mean(0)
    torch.testing.assert_close(frequency, LOGITS.softmax(-1), rtol=0, atol=0.015)
    assert frequency[0, 1] == 0 and frequency[1, 0] == 0 and frequency[1, 4] == 0


@pytest.mark.parametrize(("uniform", "drawn"), [(0.0, 1), (1 - 2**-24, 2)])
def test_nothing_impossible_is_drawn_at_the_ends_of_the_random_numbers(monkeypatch, uniform, drawn):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, uniform))
    assert sample(torch.tensor([-math.inf, 0.0, 0.0, -math.inf])) == drawn
