"""The causal convolution against its definition and against torch's, on sizes that are all different.

Axes: B batch, C channels, W taps, T time, N blocks.
"""

from __future__ import annotations

import pytest
import torch
from gpus import DEVICE
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.kernels import causal_conv as module
from wmcli.kernels.causal_conv import causal_conv, causal_conv_fork, causal_conv_step, reference
from wmcli.kernels.dispatch import using

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


# -- Triton ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that few elements see their borders."""
    monkeypatch.setattr(module, "ROWS", 4)


def gradients(form, arguments):
    """The results of a form and the gradients of all its arguments, in float64."""
    y, state = form(*arguments)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)
    loss = (weights * y).sum() + state.double().square().sum()
    given = [argument for argument in arguments if argument is not None]
    return [value.double() for value in (y, state, *torch.autograd.grad(loss, given))]


def check_triton(form, arguments, definition=None) -> None:
    """Float32 on the device against float64 in the definition (or the same form in torch)."""
    copies = [
        None if argument is None else argument.detach().to(DEVICE, torch.float32).requires_grad_()
        for argument in arguments
    ]
    wide = [None if argument is None else argument.requires_grad_() for argument in arguments]
    with using("triton"):
        got = [value.cpu() for value in gradients(form, copies)]
    assert_close(got, gradients(definition or form, wide), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "taps"), [(1, 4), (2, 4), (6, 2), (7, 4)])
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_triton_equals_the_definition(length, taps, with_reset, with_state, small):
    x, weight, bias, state = operands(length, taps)
    reset = resets(length) if with_reset else None

    def convolve(form):
        return lambda *given: form(*given, None if reset is None else reset.to(given[0].device))

    check_triton(convolve(causal_conv), [x, weight, bias, state if with_state else None], convolve(reference))


def test_triton_equals_the_definition_in_tiles_of_their_true_size():
    torch.manual_seed(0)
    channels = module.CHANNELS + 1
    shapes = (B, module.ROWS + 1, channels), (channels, W), (channels,), (B, channels, W - 1)
    check_triton(causal_conv, [torch.randn(shape, dtype=torch.float64) for shape in shapes], reference)


@pytest.mark.parametrize(("block", "queries"), [(1, 0), (1, 2), (2, 4), (5, 1)])
@pytest.mark.parametrize("with_state", [False, True])
def test_triton_forks_as_torch_does(block, queries, with_state, small):
    x, weight, bias, state = operands(3 * (block + queries))

    def fork(x, weight, bias, state):
        return causal_conv_fork(x.unflatten(1, (3, -1)), weight, bias, block, state)

    check_triton(fork, [x, weight, bias, state if with_state else None])


def test_triton_steps_equal_the_definition(small):
    x, weight, bias, state = operands(6)
    flags = resets(6)

    def steps(x, weight, bias, state):
        outputs = []
        for t in range(6):
            y, state = causal_conv_step(x[:, t], weight, bias, state, flags[:, t].to(x.device))
            outputs.append(y)
        return torch.stack(outputs, 1), state

    check_triton(steps, [x, weight, bias, state], lambda *given: reference(*given, flags))


@pytest.mark.parametrize("wanted", [range(4), (0, 3), (1,)])
def test_both_forms_give_gradients_of_the_same_dtypes_to_the_same_arguments(wanted, small):
    """The operands as a backbone under autocast has them: x is a part of a projection's output."""
    results = []
    for form in ("torch", "triton"):
        x, *others = (operand.float().to(DEVICE) for operand in operands())
        arguments = [torch.cat((x, x), 2).bfloat16().chunk(2, 2)[0].detach(), *others]
        for i in wanted:
            arguments[i].requires_grad_()
        with using(form), torch.autocast(DEVICE.type, torch.bfloat16):
            y, state = causal_conv(*arguments)
            (y.float().square().mean() + state.square().mean()).backward()
        grads = [argument.grad for argument in arguments]
        assert [i for i, grad in enumerate(grads) if grad is not None] == list(wanted)
        results.append([y, state, *(grads[i] for i in wanted)])
    for got, want in zip(results[1], results[0], strict=True):
        assert got.dtype == want.dtype
        assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
