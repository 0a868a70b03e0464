"""The block GRU's own promises: its equations, sizes, first weights, and float32 sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from wmcli.backbones import BackboneSize
from wmcli.backbones.block_gru import BlockGRU, BlockGRUSettings
from wmcli.errors import UsageError

B, T, INPUTS, D, H, G = 3, 7, 5, 12, 4, 3


def small(layers: int = 1, dtype: torch.dtype = torch.float64) -> BlockGRU:
    torch.manual_seed(0)
    settings = BlockGRUSettings(blocks=G, hidden_size=H, input_width=INPUTS, norm_eps=0.05)
    model = BlockGRU(settings, BackboneSize(D, layers, 0.0, 0, 3)).to(dtype).eval()
    with torch.no_grad():  # biases and norms other than they begin
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def resets() -> torch.Tensor:
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, 0] = reset[1, 2] = reset[1, 3] = reset[2, T - 1] = True
    return reset


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def norm_silu(x: np.ndarray, scale: torch.Tensor) -> np.ndarray:
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.05) * numbers(scale)
    return x * sigmoid(x)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("with_resets", [False, True])
def test_it_equals_the_equations_written_out(layers, with_resets):
    """In numpy, element by element and block by block: each reads its state, the projection and the element."""
    model = small(layers)
    x, reset = torch.randn(B, T, INPUTS, dtype=torch.float64), resets()
    start = torch.randn(B, D, dtype=torch.float64)
    h, outputs, part = numbers(start), [], D // G
    for t in range(T):
        if with_resets:
            h = h * ~reset.numpy()[:, t, None]
        projected = h @ numbers(model.projection.weight).T + numbers(model.projection.bias)
        shared = np.concatenate([norm_silu(projected, model.projection_norm.weight), x.numpy()[:, t]], 1)
        y = [np.concatenate([h[:, g * part : (g + 1) * part], shared], 1) for g in range(G)]
        for layer, norm in zip(model.hidden, model.norms, strict=True):
            flat = np.concatenate([each @ numbers(layer.weight)[g] for g, each in enumerate(y)], 1)
            y = np.split(norm_silu(flat + numbers(layer.bias), norm.weight), G, 1)
        gates = np.concatenate([each @ numbers(model.gates.weight)[g] for g, each in enumerate(y)], 1)
        r, c, u = np.split((gates + numbers(model.gates.bias)).reshape(B, G, 3 * part), 3, 2)
        u = sigmoid(u - 1).reshape(B, D)
        h = u * np.tanh(sigmoid(r) * c).reshape(B, D) + (1 - u) * h
        outputs.append(h)
    y, state = model(x, start, reset if with_resets else None)
    assert_close(y, torch.from_numpy(np.stack(outputs, 1)), rtol=0, atol=1e-12)
    assert_close(state, torch.from_numpy(h), rtol=0, atol=1e-12)


def test_sizes():
    """Those of DreamerV3's 12 million: the element is two projections of 256."""
    settings = BlockGRUSettings(width=2048, hidden_size=256, input_width=512)
    with torch.device("meta"):
        model = BlockGRU(settings, BackboneSize(2048, 1, 0.0, 0, 1))
        plain = BlockGRU(BlockGRUSettings(), BackboneSize(256, 1, 0.0, 0, 1))
    assert (model.inputs, plain.inputs, plain.projection.out_features) == (512, 256, 32)
    projection = 2048 * 256 + 2 * 256
    hidden = 2048 // 8 * (2048 + 8 * 768) + 2 * 2048
    gates = 2048 // 8 * 3 * 2048 + 3 * 2048
    assert sum(parameter.numel() for parameter in model.parameters()) == projection + hidden + gates


def test_first_weights_leave_the_state_alone_and_forget_slowly():
    """Zero biases: without an element the candidate is 0, and a share of sigmoid(-1) is forgotten."""
    torch.manual_seed(0)
    model = BlockGRU(BlockGRUSettings(input_width=6), BackboneSize(64, 1, 0.0, 0, 1)).double()
    zeros = torch.zeros(2, 6, dtype=torch.float64)
    assert not model.step(zeros, model.initial_state(2))[0].any()
    assert not any(bool(layer.bias.any()) for layer in (model.projection, model.gates, *model.hidden))
    fan = 64 + 8 * (8 + 6)  # all inputs of all blocks
    assert float(model.hidden[0].weight.detach().std()) * fan**0.5 == pytest.approx(1, abs=0.1)


def test_settings_that_do_not_fit():
    with pytest.raises(UsageError, match=r"backbone.blocks = 8 must divide backbone.width = 12"):
        BlockGRU(BlockGRUSettings(), BackboneSize(12, 1, 0.0, 0, 1))
    settings = BlockGRUSettings(hidden_size=3, input_width=6)
    assert settings.resized(2, 60) is None and settings.width_step == 8
    assert settings.resized(2, 64) == BlockGRUSettings(layers=2, width=64)


def test_the_state_is_float32_under_autocast():
    model = small(dtype=torch.float32)
    x = torch.randn(B, T, INPUTS)
    want, _ = model(x, None)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = model(x, model.initial_state(B))
    assert y.dtype == state.dtype == torch.float32
    assert_close(y, want, rtol=0, atol=0.03)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
