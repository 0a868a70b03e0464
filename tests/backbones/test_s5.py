"""S5's own numbers: the layer in the real basis of HiPPO, initialization, sizes, lengths.

What it shares with S4, such as when systems are prepared anew, is tested with S4.
"""

from __future__ import annotations

import math

import pytest
import torch
from draws import assert_deviation
from torch.testing import assert_close

from wmcli.backbones import BackboneSize, build
from wmcli.backbones.s4 import hippo_legs
from wmcli.backbones.s5 import S5, JointStateSpace, JointSystems, S5Settings, build_system
from wmcli.errors import UsageError
from wmcli.kernels.s4 import Resets


def small(length: int = 30, **settings) -> S5:
    torch.manual_seed(0)
    return S5(
        S5Settings(**{"state_size": 8, "blocks": 2, "ffn": 1, **settings}), BackboneSize(6, 2, 0.0, length, 1)
    ).eval()


def inputs(*shape: int) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(*shape, dtype=torch.float64)


def systems(*parameters: torch.Tensor) -> JointSystems:
    return JointSystems(build_system, [[each] for each in parameters], 1)


def test_half_the_pairs_are_the_real_system():
    """The normal part of HiPPO-LegS as a real matrix, its input held over a step: no complex number, nothing halved."""
    state, width, dt = 6, 3, 0.2
    odd = 2 * torch.arange(state, dtype=torch.float64) + 1
    root = (odd[:, None] * odd).sqrt()
    normal = (root.triu(1) - root.tril(-1)) / 2 - torch.eye(state, dtype=torch.float64) / 2
    into, out, u = inputs(state, width), inputs(width, state) - 0.3, inputs(2, 40, width) + 0.1
    held = torch.zeros(state + width, state + width, dtype=torch.float64)
    held[:state, :state], held[:state, state:] = normal, into
    after = torch.linalg.matrix_exp(dt * held)[:state]
    x, want = torch.zeros(2, state, dtype=torch.float64), []
    for t in range(40):
        x = x @ after[:, :state].mT + u[:, t] @ after[:, state:].mT
        want.append(x @ out.mT)

    poles, _, vectors = hippo_legs(state)
    b, c = vectors.mH @ into.to(vectors.dtype), out.to(vectors.dtype) @ vectors
    log_dt = torch.full((state // 2,), math.log(dt), dtype=torch.float64)
    parts = log_dt, (-poles.real).log(), poles.imag, torch.view_as_real(b.resolve_conj()), torch.view_as_real(c)
    made = systems(*parts)
    assert_close(made.convolve(0, u), torch.stack(want, 1), rtol=0, atol=1e-10)
    y, last = made.run(0, u, torch.zeros(2, state, dtype=torch.float64))
    assert_close(y, torch.stack(want, 1), rtol=0, atol=1e-10)
    back = 2 * (torch.view_as_complex(last.view(2, -1, 2)) @ vectors.mT).real
    assert_close(back, x, rtol=0, atol=1e-10)


def test_the_stack_as_the_paper_draws_it():
    """Figure 1 of S4WM, with one complex system a layer, element by element."""
    model = small(ffn=2).double()
    x = y = inputs(2, 7, 6)
    for block in model.blocks:
        for layer in block.layers:
            u, system = layer.norm(y), layer.system
            poles = torch.complex(-system.log_decay.exp(), system.frequency)
            b, c = torch.view_as_complex(system.b), torch.view_as_complex(system.c)
            a, h, filtered = (system.log_dt.exp() * poles).exp(), torch.zeros(2, 4, dtype=torch.complex128), []
            assert a.abs().max() < 1
            for t in range(7):
                h = a * h + (a - 1) / poles * (u[:, t].to(b.dtype) @ b.mT)
                filtered.append(2 * (h @ c.mT).real)
            mixed = layer.out(torch.nn.functional.gelu(torch.stack(filtered, 1) + layer.skip * u))
            y = y + mixed[..., :6] * mixed[..., 6:].sigmoid()
        y = y + block.down(torch.nn.functional.gelu(block.up(block.norm(y))))
    assert_close(model(x, None)[0], model.norm(y), rtol=0, atol=1e-10)


# -- initialization and sizes ------------------------------------------------------------------------------------------


def test_parameter_counts():
    width, state = 256, 64
    model = build(S5Settings(width=width, layers=2, state_size=state), 100, 1)
    norm, system = 2 * width, 3 * (state // 2) + 2 * width * state  # step sizes and poles, B and C
    layer = norm + system + width + (width + 1) * 2 * width
    mlp = norm + (width + 1) * 4 * width + (4 * width + 1) * width
    assert sum(p.numel() for p in model.parameters()) == 2 * (2 * layer + mlp) + norm == 1_713_536
    assert [leaf.shape for leaf in model.initial_state(3).layers] == [(3, state)] * 4


def test_initialization():
    torch.manual_seed(0)
    system = JointStateSpace(S5Settings(), BackboneSize(512, 1, 0.0, 100, 1))
    assert_close(system.frequency.view(8, 16), hippo_legs(32)[0].imag.float().expand(8, 16))
    assert_close(system.log_decay.exp(), torch.full((128,), 0.5))
    log_dt = system.log_dt.detach()
    assert math.log(1e-3) <= log_dt.min() < math.log(1.3e-3) and math.log(0.8e-1) < log_dt.max() <= math.log(1e-1)
    assert all(parameter.is_floating_point() for parameter in system.parameters())


def test_b_and_c_are_drawn_as_from_real_matrices_in_the_basis_of_the_eigenvectors():
    """All second moments over a row of B and a column of C, of a few thousand draws each."""
    torch.manual_seed(0)
    state, width = 8, 4000
    system = JointStateSpace(S5Settings(state_size=state, blocks=1), BackboneSize(width, 1, 0.0, 100, 1))
    vectors = hippo_legs(state)[2]
    real = torch.randn(state, width, dtype=torch.float64)
    for drawn, other in (
        (system.b.detach() * math.sqrt(state), vectors.mH @ real.to(vectors.dtype)),
        (system.c.detach().transpose(0, 1) * math.sqrt(state / 2), vectors.mT @ real.to(vectors.dtype)),
    ):
        other = torch.view_as_real(other.resolve_conj()).transpose(1, 2).flatten(0, 1)
        got = drawn.double().transpose(1, 2).flatten(0, 1)
        assert_close(got @ got.mT / width, other @ other.mT / width, rtol=0, atol=0.06)


def test_b_and_c_grow_with_no_width_and_shrink_with_the_state():
    """Means of |B|^2 and |C|^2: 1 / state and 2 / state, as lindermanlab/S5 draws them."""
    torch.manual_seed(0)
    for width, state in ((512, 256), (128, 512)):
        system = JointStateSpace(S5Settings(state_size=state), BackboneSize(width, 1, 0.0, 100, 1))
        assert_deviation(system.b, math.sqrt(1 / (2 * state)))
        assert_deviation(system.c, math.sqrt(1 / state))


def test_wrong_settings_are_usage_errors():
    with pytest.raises(UsageError, match=r"backbone.blocks = 3: twice that must divide backbone.state_size = 8"):
        small(blocks=3)
    with pytest.raises(UsageError, match=r"backbone.dt_min = 0.1: must not be above backbone.dt_max = 0.01"):
        small(dt_min=0.1, dt_max=0.01)


# -- lengths and resets ------------------------------------------------------------------------------------------------


def test_weights_serve_any_length():
    x = inputs(2, 90, 6)
    want = small(90).double()(x, None)[0]
    for length in (1, 300):
        assert_close(small(length).double()(x, None)[0], want, rtol=0, atol=0)


@pytest.mark.parametrize("carried", [False, True])
def test_two_episodes_in_a_row_are_two_rows(carried):
    """Even where the first one blew up."""
    model = small().double()
    made, u = model._systems(None), inputs(1, 40, 6)
    state = torch.full((1, 8), math.inf, dtype=torch.float64)
    resets = torch.zeros(1, 40, dtype=torch.bool)
    resets[0, 23] = True
    if carried:
        y, _ = made.run(0, u, state, Resets(resets))
        assert not y[:, :23].isfinite().any()
    else:
        y = made.convolve(0, u, Resets(resets))
    assert_close(y[:, 23:], made.convolve(0, u[:, 23:]), rtol=0, atol=1e-12)
    y, _ = made.step(0, u[:, 23], state, resets[:, 23])
    assert_close(y, made.convolve(0, u[:, 23:])[:, 0], rtol=0, atol=1e-12)
