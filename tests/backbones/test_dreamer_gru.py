"""Dreamer's GRU's own promises: its equations, gradients, a width of its own for what goes in, float32 sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from wmcli.backbones import BackboneSize, build, map_state
from wmcli.backbones.dreamer_gru import DreamerGRU, DreamerGRUSettings
from wmcli.backbones.gru import GRUSettings

B, T, INPUTS, D = 3, 7, 5, 8


def small(
    inputs: int = INPUTS, layers: int = 2, dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> DreamerGRU:
    torch.manual_seed(0)
    settings = DreamerGRUSettings(input_width=inputs, norm_eps=0.05)
    model = DreamerGRU(settings, BackboneSize(D, layers, dropout, 0, 3)).to(dtype).eval()
    with torch.no_grad():  # norms other than they begin
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def resets() -> torch.Tensor:
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, 0] = reset[1, 2] = reset[1, 3] = reset[2, T - 1] = True
    return reset


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("inputs", [0, INPUTS])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("with_resets", [False, True])
def test_it_equals_the_equations_written_out(inputs, layers, with_resets):
    """In numpy, element by element, from r, c, u = LN(W [h; x])."""
    model = small(inputs, layers)
    x, reset = torch.randn(B, T, inputs or D, dtype=torch.float64), resets()
    start = tuple(torch.randn_like(state) for state in model.initial_state(B))
    u, ends = x.numpy(), []
    for cell, begin in zip(model.cells, start, strict=True):
        matrix, scale, shift = (p.detach().numpy() for p in (cell.gates.weight, cell.norm.weight, cell.norm.bias))
        h, outputs = begin.numpy(), []
        for t in range(T):
            if with_resets:
                h = h * ~reset.numpy()[:, t, None]
            z = np.concatenate([h, u[:, t]], 1) @ matrix.T
            z = (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 0.05) * scale + shift
            r, c, gate = z[:, :D], z[:, D : 2 * D], sigmoid(z[:, 2 * D :] - 1)
            h = gate * np.tanh(sigmoid(r) * c) + (1 - gate) * h
            outputs.append(h)
        u = np.stack(outputs, 1)
        ends.append(torch.from_numpy(h))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            y, state = model(x, start, reset if with_resets else None)
        assert_close(y, torch.from_numpy(u), rtol=0, atol=1e-12)
        assert_close(state, tuple(ends), rtol=0, atol=1e-12)


def test_gradients_equal_those_of_the_loop():
    """Its gradient is written by hand: of inputs, state and parameters it is that of the equations in torch."""
    model, reset = small(layers=1), resets()
    cell = model.cells[0]
    x = torch.randn(B, T, INPUTS, dtype=torch.float64, requires_grad=True)
    start = torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(B, T, D, dtype=torch.float64)
    h, outputs = start, []
    for t in range(T):
        h = torch.where(reset[:, t, None], 0.0, h)
        r, c, u = cell.norm(cell.gates(torch.cat((h, x[:, t]), 1))).chunk(3, 1)
        u = torch.sigmoid(u - 1)
        h = u * torch.tanh(torch.sigmoid(r) * c) + (1 - u) * h
        outputs.append(h)
    arguments = [x, start, *model.parameters()]
    want = torch.autograd.grad((torch.stack(outputs, 1) * weights).sum(), arguments)
    got = torch.autograd.grad((model(x, (start,), reset)[0] * weights).sum(), arguments)
    assert_close(got, want, rtol=0, atol=1e-11)


def test_elements_of_another_width_go_in_by_every_way():
    model = small()
    assert model.inputs == INPUTS != model.width == D
    x, queries = torch.randn(B, 6, INPUTS, dtype=torch.float64), torch.randn(2, INPUTS, dtype=torch.float64)
    want, end = model(x, model.initial_state(B))
    state, outputs = model.initial_state(B), []
    for element in x.unbind(1):
        y, state = model.step(element, state)
        outputs.append(y)
    assert_close((torch.stack(outputs, 1), state), (want, end), rtol=0, atol=1e-12)
    y, answers, after = model.fork(x.unflatten(1, (2, 3)), queries, model.initial_state(B))
    assert_close((y, after), (want[:, 2::3], end), rtol=0, atol=1e-12)
    for n in (1, 2):
        prefix = torch.cat((x[:, : 3 * n], queries.expand(B, -1, -1)), 1)
        assert_close(answers[:, n - 1], model(prefix, None)[0][:, -2:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("width", "inputs", "layers"), [(2048, 1000, 1), (512, 0, 1), (64, 40, 3)])
def test_parameter_counts(width, inputs, layers):
    settings = DreamerGRUSettings(width=width, layers=layers, input_width=inputs)
    with torch.device("meta"):
        model = build(settings, 1, 1)
    widths = [inputs or width] + [width] * (layers - 1)
    assert sum(p.numel() for p in model.parameters()) == sum(3 * width * (each + width) + 6 * width for each in widths)
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
    assert model.inputs == widths[0] and model.width == width and model.max_length is None
    assert [state.shape for state in model.initial_state(3)] == [(3, width)] * layers
    assert {cell.norm.eps for cell in model.cells} == {1e-3}


def test_initialization():
    """As Dreamer's other layers: a truncated normal of variance 2 / (fan in + fan out)."""
    cell = DreamerGRU(DreamerGRUSettings(input_width=100), BackboneSize(200, 1, 0.0, 0, 3)).cells[0]
    deviation = (2 / (300 + 600)) ** 0.5
    assert cell.gates.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert cell.gates.weight.abs().max() < 2.3 * deviation
    assert (cell.norm.weight == 1).all() and not cell.norm.bias.any()


