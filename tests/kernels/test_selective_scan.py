"""The selective scan against its definition, on sizes that are all different.

Axes: B batch, T time, C channels, S numbers of a channel's state, N blocks.
"""

from __future__ import annotations

import math

import pytest
import torch
from gpus import DEVICE
from torch.testing import assert_close

from wmcli.kernels import selective_scan as module
from wmcli.kernels import tiles
from wmcli.kernels.dispatch import using
from wmcli.kernels.selective_scan import (
    CHUNK,
    reference,
    selective_scan,
    selective_scan_fork,
    selective_scan_step,
)

B, C, S, T = 2, 3, 4, 37
assert CHUNK < T, "the lengths here must cross the border of a chunk"


def operands(length: int = T, dtype=torch.float64):
    torch.manual_seed(0)
    x, b, c = (torch.randn(B, length, size, dtype=torch.float64) for size in (C, S, S))
    dt = torch.rand(B, length, C, dtype=torch.float64)
    a, state = -2 * torch.rand(C, S, dtype=torch.float64), torch.randn(B, C, S, dtype=torch.float64)
    return [operand.to(dtype) for operand in (x, dt, a, b, c, state)]


def resets(length: int = T) -> torch.Tensor:
    reset = torch.zeros(B, length, dtype=torch.bool)
    reset[0, [at for at in (0, 5, CHUNK, CHUNK + 1) if at < length]] = True
    reset[1, -1] = True
    return reset


def close(got, want) -> None:
    assert_close(got, want, rtol=0, atol=1e-12)


def test_golden():
    """One channel, two decays, steps of ln 2: what is left of the state is halved, and quartered."""
    x = torch.tensor([1.0, 0.0, 0.0])[None, :, None]
    dt, a, ones = torch.full((1, 3, 1), math.log(2)), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 3, 2)
    for form in (reference, selective_scan):
        y, _ = form(x, dt, a, ones, ones)
        assert y.flatten().tolist() == pytest.approx([1.386294, 0.519860, 0.216608], abs=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 37, 128])
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_the_definition(length, with_reset, with_state):
    *sequence, state = operands(length)
    start, reset = state if with_state else None, resets(length) if with_reset else None
    close(selective_scan(*sequence, start, reset), reference(*sequence, start, reset))


def test_steps_equal_the_definition():
    x, dt, a, b, c, state = operands()
    want, want_state = reference(x, dt, a, b, c, state, resets())
    for t in range(T):
        y, state = selective_scan_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state, resets()[:, t])
        close(y, want[:, t])
    close(state, want_state)


@pytest.mark.parametrize("block", [1, 6, CHUNK + 3])
@pytest.mark.parametrize("queries", [0, 1, 2])
@pytest.mark.parametrize("with_state", [False, True])
def test_fork_commits_only_the_block(block, queries, with_state):
    *sequence, state = operands(3 * (block + queries))
    x, dt, b, c = (sequence[i].unflatten(1, (3, -1)) for i in (0, 1, 3, 4))
    a = sequence[2]
    state = state if with_state else None
    got, got_state = selective_scan_fork(x, dt, a, b, c, block, state)
    for n in range(3):
        close(got[:, n], reference(x[:, n], dt[:, n], a, b[:, n], c[:, n], state)[0])
        _, state = reference(
            *(part[:, n, :block] for part in (x, dt)), a, *(part[:, n, :block] for part in (b, c)), state
        )
    close(got_state, state)


@pytest.mark.parametrize("cached", [module.CACHED, 1])
def test_gradients_equal_those_of_the_definition(cached, monkeypatch):
    """Over several chunks, from the outputs and the last state, to every argument; rows together or one by one."""
    monkeypatch.setattr(module, "CACHED", cached)
    gradients = []
    for form in (selective_scan, reference):
        arguments = [operand.requires_grad_() for operand in operands()]
        y, state = form(*arguments, resets())
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
        gradients.append(torch.autograd.grad((weights * y).sum() + state.square().sum(), arguments))
    close(*gradients)


