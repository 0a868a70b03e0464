"""Running statistics: equal to those of everything seen at once, saved, and only changed by an update."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from wmcli.nn.running import RunningNormalizer, RunningRange


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (1, 3), (5, 2, 3), (2, 3, 4, 3), (1, 1, 3)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator) * (1 + i) + torch.tensor([0.0, 5.0 * i, -100.0])
        for i, shape in enumerate(shapes)
    ]


# -- normalizer ---


def test_mean_and_variance_of_everything_seen():
    normalizer = RunningNormalizer(3).double()
    for batch in batches():
        normalizer.update(batch)
    seen = torch.cat([batch.reshape(-1, 3) for batch in batches()])
    start = float(torch.tensor(1e-4))  # so many observations of mean 0 and variance 1 stand at the beginning
    total = len(seen) + start
    mean = seen.sum(0) / total
    variance = (seen.square().sum(0) + start) / total - mean.square()
    torch.testing.assert_close(normalizer.mean, mean)
    torch.testing.assert_close(normalizer.variance, variance)
    torch.testing.assert_close(normalizer.mean, seen.mean(0), rtol=1e-4, atol=0)
    torch.testing.assert_close(normalizer.variance, seen.var(0, correction=0), rtol=1e-2, atol=0)
    assert float(normalizer.count) == pytest.approx(total)


def test_many_batches_in_float32():
    """The mean is far above the spread: a sum of squares would have lost the variance."""
    generator = torch.Generator().manual_seed(0)
    normalizer, seen = RunningNormalizer(1), []
    for _ in range(2000):
        seen.append(1000 + torch.randn(64, 1, generator=generator))
        normalizer.update(seen[-1])
    whole = torch.cat(seen).double()
    torch.testing.assert_close(normalizer.mean.double(), whole.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(normalizer.variance.double(), whole.var(0), rtol=1e-2, atol=0)


def test_forward_scales_clips_and_changes_nothing():
    normalizer = RunningNormalizer(3)
    x = torch.tensor([[1.0, -2.0, 300.0], [-50.0, 0.5, 0.0]])
    torch.testing.assert_close(normalizer(x), x.clamp(-10, 10))  # mean 0, variance 1 at the beginning
    normalizer.update(batches()[2])
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    for mode in (True, False):
        want = ((x - normalizer.mean) / (normalizer.variance + 1e-8).sqrt()).clamp(-10, 10)
        torch.testing.assert_close(normalizer.train(mode)(x[:, None]), want[:, None])
    torch.testing.assert_close(dict(normalizer.state_dict()), before, rtol=0, atol=0)
    assert float(normalizer(x).abs().max()) == 10


def test_a_constant_feature_is_no_division_by_zero():
    normalizer = RunningNormalizer(2)
    for _ in range(100_000 // 1000):
        normalizer.update(torch.tensor([0.0, 1.0]).expand(1000, 2))
    assert torch.isfinite(normalizer(torch.tensor([0.0, 1.0]))).all()
    assert float(normalizer.variance.min()) >= 0


def test_precision_follows_the_buffers():
    normalizer = RunningNormalizer(3)
    x = batches()[0]
    with torch.autocast("cpu", torch.bfloat16):
        normalizer.update(x.bfloat16())
        assert normalizer(x.bfloat16()).dtype == torch.float32
    assert {buffer.dtype for buffer in normalizer.buffers()} == {torch.float32}
    want = RunningNormalizer(3)
    want.update(x.bfloat16().float())
    torch.testing.assert_close(dict(normalizer.state_dict()), dict(want.state_dict()), rtol=0, atol=0)


# -- range ---


def test_which_percentiles():
    """Of 16,384 numbers the 819th and the 15,564th smallest, a hundredth of the way from 0."""
    values = torch.arange(1, 16_385).float()[torch.randperm(16_384, generator=torch.Generator().manual_seed(0))]
    spread = RunningRange()
    spread.update(values.reshape(1024, 16))
    torch.testing.assert_close((spread.low, spread.high), (torch.tensor(8.19), torch.tensor(155.64)))
    torch.testing.assert_close(spread(), torch.tensor(147.45))
    few = RunningRange()
    few.update(torch.tensor([5.0, 1.0, 3.0]))  # int(0.05 * 3) is 0, int(0.95 * 3) is 2
    torch.testing.assert_close((few.low, few.high), (torch.tensor(0.01), torch.tensor(0.03)))


def test_averages_start_at_zero_and_are_not_corrected():
    spread = RunningRange().double()
    low = high = 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        values = torch.randn(40, dtype=torch.float64, generator=generator)
        ordered = values.sort().values
        low, high = 0.99 * low + 0.01 * float(ordered[1]), 0.99 * high + 0.01 * float(ordered[37])
        spread.update(values)
    assert float(spread()) == pytest.approx(high - low)
    assert float(spread()) < 0.6 * float(ordered[37] - ordered[1])


# -- both ---


@pytest.mark.parametrize("make", [lambda: RunningNormalizer(3), RunningRange])
def test_resume_is_exact(make):
    one = make()
    for batch in batches()[:3]:
        one.update(batch)
    other = make()
    other.load_state_dict(load(save(one.state_dict())))
    for each in (one, other):
        for batch in batches()[3:]:
            each.update(batch)
    torch.testing.assert_close(dict(other.state_dict()), dict(one.state_dict()), rtol=0, atol=0)
    assert not list(one.parameters())
