"""Sampling follows the softmax, never draws what has no probability, and is a function of the numbers given."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from wmcli.nn.categorical import choose, sample, uniform

CPU = torch.device("cpu")
LOGITS = torch.tensor([[2.0, -math.inf, 0.5, -1.0, 0.0], [-math.inf, 3.0, 0.0, 1.0, -math.inf]])


@pytest.mark.parametrize("own_generator", [False, True])
def test_samples_follow_the_softmax(own_generator):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1) if own_generator else None
    draws = sample(LOGITS.expand(20000, 2, 5), uniform((20000, 2), CPU, generator))
    assert draws.shape == (20000, 2)
    assert draws.dtype == torch.int64
    frequency = F.one_hot(draws, 5).float().mean(0)
    torch.testing.assert_close(frequency, LOGITS.softmax(-1), rtol=0, atol=0.015)
    assert frequency[0, 1] == 0 and frequency[1, 0] == 0 and frequency[1, 4] == 0


@pytest.mark.parametrize(("number", "drawn"), [(0.0, 1), (1 - 2**-24, 2)])
def test_nothing_impossible_is_drawn_at_the_ends_of_the_random_numbers(number, drawn):
    assert sample(torch.tensor([-math.inf, 0.0, 0.0, -math.inf]), torch.tensor(number)) == drawn


def test_a_generator_of_another_device():
    """It draws where it lives, as much as it would for logits beside it: no device has a say in a generator's state."""
    here, there = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    drawn = uniform((2,), torch.device("meta"), here)
    assert drawn.device.type == "meta" and drawn.shape == (2,)
    uniform((2,), CPU, there)
    assert torch.equal(here.get_state(), there.get_state())
    assert not torch.equal(here.get_state(), torch.Generator().manual_seed(1).get_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cpu_draws_the_same_for_every_device():
    logits = torch.randn(500, 7)
    want = choose(logits, 1.0, torch.Generator().manual_seed(1))
    logits = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = choose(logits, 1.0, torch.Generator().manual_seed(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), want)


def test_temperature_sharpens_and_at_zero_takes_the_likeliest_without_a_draw():
    torch.manual_seed(0)
    draws = choose(LOGITS.expand(20000, 2, 5), 0.5)
    frequency = F.one_hot(draws, 5).float().mean(0)
    torch.testing.assert_close(frequency, (LOGITS / 0.5).softmax(-1), rtol=0, atol=0.015)
    before = torch.get_rng_state()
    assert choose(LOGITS, 0.0).tolist() == [0, 1]
    assert torch.equal(torch.get_rng_state(), before)
