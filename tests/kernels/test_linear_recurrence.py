"""The chunked and the stepwise form against the definition, on sizes that are all different.

Axes: B batch, H heads, T time, K key width, V value width, N blocks, C elements of a block.
"""

from __future__ import annotations

import math

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


# -- one head of queries and keys for all value heads, as in Mamba-2 ---------------------------------------------------


def shared(constant: bool, length: int = T):
    q, k, v, log_decay, state = operands(constant, length)
    return q[:, :1], k[:, :1], v, log_decay, state


@pytest.mark.parametrize("chunk", [1, 4, 8, 16, 23, 37, 64])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("with_state", [False, True])
def test_a_shared_head_equals_copies_of_it(chunk, constant, with_state):
    q, k, v, log_decay, state = shared(constant)
    start = state if with_state else None
    copies = (q.expand(-1, H, -1, -1), k.expand(-1, H, -1, -1), v, log_decay)
    for reset in (None, resets()):
        want = reference(*copies, start, reset)
        assert_close(reference(q, k, v, log_decay, start, reset), want, rtol=0, atol=1e-12)
        assert_close(linear_recurrence(q, k, v, log_decay, start, reset, chunk), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("constant", [True, False])
def test_steps_and_forks_with_a_shared_head(constant):
    q, k, v, log_decay, state = shared(constant, 24)
    copies = tuple(x.expand(-1, H, *x.shape[2:]) for x in (q, k))
    step = log_decay if constant else log_decay[:, :, 0]
    got = linear_recurrence_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], step, state)
    want = linear_recurrence_step(copies[0][:, :, 0], copies[1][:, :, 0], v[:, :, 0], step, state)
    assert_close(got, want, rtol=0, atol=1e-12)
    q, k, v, *copies = (x.unflatten(2, (3, 8)) for x in (q, k, v, *copies))
    log_decay = log_decay if constant else log_decay.unflatten(2, (3, 8))
    got = linear_recurrence_fork(q, k, v, log_decay, 6, state)
    assert_close(got, linear_recurrence_fork(*copies, v, log_decay, 6, state), rtol=0, atol=1e-12)


def test_gradients_with_a_shared_head():
    arguments = [x.requires_grad_() for x in shared(False, 7)]
    reset = torch.zeros(B, 7, dtype=torch.bool)
    reset[1, 5] = True
    assert torch.autograd.gradcheck(lambda *a: linear_recurrence(*a, reset, 3), arguments)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, None])
def test_golden_state_space(chunk):
    """One channel whose state is halved at each step of ln 2: step * k = ln 2, x = 1, 2, 3, 4."""
    ones, step = torch.ones(1, 1, 4, 1, dtype=torch.float64), math.log(2)
    v = step * torch.arange(1.0, 5.0, dtype=torch.float64)[None, None, :, None]
    y, _ = linear_recurrence(ones, ones, v, torch.full((1, 1, 4), -step, dtype=torch.float64), chunk=chunk)
    assert y.flatten().tolist() == pytest.approx([0.693147, 1.732868, 2.945876, 4.245526], abs=1e-6)


@pytest.mark.parametrize("chunk", [4, 8, 37])
def test_resets_in_a_row_and_in_one_chunk(chunk):
    q, k, v, log_decay, state = shared(False, 37)
    reset = torch.zeros(B, 37, dtype=torch.bool)
    reset[:, [5, 16, 17]] = True
    want = reference(q, k, v, log_decay, state, reset)
    assert_close(linear_recurrence(q, k, v, log_decay, state, reset, chunk), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [64, None])
def test_strong_decay_stays_finite(chunk):
    """Log decays sum up to -40,960; above the diagonal their differences would overflow."""
    q, k, v, _, state = (x.float() for x in shared(False, 256))
    log_decay = torch.full((B, H, 256), -160.0)
    arguments = [x.requires_grad_() for x in (q, k, v, log_decay, state)]
    y, after = linear_recurrence(*arguments, chunk=chunk)
    gradients = torch.autograd.grad(y.square().sum() + after.square().sum(), arguments)
    assert all(value.isfinite().all() for value in (y, after, *gradients))


# -- precision, and numbers from elsewhere -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 8, 37])
def test_precision(chunk):
    exact = shared(False, 37)
    want, want_state = linear_recurrence(*exact, chunk=chunk)
    y, after = linear_recurrence(*(x.float() for x in exact), chunk=chunk)
    assert (y - want).abs().max() < 1e-4 and (after - want_state).abs().max() < 1e-4
    q, k, v, log_decay, state = (x.float() for x in exact)
    y, _ = linear_recurrence(q.bfloat16(), k.bfloat16(), v.bfloat16(), log_decay, state, chunk=chunk)
    assert (y - want).abs().max() < 2e-2 * want.abs().max()


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
