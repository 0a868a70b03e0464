"""The chunked and the stepwise form against the definition, on sizes that are all different.

Axes: B batch, H heads, T time, K key width, V value width, N blocks, C elements of a block.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from wmcli.kernels.linear_recurrence import (
    linear_recurrence,
    linear_recurrence_fork,
    linear_recurrence_step,
    reference,
)

B, H, T, K, V = 2, 3, 23, 4, 5


def operands(constant: bool, length: int = T):
    torch.manual_seed(0)
    q, k = torch.randn(2, B, H, length, K, dtype=torch.float64)
    v = torch.randn(B, H, length, V, dtype=torch.float64)
    log_decay = -torch.rand(*((H,) if constant else (B, H, length)), dtype=torch.float64)
    return q, k, v, log_decay, torch.randn(B, H, K, V, dtype=torch.float64)


def resets() -> torch.Tensor:
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, [0, 6, 7, 15]] = True
    reset[1, 22] = True
    return reset


@pytest.mark.parametrize("chunk", [1, 4, 7, 22, 23, 100, None])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_chunks_equal_the_definition(chunk, constant, with_reset, with_state):
    q, k, v, log_decay, state = operands(constant)
    start, reset = state if with_state else None, resets() if with_reset else None
    want = reference(q, k, v, log_decay, start, reset)
    got = linear_recurrence(q, k, v, log_decay, start, reset, chunk)
    assert_close(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("constant", [True, False])
def test_steps_equal_the_definition(constant):
    q, k, v, log_decay, state = operands(constant)
    want, want_state = reference(q, k, v, log_decay, state, resets())
    for t in range(T):
        decay = log_decay if constant else log_decay[:, :, t]
        y, state = linear_recurrence_step(q[:, :, t], k[:, :, t], v[:, :, t], decay, state, resets()[:, t])
        assert_close(y, want[:, :, t], rtol=0, atol=1e-11)
    assert_close(state, want_state, rtol=0, atol=1e-11)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("with_state", [False, True])
def test_fork_commits_only_the_block(count, constant, with_state):
    block, queries = 6, 2
    size = block + queries
    q, k, v, log_decay, state = operands(constant, count * size)
    q, k, v = (x.unflatten(2, (count, size)) for x in (q, k, v))
    log_decay = log_decay if constant else log_decay.unflatten(2, (count, size))
    state = state if with_state else None
    got, got_state = linear_recurrence_fork(q, k, v, log_decay, block, state)
    for n in range(count):
        decay = log_decay if constant else log_decay[:, :, n]
        want, _ = reference(q[:, :, n], k[:, :, n], v[:, :, n], decay, state)
        assert_close(got[:, :, n], want, rtol=0, atol=1e-11)
        decay = log_decay if constant else decay[..., :block]
        _, state = reference(q[:, :, n, :block], k[:, :, n, :block], v[:, :, n, :block], decay, state)
    assert_close(got_state, state, rtol=0, atol=1e-11)


@pytest.mark.parametrize("constant", [True, False])
def test_gradients(constant):
    arguments = [x.requires_grad_() for x in operands(constant, 9)]
    reset = torch.zeros(B, 9, dtype=torch.bool)
    reset[1, 5] = True
    assert torch.autograd.gradcheck(lambda *a: linear_recurrence(*a, reset, 4), arguments, fast_mode=True)


def test_bfloat16_operands_keep_a_float32_state():
    q, k, v, log_decay, state = (x.float() for x in operands(True))
    want, want_state = linear_recurrence(q, k, v, log_decay, state, chunk=8)
    with torch.autocast("cpu", torch.bfloat16):
        y, after = linear_recurrence(q.bfloat16(), k.bfloat16(), v.bfloat16(), log_decay, state, chunk=8)
    assert y.dtype == torch.bfloat16 and after.dtype == torch.float32
    assert (y.float() - want).abs().max() < 2e-2 * want.abs().max()
    assert (after - want_state).abs().max() < 1e-2 * want_state.abs().max()


def test_golden_retention():
    """From an independent NumPy implementation: rotation at positions 0 ... 11, keys / sqrt(8)."""
    i = torch.arange(2 * 12 * 8, dtype=torch.float64).view(1, 2, 12, 8)
    theta = 10000.0 ** -torch.linspace(0, 1, 4, dtype=torch.float64)

    def rotate(x, first):
        angle = (first + torch.arange(12, dtype=torch.float64))[:, None] * theta
        pair = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        return torch.view_as_real(pair * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    log_decay = torch.tensor([0.96875, 0.998046875], dtype=torch.float64).log()
    v = torch.sin(1.1 * i + 0.3)
    for first in (0, 1000):
        q, k = rotate(torch.sin(0.3 * i + 0.1), first), rotate(torch.cos(0.7 * i + 0.2), first) / 8**0.5
        y, state = linear_recurrence(q, k, v, log_decay, chunk=5)
        assert y[0, 0, 0, :3].tolist() == pytest.approx([-0.2117270936, -0.7060309328, -0.4287786919], abs=1e-9)
        assert y[0, 1, 11, :3].tolist() == pytest.approx([0.7641250644, 0.2794923455, -0.5105717767], abs=1e-9)
        assert y.sum().item() == pytest.approx(0.3384320218, abs=1e-9)
        assert y.square().sum().item() == pytest.approx(32.8881574011, abs=1e-9)
        if first == 0:
            assert state.sum().item() == pytest.approx(0.0751875036, abs=1e-9)
            assert state.square().sum().item() == pytest.approx(4.3172387590, abs=1e-9)
            assert state[0, 1, 2, 3].item() == pytest.approx(0.1808484695, abs=1e-9)
