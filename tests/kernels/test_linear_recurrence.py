"""The chunked and the stepwise form, in torch and in Triton, against the definition, on sizes that are all different.

Axes: B batch, H heads, T time, K key width, V value width, N blocks, C elements of a block.
"""

from __future__ import annotations

import math

import pytest
import torch
from gpus import DEVICE
from torch.testing import assert_close

from wmcli.kernels import linear_recurrence as module
from wmcli.kernels import tiles
from wmcli.kernels.dispatch import using
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


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("numbers", [1, 2 * H * K * V, 1000])
def test_a_step_without_gradients_equals_one_with_them(constant, heads, numbers, monkeypatch):
    monkeypatch.setattr(module, "NUMBERS", numbers)
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, heads, K, dtype=torch.float64)
    v, state = torch.randn(5, H, V, dtype=torch.float64), torch.randn(5, H, K, V, dtype=torch.float64)
    log_decay = -torch.rand(*((H,) if constant else (5, H)), dtype=torch.float64)
    for reset in (None, torch.tensor([False, True, False, False, True])):
        want, before = linear_recurrence_step(q, k, v, log_decay, state, reset), state.clone()
        with torch.no_grad():
            got = linear_recurrence_step(q, k, v, log_decay, state, reset)
        assert_close(got, want, rtol=0, atol=1e-12)
        assert torch.equal(state, before)


@pytest.mark.parametrize("constant", [True, False])
def test_gradients_of_a_step(constant):
    q, k, v, log_decay, state = operands(constant, 1)
    arguments = [q[:, :, 0], k[:, :, 0], v[:, :, 0], log_decay if constant else log_decay[:, :, 0], state]
    arguments = [x.clone().requires_grad_() for x in arguments]
    reset = torch.tensor([False, True])
    assert torch.autograd.gradcheck(lambda *a: linear_recurrence_step(*a, reset), arguments)


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


# -- in Triton ---------------------------------------------------------------------------------------------------------


def triton_operands(batch, heads, shared, length, key, value, constant, dtype=torch.float32):
    torch.manual_seed(0)
    q, k = torch.randn(2, batch, 1 if shared else heads, length, key)
    v, state = torch.randn(batch, heads, length, value), torch.randn(batch, heads, key, value)
    log_decay = -0.1 * torch.rand(*((heads,) if constant else (batch, heads, length)))  # reaches over several tiles
    operands = [q.to(dtype), k.to(dtype), v.to(dtype), log_decay, state]
    return [operand.to(DEVICE).requires_grad_() for operand in operands]


def agree(form, meaning, operands, share=1e-5):
    """Both results and the gradients of all operands, through both, within a share of the largest number of each."""
    exact = [operand.detach().double().requires_grad_() for operand in operands]
    want = meaning(*exact)
    weights = [torch.randn_like(value) for value in want]
    with using("triton"):
        got = form(*operands)
    assert got[0].dtype == operands[2].dtype and got[1].dtype == torch.float32
    grad_want = torch.autograd.grad(want, exact, weights, allow_unused=True)
    weights = [weight.to(value.dtype) for weight, value in zip(weights, got, strict=True)]
    grad_got = torch.autograd.grad(got, operands, weights, allow_unused=True)
    for value, true in zip((*got, *grad_got), (*want, *grad_want), strict=True):
        assert (value is None) == (true is None)
        if true is not None:
            assert value.shape == true.shape
            assert (value.double() - true).abs().max() <= share * true.abs().max()


@pytest.mark.parametrize(
    ("sizes", "chunk", "constant", "resets"),
    [
        ((2, 1, False, 23, 4, 5), 8, False, [(0, 6), (0, 7), (0, 18), (1, 0), (1, 22)]),  # the last chunk is short
        ((1, 2, True, 23, 4, 5), 12, True, [(0, 6), (0, 7)]),
        ((1, 2, True, 23, 4, 5), None, False, [(0, 11)]),  # a single chunk
        ((1, 1, False, 120, 20, 17), 70, False, [(0, 10), (0, 100)]),  # several tiles of a chunk
        ((1, 1, False, 120, 20, 17), 70, False, [(0, 75)]),
        ((1, 2, True, 33, 70, 20), 17, False, []),  # several tiles of the widths
        ((1, 1, False, 33, 17, 70), 40, True, []),
    ],
)
def test_triton_equals_the_definition(sizes, chunk, constant, resets):
    operands = triton_operands(*sizes, constant)
    reset = torch.zeros(sizes[0], sizes[3], dtype=torch.bool, device=DEVICE)
    for row, t in resets:
        reset[row, t] = True
    agree(lambda *x: linear_recurrence(*x, reset, chunk), lambda *x: reference(*x, reset), operands)


@pytest.mark.parametrize(("chunk", "constant"), [(15, True), (15, False), (30, False)])
def test_triton_without_reset_or_state(chunk, constant):
    operands = triton_operands(1, 1, True, 30, 16, 16, constant)
    agree(lambda *x: linear_recurrence(*x, chunk=chunk), reference, operands)
    agree(lambda *x: linear_recurrence(*x[:4], chunk=chunk), lambda *x: reference(*x[:4]), operands)


