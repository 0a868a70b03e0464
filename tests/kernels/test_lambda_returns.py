"""Lambda-returns in Triton against their definition. What the definition is worth: tests/kernels/test_returns.py."""

from __future__ import annotations

import pytest
import torch
from gpus import DEVICE
from torch.testing import assert_close

from wmcli.kernels.dispatch import using
from wmcli.kernels.lambda_returns import lambda_returns, reference


def rollout(rows: int, steps: int, rewards: int, dtype=torch.float32):
    """Reward, value and end on the device; the operands are parts of wider tensors, as in rollouts."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, rows, steps + 1, generator=generator).to(DEVICE, dtype)
    terminated = (torch.rand(steps + 1, rows, generator=generator) < 0.3).to(DEVICE).mT
    return wide[0, :, 1 : rewards + 1], wide[1, :, :steps], terminated[:, :rewards]


@pytest.mark.parametrize("bootstrap", ["next", "own"])
@pytest.mark.parametrize(("rows", "steps", "rewards"), [(3, 1, 0), (3, 1, 1), (5, 2, 1), (33, 7, 7), (70, 6, 5)])
def test_triton_equals_the_definition(bootstrap, rows, steps, rewards):
    """The returns, and the gradients of reward and value."""
    reward, value, terminated = rollout(rows, steps, rewards)
    results = []
    for dtype, form in ((torch.float64, reference), (torch.float32, lambda_returns)):
        operands = [operand.to(dtype).detach().requires_grad_() for operand in (reward, value)]
        with using("triton"):
            returns = form(*operands, terminated, 0.97, 0.8, bootstrap)
        weights = torch.linspace(-1, 1, rows * steps, dtype=dtype, device=DEVICE).view(steps, rows).mT
        gradients = torch.autograd.grad((weights * returns).sum(), operands, materialize_grads=True)
        results.append([result.double() for result in (returns, *gradients)])
    assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_strides_are_followed():
    reward, value, terminated = rollout(33, 7, 6)
    assert not (reward.is_contiguous() or value.is_contiguous() or terminated.is_contiguous())
    with using("triton"):
        got = lambda_returns(reward, value, terminated, 0.9, 0.7)
    assert_close(got, reference(reward, value, terminated, 0.9, 0.7))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_sums_are_float32_for_bfloat16_operands(implementation):
    """Only the results are rounded, so that an error does not grow from step to step."""
    reward, value, terminated = rollout(5, 16, 16, torch.bfloat16)
    want = reference(reward.double(), value.double(), terminated, 0.99, 0.95)
    operands = [operand.detach().requires_grad_() for operand in (reward, value)]
    with using(implementation):
        got = lambda_returns(*operands, terminated, 0.99, 0.95)
        gradients = torch.autograd.grad(got.sum(), operands)
    assert got.dtype == torch.bfloat16 and [gradient.dtype for gradient in gradients] == 2 * [torch.bfloat16]
    assert_close(got.double(), want, rtol=2**-7, atol=1e-6)  # the interpreter cuts digits off


@pytest.mark.parametrize("bootstrap", ["next", "own"])
def test_triton_lets_nothing_in_from_behind_an_end(bootstrap):
    reward, value, terminated = (operand.clone() for operand in rollout(3, 7, 7))
    terminated[:, 3], value[:, 4:], reward[:, 4:] = True, torch.nan, torch.inf
    with using("triton"):
        got = lambda_returns(reward, value, terminated, 0.9, 0.7, bootstrap)
    assert got[:, :4].isfinite().all() and got[:, 5].isnan().all()
    assert_close(got[:, 3], reward[:, 3])


def test_only_requested_inputs_get_a_gradient():
    reward, value, terminated = rollout(3, 5, 4)
    gradients = []
    for implementation in ("torch", "triton"):
        value = value.detach().requires_grad_()
        with using(implementation):
            assert not lambda_returns(reward, value.detach(), terminated, 0.9, 0.7).requires_grad
            lambda_returns(reward, value, terminated, 0.9, 0.7).square().sum().backward()
        assert reward.grad is None
        gradients.append(value.grad)
    assert_close(gradients[1], gradients[0])
