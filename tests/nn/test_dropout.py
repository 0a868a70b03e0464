"""Dropout: the chance, the mean, the gradient, and that the global generator alone decides."""

from __future__ import annotations

import math

import pytest
import torch

from wmcli.nn import dropout as module
from wmcli.nn.dropout import dropout

KINDS = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)  # no divisor of the sizes below


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_elements_are_dropped_with_the_chance_given_independently_of_each_other(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    y = dropout(torch.ones(433, 431, dtype=dtype), p, True)
    kept = (y != 0).double()
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean().item() - (1 - p)) < 5 * deviation
    neighbors = ((kept[:, 1:] - (1 - p)) * (kept[:, :-1] - (1 - p))).mean().item() / (p * (1 - p))
    assert abs(neighbors) < 5 / math.sqrt(kept.numel())
    torch.testing.assert_close(y[y != 0].float().unique(), torch.tensor([1 / (1 - p)]), rtol=4e-3, atol=0)


def test_the_chance_is_exact_to_16_bits_and_elements_with_bits_in_common_are_independent() -> None:
    torch.manual_seed(0)
    columns = 1 << 18
    for p in (6.3 / 256, 25.6 / 256, 250.7 / 256):  # between two values that 8 bits can have
        flat = module._keep_mask(module.SHARED * columns, round(p * module.LEVELS))
        keep = flat.view(module.SHARED, columns).double()
        deviation = math.sqrt(p * (1 - p) / keep.numel())
        assert 5 * deviation < 0.3 / 256 and abs(keep.mean().item() - (1 - p)) < 5 * deviation
        # Variance of the number of ones in a column. Dependent elements would increase it.
        expected = module.SHARED * p * (1 - p)
        assert abs(keep.sum(0).var().item() / expected - 1) < 0.02


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(7, 3, 143), (1,), (5,)])
def test_the_gradient_passes_where_the_value_did_and_grows_as_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.4, True)
    assert y.dtype == dtype and y.shape == x.shape
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(x * gradient, y)
    assert ((gradient == 0) == (y == 0)).all()


def test_noncontiguous_tensors_are_dropped_in_place() -> None:
    x = torch.randn(6, 35, 20, requires_grad=True)
    torch.manual_seed(3)
    y = dropout(x.transpose(1, 2), 0.3, True)
    gradient = torch.randn(20, 6, 35).permute(1, 0, 2)
    (got,) = torch.autograd.grad(y, x, gradient)
    factor = torch.where(y == 0, 0.0, 65536 / round(0.7 * 65536))
    torch.testing.assert_close(y, x.transpose(1, 2) * factor)
    torch.testing.assert_close(got, (gradient * factor).transpose(1, 2))


def test_torchs_generator_decides() -> None:
    x = torch.ones(5000)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append((dropout(x, 0.5, True), dropout(x, 0.5, True)))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1]) and not torch.equal(drawn[0][0], drawn[2][0])


@pytest.mark.parametrize("dtype", [*KINDS, torch.float64])
def test_nothing_is_dropped_outside_training_and_everything_at_one(dtype: torch.dtype) -> None:
    x = torch.randn(50, dtype=dtype)
    assert torch.equal(dropout(x, 0.5, False), x)
    assert torch.equal(dropout(x, 0.0, True), x)
    torch.testing.assert_close(dropout(x, 1e-9, True), x)
    assert not dropout(x, 1.0, True).any()
    assert (dropout(x, 0.5, True) == 0).any()