def test_gradients_equal_finite_differences():
    arguments = [operand.requires_grad_() for operand in operands(7)]
    reset = torch.zeros(B, 7, dtype=torch.bool)
    reset[1, 3] = True
    assert torch.autograd.gradcheck(lambda *o: selective_scan(*o, reset), arguments)
    x, dt, a, b, c, state = operands(8)
    x, dt, b, c = (operand.unflatten(1, (2, 4)) for operand in (x, dt, b, c))

    def fork(x, dt, a, b, c, state):
        return selective_scan_fork(x, dt, a, b, c, 3, state)

    assert torch.autograd.gradcheck(fork, [operand.requires_grad_() for operand in (x, dt, a, b, c, state)])


def test_large_steps_stay_finite():
    """Exponents sum up to -40,960."""
    x, _, _, b, c, state = operands(256, torch.float32)
    dt, a = torch.full_like(x, 10.0), torch.full((C, S), -16.0)
    arguments = [operand.requires_grad_() for operand in (x, dt, a, b, c, state)]
    y, after = selective_scan(*arguments)
    gradients = torch.autograd.grad(y.square().sum() + after.square().sum(), arguments)
    assert all(value.isfinite().all() for value in (y, after, *gradients))


def test_tensors_saved_for_the_backward_pass():
    """Less than one state per element: the states at the ends of chunks, besides the arguments."""
    arguments = [operand.requires_grad_() for operand in operands(128)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        selective_scan(*arguments)
    storages = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in kept}
    assert sum(storages.values()) <= sum(operand.numel() for operand in arguments) + B * (128 // CHUNK) * C * S


def test_bfloat16_operands_keep_a_float32_state():
    sequence = operands(dtype=torch.float32)
    state = sequence.pop()
    want, want_state = selective_scan(*sequence, state)
    x, dt, a, b, c = sequence
    low = [x.bfloat16(), dt, a, b.bfloat16(), c.bfloat16()]
    with torch.autocast("cpu", torch.bfloat16):
        y, after = selective_scan(*low, state)
        at_once = [operand if operand is a else operand[:, 0] for operand in low]
        y_step, after_step = selective_scan_step(*at_once, state)
    assert y.dtype == y_step.dtype == torch.bfloat16 and after.dtype == after_step.dtype == torch.float32
    assert (y.float() - want).abs().max() < 2e-2 * want.abs().max()
    assert (after - want_state).abs().max() < 1e-2 * want_state.abs().max()


def test_autocast_changes_nothing_in_float32():
    """Neither forward nor in a backward pass that runs under it."""
    results = []
    for enabled in (False, True):
        arguments = [operand.requires_grad_() for operand in operands(dtype=torch.float32)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, state = selective_scan(*arguments)
            gradients = torch.autograd.grad(y.square().sum() + state.square().sum(), arguments)
        results.append((y, state, *gradients))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


# -- Triton ------------------------------------------------------------------------------------------------------------


def gradients(form, arguments):
    """The results of a form and the gradients of all its arguments that want one, in float64."""
    y, state = form(*arguments)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)
    loss = (weights * y).sum() + state.double().square().sum()
    wanted = [argument for argument in arguments if argument is not None and argument.requires_grad]
    return [value.double() for value in (y, state, *torch.autograd.grad(loss, wanted))]


def in_triton(form, arguments):
    """The same of float32 copies of float64 arguments, on the device, in Triton."""
    copies = [
        None if argument is None else argument.detach().to(DEVICE, torch.float32).requires_grad_()
        for argument in arguments
    ]
    with using("triton"):
        return [value.cpu() for value in gradients(form, copies)]


@pytest.fixture
def small(monkeypatch):
    """Short pieces and few channels to a program: few elements, and a quick test, see the borders of both."""
    monkeypatch.setattr(module, "TILES", ((3, 4, 64),))


def wide_operands(length: int, channels: int = 5, width: int = 3):
    """b and c are rows of one projection, as in a backbone."""
    torch.manual_seed(1)
    x, rows = torch.randn(B, length, channels).double(), torch.randn(B, length, 2 * width + 3).double()
    b, c = rows.split((width, width, 3), -1)[:2]
    dt, a = torch.rand(B, length, channels).double(), -2 * torch.rand(channels, width).double()
    return [x, dt, a, b, c, torch.randn(B, channels, width).double()]


def check_triton(length, with_state, with_reset, **sizes):
    arguments = [operand.requires_grad_() for operand in wide_operands(length, **sizes)]
    arguments[5] = arguments[5] if with_state else None
    reset = resets(length) if with_reset else None

    def scan(form):
        return lambda *operands: form(*operands, None if reset is None else reset.to(operands[0].device))

    got, want = in_triton(scan(selective_scan), arguments), gradients(scan(reference), arguments)
    assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize(("with_state", "with_reset"), [(True, False), (False, True), (True, True)])
def test_triton_equals_the_definition(length, with_state, with_reset, small):
    check_triton(length, with_state, with_reset)


@pytest.mark.parametrize("tile", range(len(module.TILES)))
def test_triton_equals_the_definition_in_programs_of_their_true_size(tile):
    chunk, channels, _ = module.TILES[tile]
    with tiles.using(tile):
        check_triton(chunk + 1, True, False, channels=channels + 1, width=16)


@pytest.mark.parametrize(("block", "queries"), [(1, 0), (1, 2), (4, 0), (4, 1), (2, 4)])
@pytest.mark.parametrize("with_state", [False, True])
def test_triton_forks_as_torch_does(block, queries, with_state, small):
    """Gradients too, which go through the states at the ends of blocks."""
    *arguments, state = wide_operands(2 * (block + queries), channels=3)
    arguments = [argument if i == 2 else argument.unflatten(1, (2, -1)) for i, argument in enumerate(arguments)]
    arguments = [argument.requires_grad_() for argument in (*arguments, state)]
    arguments[5] = arguments[5] if with_state else None

    def fork(x, dt, a, b, c, state):
        return selective_scan_fork(x, dt, a, b, c, block, state)

    assert_close(in_triton(fork, arguments), gradients(fork, arguments), rtol=1e-5, atol=1e-5)


def test_triton_steps_equal_the_definition(small):
    arguments = [operand.requires_grad_() for operand in wide_operands(3)]
    flags = resets(3)

    def steps(x, dt, a, b, c, state):
        outputs = []
        for t in range(3):
            flag = flags[:, t].to(x.device)
            y, state = selective_scan_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state, flag)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    want = gradients(lambda *operands: reference(*operands, flags), arguments)
    assert_close(in_triton(steps, arguments), want, rtol=1e-5, atol=1e-5)