@pytest.mark.parametrize("chunk", [15, 30])
@pytest.mark.parametrize("which", [0, 1])
def test_triton_gradients_through_one_result(chunk, which):
    """Exactly the operands that torch's form gives a gradient have one."""
    q, k, v, log_decay, state = triton_operands(1, 1, False, 30, 16, 16, False)
    for operands in ([q, k, v, log_decay, state], [q, v, k]):
        rest = () if len(operands) == 5 else (log_decay.detach(), state.detach())
        gradients = []
        for name in ("torch", "triton"):
            with using(name):
                out = linear_recurrence(*operands[:3], *(rest or operands[3:]), None, chunk)[which]
            gradients.append(torch.autograd.grad(out.square().sum(), operands, allow_unused=True))
        for want, got in zip(*gradients, strict=True):
            assert (got is None) == (want is None)
            assert want is None or (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("count", "size", "block", "constant"),
    [(1, 8, 6, True), (3, 8, 6, False), (2, 70, 40, False), (1, 70, 33, True), (2, 5, 5, False)],
)
def test_triton_fork(count, size, block, constant):
    operands = triton_operands(1, 1 + constant, True, count * size, 18, 16, constant)

    def fork(q, k, v, log_decay, state=None):
        q, k, v = (x.unflatten(2, (count, size)) for x in (q, k, v))
        log_decay = log_decay if constant else log_decay.unflatten(2, (count, size))
        return linear_recurrence_fork(q, k, v, log_decay, block, state)

    agree(fork, fork, operands)  # float64 runs in torch
    if size < 10:
        agree(lambda *x: fork(*x[:4]), lambda *x: fork(*x[:4]), operands)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("reset", [None, [False, True]])
def test_triton_step(shared, reset):
    operands = triton_operands(2, 1 + shared, True, 1, 20 if shared else 70, 17, shared)
    reset = None if reset is None else torch.tensor(reset, device=DEVICE)

    def step(q, k, v, log_decay, state):
        log_decay = log_decay if shared else log_decay[:, :, 0]
        y, state = linear_recurrence_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], log_decay, state, reset)
        return y[:, :, None], state

    agree(step, lambda *x: reference(*x, None if reset is None else reset[:, None]), operands)


def test_triton_takes_operands_as_they_lie():
    """Heads behind time, widths cut out of wider rows, a stride between columns, gradients expanded from one number."""
    q, k, v, log_decay, state = (x.detach() for x in triton_operands(1, 2, True, 12, 6, 6, False))
    v = torch.cat((v, v.flip(-1)), -1)
    v, log_decay, state = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (v, log_decay, state))
    operands = [torch.cat((q, k), -1), v, log_decay, state]

    def twice(mixed, v, log_decay, state):
        y, state = linear_recurrence(mixed[..., :6], mixed[..., 6:].contiguous(), v[..., :6], log_decay, state, None, 6)
        z, state = linear_recurrence(mixed[..., ::2], mixed[..., 1::2], v[..., ::2], log_decay, state, None, 6)
        return (y.sum() + z.sum())[None], state

    gradients = []
    for name in ("torch", "triton"):
        for operand in operands:
            operand.requires_grad_().grad = None
        with using(name):
            total, after = twice(*operands)
        (total.sum() + after.sum()).backward()
        gradients.append([after, *(operand.grad for operand in operands)])
    for want, got in zip(*gradients, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("chunk", [40, 64])
@pytest.mark.parametrize("tile", range(3))
def test_triton_with_bfloat16_operands(chunk, tile):
    operands = triton_operands(1, 2, True, 64, 20, 18, False, torch.bfloat16)
    with tiles.using(tile), torch.autocast(DEVICE.type, torch.bfloat16):
        agree(lambda *x: linear_recurrence(*x, chunk=chunk), reference, operands, 2e-2)


def test_triton_gradient_of_decays_keeps_its_digits():
    """What no decay touches, each element's own share, is by far the largest and must not come in rounded."""
    q, k, v, _, _ = triton_operands(1, 1, True, 40, 16, 16, False, torch.bfloat16)
    log_decay = torch.full((1, 1, 40), -8.0, device=DEVICE, requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, log_decay)]
    (want,) = torch.autograd.grad(reference(*exact)[0].sum(), exact[3])
    with using("triton"):
        y, _ = linear_recurrence(q, k, v, log_decay, chunk=20)
    (got,) = torch.autograd.grad(y.sum(), log_decay)
    assert (got - want).abs().max() <= 5e-3 * want.abs().max()


def test_triton_strong_decay_stays_finite():
    """Log decays sum up to -5,120 in a chunk; their float32 sums are right to 1e-4."""
    q, k, v, log_decay, state = triton_operands(1, 1, True, 96, 4, 4, False)
    log_decay = torch.where(torch.arange(96, device=DEVICE) % 3 == 0, log_decay.detach(), -160.0).requires_grad_()
    agree(lambda *x: linear_recurrence(*x[:4], chunk=48), lambda *x: reference(*x[:4]), [q, k, v, log_decay], 1e-3)