def test_other_backbones_have_equal_input_and_output_widths():
    assert build(GRUSettings(width=24), 1, 1).inputs == 24


def test_detached_chunks_give_the_values_of_one_pass_and_no_gradient_across():
    """Truncated backpropagation through time: the state goes on, the gradient does not."""
    model, x = small(), torch.randn(B, T, INPUTS, dtype=torch.float64, requires_grad=True)
    _, state = model(x[:, :4], model.initial_state(B))
    y, _ = model(x[:, 4:], map_state(torch.Tensor.detach, state))
    assert_close(y, model(x, None)[0][:, 4:], rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert not gradient[:, :4].any() and (gradient[:, 4:].abs().amax(-1) > 0).all()


def test_under_autocast_only_products_are_rounded_and_no_error_builds_up():
    torch.manual_seed(0)
    model = DreamerGRU(DreamerGRUSettings(input_width=24), BackboneSize(64, 1, 0.0, 0, 3))
    x = torch.randn(4, 300, 24)
    want = model(x, None)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got, (state,) = model(x, model.initial_state(4))
    assert got.dtype == state.dtype == torch.float32 and not torch.equal(got, want)
    error = (got - want).square().mean((0, 2)).sqrt()
    assert (error < 0.01 * want.square().mean().sqrt()).all()
    assert error[-100:].mean() < 1.5 * error[10:110].mean()


def test_a_single_element_is_float32_under_autocast_unless_its_weights_are_not():
    model, x = small(dtype=torch.float32), torch.randn(B, INPUTS)
    state = tuple(torch.randn(B, D) for _ in model.cells)
    want = model.step(x, state)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model.step(x, state), want, rtol=0, atol=0)
        for cell in model.cells:
            cell.gates.weight.data = cell.gates.weight.data.to(torch.bfloat16)
        lowered = model.step(x, state)
    assert_close(lowered, want, rtol=0, atol=0.03)
    assert not torch.equal(lowered[0], want[0]) and lowered[0].dtype == torch.float32


def test_frozen_weights_give_the_bits_of_autocast():
    """Weights kept in bfloat16 are those that autocast makes of them."""
    model, x = small(dtype=torch.float32), torch.randn(B, T, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x, model.initial_state(B), resets())
        for cell in model.cells:
            cell.gates.weight.data = cell.gates.weight.data.to(torch.bfloat16)
        assert_close(model(x, model.initial_state(B), resets()), want, rtol=0, atol=0)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_under_autocast_are_close(inside):
    """Those of float32 parameters are float32, wherever backward is called."""
    model, x = small(dtype=torch.float32), torch.randn(B, T, INPUTS)
    parameters = list(model.parameters())
    want = torch.autograd.grad(model(x, None)[0].square().sum(), parameters)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, None)[0].square().sum()
        if inside:
            got = torch.autograd.grad(loss, parameters)
    if not inside:
        got = torch.autograd.grad(loss, parameters)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.03 * other.norm()


def test_old_states_stay_valid():
    model, x = small(), torch.randn(B, T, INPUTS, dtype=torch.float64)
    with torch.no_grad():
        _, state = model(x, model.initial_state(B))
        kept = tuple(leaf.clone() for leaf in state)
        model(x, state, resets())
        model.step(x[:, 0], state, torch.ones(B, dtype=torch.bool))
        model.fork(x[:, None], x[0, :2], state)
        assert_close(state, kept, rtol=0, atol=0)


def test_dropout_falls_between_the_layers_alone():
    x = torch.randn(B, T, INPUTS, dtype=torch.float64)
    single = small(layers=1, dropout=0.5).train()
    assert torch.equal(single(x, None)[0], single(x, None)[0])
    double = small(layers=2, dropout=0.5).train()
    _, (first, second) = double(x, double.initial_state(B))
    _, (same, other) = double(x, double.initial_state(B))
    assert torch.equal(first, same) and not torch.equal(second, other)