def test_few_launches(monkeypatch):
    launches = []
    monkeypatch.setattr(module._Launch, "run", lambda *arguments: launches.append(arguments))
    x, dt, a, b, c, state = (operand.to(DEVICE, torch.float32) for operand in operands(12))
    with using("triton"):
        selective_scan_step(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], state)
        assert len(launches) == 1
        selective_scan(x, dt, a, b, c, state)
        assert len(launches) == 2
        selective_scan_fork(*(o if o is a else o.unflatten(1, (3, 4)) for o in (x, dt, a, b, c)), 3, state)
        assert len(launches) == 4


@pytest.mark.parametrize("wanted", [range(6), (0, 5), (2,)])
def test_both_forms_give_gradients_of_the_same_dtypes_to_the_same_arguments(wanted, small):
    """The operands as a backbone under autocast has them."""
    dtypes = torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32
    results = []
    for form in ("torch", "triton"):
        arguments = [operand.to(DEVICE, dtype) for operand, dtype in zip(wide_operands(5), dtypes, strict=True)]
        for i in wanted:
            arguments[i].requires_grad_()
        with using(form), torch.autocast(DEVICE.type, torch.bfloat16):
            y, state = selective_scan(*arguments)
            (y.float().square().mean() + state.square().mean()).backward()
        grads = [argument.grad for argument in arguments]
        assert [i for i, grad in enumerate(grads) if grad is not None] == list(wanted)
        results.append([y, state, *(grads[i] for i in wanted)])
    for got, want in zip(results[1], results[0], strict=True):
        assert got.dtype == want.dtype
        assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def test_large_steps_stay_finite_in_triton():
    x, _, _, b, c, state = operands(9)
    arguments = [x, torch.full_like(x, 10.0), torch.full((C, S), -16.0), b, c, state]
    assert all(value.isfinite().all() for value in in_triton(selective_scan, arguments))
