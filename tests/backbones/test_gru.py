"""The GRU's own promises: its equations, sizes, one set of weights for both forms, float32 under autocast."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from wmcli.backbones import BackboneSize, build
from wmcli.backbones.gru import GRU, GRUSettings
from wmcli.backbones.residual import NORM_EPS

B, T, D, H = 3, 7, 8, 5


def small(hidden: int = H, dtype: torch.dtype = torch.float64) -> GRU:
    torch.manual_seed(0)
    model = GRU(GRUSettings(hidden_size=hidden), BackboneSize(D, 2, 0.0, 0, 3)).to(dtype).eval()
    with torch.no_grad():  # norms and biases other than they begin
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def resets() -> torch.Tensor:
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, 0] = reset[1, 2] = reset[1, 3] = reset[2, T - 1] = True
    return reset


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * weight


@pytest.mark.parametrize("hidden", [0, H])
@pytest.mark.parametrize("with_resets", [False, True])
def test_it_equals_the_equations_written_out(hidden, with_resets):
    """r, z = sigmoid(W u + U h + b), n = tanh(W u + b + r (U h + b)), h <- (1 - z) n + z h, element by element."""
    model, x, reset = small(hidden), torch.randn(B, T, D, dtype=torch.float64), resets()
    start = tuple(torch.randn_like(state) for state in model.initial_state(B))
    u, ends = x, []
    for layer, h in zip(model.layers, start, strict=True):
        gru, outputs = layer.mixer.gru, []
        w, b_w, v, b_v = gru.weight_ih_l0, gru.bias_ih_l0, gru.weight_hh_l0, gru.bias_hh_l0
        for t in range(T):
            if with_resets:
                h = h * ~reset[:, t, None]
            gates = [
                (rms_norm(u[:, t], layer.norm.weight) @ w_.T + b_w_, h @ v_.T + b_v_)
                for w_, b_w_, v_, b_v_ in zip(w.chunk(3), b_w.chunk(3), v.chunk(3), b_v.chunk(3), strict=True)
            ]
            r, z = (1 / (1 + (-sum(gate)).exp()) for gate in gates[:2])
            n = torch.tanh(gates[2][0] + r * gates[2][1])
            h = (1 - z) * n + z * h
            outputs.append(h)
        out = torch.stack(outputs, 1)
        u = u + (out if not hidden else out @ layer.mixer.out.weight.T + layer.mixer.out.bias)
        ends.append(h)
    y, state = model(x, start, reset if with_resets else None)
    assert_close(y, rms_norm(u, model.norm.weight), rtol=0, atol=1e-12)
    assert_close(state, tuple(ends), rtol=0, atol=1e-12)


def test_the_loop_and_the_fused_form_share_weights_and_gradients():
    """Without a reset that is set, both are the same function of the same parameters."""
    model, x = small(), torch.randn(B, T, D, dtype=torch.float64)
    gradients = []
    for reset in (None, torch.zeros(B, T, dtype=torch.bool)):
        y, _ = model(x, None, reset)
        gradients.append(torch.autograd.grad(y.square().sum(), list(model.parameters())))
    assert_close(gradients[0], gradients[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize(("width", "hidden", "layers"), [(512, 0, 2), (512, 640, 2), (16, 24, 4)])
def test_parameter_counts(width, hidden, layers):
    model = build(GRUSettings(width=width, layers=layers, hidden_size=hidden), 128, 1)
    h = hidden or width
    back = h * width + width if hidden else 0  # the Linear
    layer = 3 * h * (width + h) + 6 * h + back + width  # three gates with two biases each; the norm
    assert sum(p.numel() for p in model.parameters()) == layers * layer + width
    assert [state.shape for state in model.initial_state(3)] == [(3, h)] * layers


def test_the_recurrence_is_float32_under_autocast():
    """Without the Linear nothing else is left: every way through the model gives the same bits as without autocast."""
    model, x, reset = small(D, torch.float32), torch.randn(B, 6, D), resets()[:, :6]

    def run():
        y, state = model(x, model.initial_state(B))
        z, state = model(x, state, reset)
        v, state = model.step(x[:, 0], state, reset[:, 1])
        return (y, z, v, *model.fork(x.unflatten(1, (2, 3)), x[0, :2], state))

    want = run()
    with torch.autocast("cpu", torch.bfloat16):
        got = run()
    assert_close(got, want, rtol=0, atol=0)
    assert {state.dtype for state in got[-1]} == {torch.float32}


def test_old_states_stay_valid():
    model, x = small(), torch.randn(B, T, D, dtype=torch.float64)
    with torch.no_grad():
        _, state = model(x, model.initial_state(B))
        kept = tuple(leaf.clone() for leaf in state)
        first = model(x, state, resets())
        model.step(x[:, 0], state, torch.ones(B, dtype=torch.bool))
        model.fork(x[:, None], x[0, :2], state)
        assert_close(state, kept, rtol=0, atol=0)
        assert_close(model(x, state, resets()), first, rtol=0, atol=0)


def test_evaluation_mode_keeps_the_backward_pass_of_cudnn():
    model = small().train().eval()
    assert not model.training and not model.layers[0].mixer.training
    assert all(layer.mixer.gru.training and layer.mixer.gru.dropout == 0 for layer in model.layers)


def test_dropout_falls_on_the_output_before_the_residual():
    torch.manual_seed(0)
    model, x = GRU(GRUSettings(), BackboneSize(D, 1, 0.5, 0, 3)), torch.randn(B, T, D)
    model.norm = torch.nn.Identity()
    dropped = model(x, None)[0] - x
    model.eval()
    output = model(x, None)[0] - x
    kept = dropped.abs() > 1e-6
    assert 0.3 < kept.float().mean() < 0.7
    assert_close(dropped[kept], 2 * output[kept], rtol=1e-4, atol=1e-5)
