"""S4D's own numbers: golden kernels, discretization by other means, initialization, sizes, lengths, precision.

What it shares with S4, such as when systems are prepared anew, is tested with S4.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from wmcli.backbones import BackboneSize, build
from wmcli.backbones.s4 import hippo_legs, legs_input
from wmcli.backbones.s4d import S4D, DiagonalSystems, S4DSettings, build_system
from wmcli.errors import UsageError
from wmcli.kernels import s4 as kernels
from wmcli.kernels.dispatch import using

METHODS = ("zoh", "bilinear")


def small(length: int = 30, **settings) -> S4D:
    torch.manual_seed(0)
    return S4D(S4DSettings(**{"state_size": 8, "ffn": 1, **settings}), BackboneSize(6, 2, 0.0, length, 1)).eval()


def inputs(*shape: int, dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(*shape, dtype=dtype)


def drawn(method: str) -> tuple[DiagonalSystems, list[torch.Tensor]]:
    """One layer of three channels with 4 pairs, in float64, and its parameters."""
    torch.manual_seed(0)
    log_dt, decay, frequency = -2 - torch.rand(3), torch.randn(1, 4), 5 * torch.randn(1, 4)
    parameters = [each.double() for each in (log_dt, decay, frequency, torch.randn(1, 4, 2), torch.randn(3, 4, 2))]
    return systems(parameters, method, 50), parameters


def systems(parameters: list[torch.Tensor], method: str, length: int) -> DiagonalSystems:
    return DiagonalSystems(
        lambda *parts: build_system(*parts, discretization=method), [[each] for each in parameters], length
    )


def impulse(length: int, channels: int, dtype=torch.float64) -> torch.Tensor:
    return torch.nn.functional.pad(torch.ones(1, 1, channels, dtype=dtype), (0, 0, 0, length - 1))


# -- kernels -----------------------------------------------------------------------------------------------------------

GOLDEN = {
    "zoh": [0.387011209, 0.350341188, 0.300984953, 0.244020162, 0.184808924, 0.128456684],
    "bilinear": [0.385766598, 0.349877232, 0.301444902, 0.245362496, 0.186828387, 0.130826824],
}


@pytest.mark.parametrize("method", METHODS)
def test_golden_kernels(method):
    """S4D-Lin of four numbers with dt = 0.1 and C = 1, from how the layer is initialized."""
    model = small(state_size=4)
    log_dt, decay, frequency, b, c = model.blocks[0].layers[0].system.double().tensors()
    log_dt, c = torch.full_like(log_dt, math.log(0.1)), torch.tensor([1.0, 0.0]).expand_as(c).double()
    frequency = (frequency / math.pi).round() * math.pi  # which float32 had rounded
    made = systems([log_dt, torch.full_like(decay, math.log(0.5)), frequency, b, c], method, 6)
    for kernel in (
        made.convolve(0, impulse(6, 6)),
        made.run(0, impulse(6, 6), torch.zeros(1, 6, 4, dtype=torch.float64))[0],
    ):
        assert kernel[0, :, 3].tolist() == pytest.approx(GOLDEN[method], abs=1e-9)


def test_zero_order_hold_is_the_matrix_exponential():
    """Of [[A, B], [0, 0]] dt: with the input held, the state after dt."""
    made, (log_dt, decay, frequency, b, _) = drawn("zoh")
    operators = made.step_operators(0)
    poles, b = torch.complex(-decay.exp(), frequency)[0], torch.view_as_complex(b)[0]
    for channel, dt in enumerate(log_dt.exp()):
        for m in range(4):
            held = torch.zeros(2, 2, dtype=torch.complex128)
            held[0, 0], held[0, 1] = poles[m], b[m]
            after = torch.linalg.matrix_exp(dt * held)[0]
            assert_close(operators.diagonal[channel, m], after[0])
            assert_close(torch.view_as_complex(operators.input[channel].view(4, 2))[m], after[1])


def test_the_bilinear_kernel_is_that_of_s4_without_its_rank_one_part():
    """By Cauchy sums, from C~."""
    made, (log_dt, decay, frequency, b, c) = drawn("bilinear")
    poles, b, c = torch.complex(-decay.exp(), frequency), torch.view_as_complex(b), torch.view_as_complex(c)
    system = kernels.System(log_dt.exp(), poles, torch.zeros_like(poles), b)
    c_tilde = c * (1 - kernels.discretize(system).diagonal ** 50)
    want = kernels.kernel(system, c_tilde, 50)
    assert_close(made.convolve(0, impulse(50, 3))[0].mT, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_the_kernel_is_the_recurrence(method):
    """One element after the other, in numbers of its own."""
    made, (log_dt, decay, frequency, b, c) = drawn(method)
    poles, b, c = torch.complex(-decay.exp(), frequency), torch.view_as_complex(b), torch.view_as_complex(c)
    dt = log_dt.exp()[:, None]
    if method == "zoh":
        a, into = (dt * poles).exp(), ((dt * poles).exp() - 1) / poles * b
    else:
        a, into = (1 + dt / 2 * poles) / (1 - dt / 2 * poles), dt * b / (1 - dt / 2 * poles)
    u, x, want = inputs(2, 50, 3), torch.zeros(2, 3, 4, dtype=torch.complex128), []
    for t in range(50):
        x = a * x + into * u[:, t, :, None]
        want.append(2 * (c * x).sum(-1).real)
    assert a.abs().max() < 1
    assert_close(made.convolve(0, u), torch.stack(want, 1), rtol=0, atol=1e-10)
    y, last = made.run(0, u, torch.zeros(2, 3, 8, dtype=torch.float64))
    assert_close(y, torch.stack(want, 1), rtol=0, atol=1e-10)
    assert_close(last, torch.view_as_real(x).flatten(-2), rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("initialization", ["lin", "legs"])
def test_float32_kernels_are_accurate(method, initialization):
    """As initialized with 64 numbers and the shortest to the longest step sizes, for any length."""
    torch.manual_seed(0)
    settings = S4DSettings(discretization=method, initialization=initialization)
    layer = S4D(settings, BackboneSize(5, 1, 0.0, 1000, 1)).blocks[0].layers[0].system
    with torch.no_grad():
        layer.log_dt.copy_(torch.linspace(math.log(1e-3), math.log(1e-1), 5))
    single = [each.detach() for each in layer.tensors()]
    for length in (8, 1000, 1001, 2000):
        got, want = (
            systems([each.to(dtype) for each in single], method, length).convolve(0, impulse(length, 5, dtype))
            for dtype in (torch.float32, torch.float64)
        )
        assert got.dtype == torch.float32
        assert ((got - want).abs().amax(1) / want.abs().amax(1)).max() < 5e-6


@pytest.mark.parametrize("reset", [False, True])
def test_a_step_in_triton_is_one_in_torch(reset):
    torch.manual_seed(0)
    made = systems([each.float() for each in drawn("zoh")[1]], "zoh", 50)
    u, state = torch.randn(4, 3), torch.randn(4, 3, 8)
    flags = torch.tensor([True, False, True, False]) if reset else None
    want = made.step(0, u, state, flags)
    with torch.no_grad(), using("triton"):
        got = made.step(0, u, state, flags)
    assert_close(got, want, rtol=1e-5, atol=1e-5)


# -- initialization and sizes ------------------------------------------------------------------------------------------


def test_parameter_counts():
    width, state = 256, 64
    model = build(S4DSettings(width=width, layers=2), 100, 1)
    norm, system = 2 * width, width + 2 * (state // 2) + state  # log_dt, the poles and B
    layer = norm + system + width * state + width + (width + 1) * 2 * width
    mlp = norm + (width + 1) * 4 * width + (4 * width + 1) * width
    assert sum(p.numel() for p in model.parameters()) == 2 * (2 * layer + mlp) + norm == 1_649_152
    assert sum(leaf.numel() for leaf in model.initial_state(1).layers) == 4 * width * state


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("initialization", ["lin", "legs"])
def test_initialization(initialization, tied):
    torch.manual_seed(0)
    model = S4D(S4DSettings(initialization=initialization, tied=tied), BackboneSize(512, 1, 0.0, 100, 1))
    system = model.blocks[0].layers[1].system
    rows = 1 if tied else 512
    frequency, b = math.pi * torch.arange(32), torch.ones(32, dtype=torch.complex128)
    if initialization == "legs":
        poles, p, _ = hippo_legs(64)
        frequency, b = poles.imag.float(), legs_input(p)
    assert_close(system.frequency, frequency.expand(rows, 32))
    assert_close(system.log_decay.exp(), torch.full((rows, 32), 0.5))
    assert_close(system.b, torch.view_as_real(b).float().expand(rows, 32, 2))
    assert system.c.square().mean((0, 1)).tolist() == pytest.approx([0.5, 0.5], rel=0.05)
    log_dt = system.log_dt.detach()
    assert math.log(1e-3) <= log_dt.min() < math.log(1.1e-3) and math.log(0.9e-1) < log_dt.max() <= math.log(1e-1)
    assert all(parameter.is_floating_point() for parameter in model.parameters())


def test_wrong_settings_are_usage_errors():
    with pytest.raises(UsageError, match=r"backbone.dt_min = 0.1: must not be above backbone.dt_max = 0.01"):
        small(dt_min=0.1, dt_max=0.01)
    with pytest.raises(ValueError, match="'zoh' or 'bilinear'"):
        S4DSettings(discretization="euler")


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_weights_serve_any_length():
    x = inputs(2, 90, 6)
    want = small(90).double()(x, None)[0]
    for length in (1, 7, 300):
        model = small(length)
        model.load_state_dict(small(90).state_dict())
        assert_close(model.double()(x, None)[0], want, rtol=0, atol=1e-10)
