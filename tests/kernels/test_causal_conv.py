"""The causal convolution against its definition and against torch's, on sizes that are all different.

Axes: B batch, C channels, W taps, T time, N blocks.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from wmcli.kernels.causal_conv import causal_conv, causal_conv_fork, causal_conv_step, reference

B, C, W, T = 2, 3, 4, 11


def operands(length: int = T, taps: int = W):
    torch.manual_seed(0)
    x, state = torch.randn(B, length, C, dtype=torch.float64), torch.randn(B, C, taps - 1, dtype=torch.float64)
    return x, torch.randn(C, taps, dtype=torch.float64), torch.randn(C, dtype=torch.float64), state


def resets(length: int = T) -> torch.Tensor:
    reset = torch.zeros(B, length, dtype=torch.bool)
    reset[0, [at for at in (0, 4, 5, 9) if at < length]] = True
    reset[1, -1] = True
    return reset


def close(got, want) -> None:
    assert_close(got, want, rtol=0, atol=1e-13)


def test_golden():
    x = torch.arange(1.0, 6.0)[None, :, None]
    weight, bias = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0.5])
    want = [4.5, 11.5, 20.5, 30.5, 40.5]
    y, state = causal_conv(x, weight, bias)
    assert y.flatten().tolist() == want and state.tolist() == [[[3.0, 4.0, 5.0]]]
    state = torch.zeros(1, 1, 3)
    for t in range(5):
        y, state = causal_conv_step(x[:, t], weight, bias, state)
        assert y.item() == want[t]


@pytest.mark.parametrize("taps", [2, 4])
def test_equals_torchs_convolution(taps):
    x, weight, bias, state = operands(taps=taps)
    for past in (torch.zeros_like(state), state):
        want = F.conv1d(torch.cat((past, x.mT), 2), weight[:, None], bias, groups=C).mT
        close(causal_conv(x, weight, bias, past)[0], want)
        close(reference(x, weight, bias, past)[0], want)
    close(causal_conv(x, weight, bias)[0], causal_conv(x, weight, bias, torch.zeros_like(state))[0])


@pytest.mark.parametrize("length", [1, 2, 3, 4, T])  # shorter than the taps reach, too
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_the_definition(length, with_reset, with_state):
    x, weight, bias, state = operands(length)
    start, reset = state if with_state else None, resets(length) if with_reset else None
    close(causal_conv(x, weight, bias, start, reset), reference(x, weight, bias, start, reset))


def test_steps_equal_the_definition():
    x, weight, bias, state = operands()
    want, want_state = reference(x, weight, bias, state, resets())
    for t in range(T):
        y, state = causal_conv_step(x[:, t], weight, bias, state, resets()[:, t])
        close(y, want[:, t])
    close(state, want_state)


@pytest.mark.parametrize("at", [0, 1, 5, 9, 10])
def test_behind_a_reset_nothing_is_left(at):
    x, weight, bias, state = operands()
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, at] = True
    y, after = causal_conv(x, weight, bias, state, reset)
    fresh, fresh_after = causal_conv(x[:1, at:], weight, bias)
    assert torch.equal(y[:1, at:], fresh) and torch.equal(after[:1], fresh_after)
    plain, plain_after = causal_conv(x, weight, bias, state)
    assert torch.equal(y[:1, :at], plain[:1, :at])
    assert torch.equal(y[1:], plain[1:]) and torch.equal(after[1:], plain_after[1:])


@pytest.mark.parametrize("block", [1, 2, 3, 5])
@pytest.mark.parametrize("queries", [0, 2, 4])
@pytest.mark.parametrize("with_state", [False, True])
def test_fork_commits_only_the_block(block, queries, with_state):
    x, weight, bias, state = operands(3 * (block + queries))
    x = x.unflatten(1, (3, -1))
    state = state if with_state else None
    got, got_state = causal_conv_fork(x, weight, bias, block, state)
    for n in range(3):
        close(got[:, n], reference(x[:, n], weight, bias, state)[0])
        _, state = reference(x[:, n, :block], weight, bias, state)
    close(got_state, state)


def test_gradients():
    arguments = [x.requires_grad_() for x in operands(6)]
    reset = torch.zeros(B, 6, dtype=torch.bool)
    reset[1, 2] = True
    assert torch.autograd.gradcheck(lambda *a: causal_conv(*a, reset), arguments, fast_mode=True)

    def fork(x, weight, bias, state):
        return causal_conv_fork(x.unflatten(1, (2, 3)), weight, bias, 2, state)

    assert torch.autograd.gradcheck(fork, arguments, fast_mode=True)


def test_bfloat16_inputs_keep_a_float32_state():
    x, weight, bias, state = (operand.float() for operand in operands())
    want, want_state = causal_conv(x, weight, bias, state)
    with torch.autocast("cpu", torch.bfloat16):
        whole = causal_conv(x.bfloat16(), weight, bias, state)
        step = causal_conv_step(x[:, 0].bfloat16(), weight, bias, state)
        fresh = causal_conv(x.bfloat16(), weight, bias)
    for y, after in (whole, step, fresh):
        assert y.dtype == torch.bfloat16 and after.dtype == torch.float32
    assert (whole[0].float() - want).abs().max() < 1e-2 * want.abs().max()
    assert (whole[1] - want_state).abs().max() < 1e-2 * want_state.abs().max()
