"""Mamba-1's and Mamba-2's own: the papers' equations written out, golden values, sizes, initialization, precision.

Axes: B batch, T time (elements), D width, C channels, H heads, P channels of a head, S numbers of a channel's state,
W taps, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.backbones import SECTIONS, BackboneSize, build, mamba1, mamba2, residual
from wmcli.backbones.mamba1 import Mamba1, Mamba1Mixer, Mamba1Settings
from wmcli.backbones.mamba2 import Mamba2, Mamba2Mixer, Mamba2Settings
from wmcli.errors import UsageError

NAMES = ["mamba1", "mamba2"]
DRAMA = BackboneSize(512, 2, 0.0, 0, 1)
B, T, D, S, W = 2, 9, 6, 3, 4

SMALL = {"mamba1": Mamba1Settings(state_size=4), "mamba2": Mamba2Settings(state_size=4, head_width=8, chunk_size=8)}


def small(name: str, dtype=torch.float64):
    """Two layers of width 16, with noise on all parameters so that nothing is at its initial value."""
    torch.manual_seed(0)
    settings = SMALL[name].model_copy(update={"width": 16, "layers": 2, "dropout": 0.0})
    return disturbed(build(settings, 0, 1).to(dtype)).eval()


def disturbed(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def noise(*shape: int, dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=dtype)


def close(got, want) -> None:
    assert_close(got, want, rtol=0, atol=1e-11)


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- the equations -----------------------------------------------------------------------------------------------------


def convolved(x: list[torch.Tensor], t: int, taps: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """SiLU of the causal convolution of x[0] ... x[t], zeros before."""
    return F.silu(bias + sum(taps[:, W - 1 - lag] * x[t - lag] for lag in range(W) if t >= lag))


def test_equations_of_mamba1():
    torch.manual_seed(0)
    mixer = disturbed(Mamba1Mixer(Mamba1Settings(state_size=S, dt_rank=2), BackboneSize(D, 2, 0.0, 0, 1)).double())
    channels, p = 2 * D, {name: value.detach() for name, value in mixer.named_parameters()}
    u = noise(B, T, D)
    got, state = mixer(u, None, None)
    for row in range(B):
        h = torch.zeros(channels, S, dtype=u.dtype)
        x, gates = zip(*((p["in_proj.weight"] @ u[row, t]).split(channels) for t in range(T)), strict=True)
        for t in range(T):
            xc = convolved(x, t, p["conv.weight"][:, 0], p["conv.bias"])
            low, b, c = (p["x_proj.weight"] @ xc).split((2, S, S))
            dt = torch.log(1 + torch.exp(p["dt_proj.weight"] @ low + p["dt_proj.bias"]))
            y = torch.zeros(channels, dtype=u.dtype)
            for i in range(channels):
                for s in range(S):
                    h[i, s] = torch.exp(-dt[i] * p["a_log"][i, s].exp()) * h[i, s] + dt[i] * b[s] * xc[i]
                    y[i] += c[s] * h[i, s]
                y[i] += p["skip"][i] * xc[i]
            close(got[row, t], p["out_proj.weight"] @ (y * F.silu(gates[t])))
        close(state.scan[row], h)
        close(state.convolution[row], torch.stack(x[-(W - 1) :], 1))


def test_equations_of_mamba2():
    heads, width = 3, 4
    torch.manual_seed(0)
    settings = Mamba2Settings(state_size=S, head_width=width, chunk_size=4)
    mixer = disturbed(Mamba2Mixer(settings, BackboneSize(D, 2, 0.0, 0, 1)).double())
    channels, p = heads * width, {name: value.detach() for name, value in mixer.named_parameters()}
    u = noise(B, T, D)
    got, state = mixer(u, None, None)
    for row in range(B):
        h = torch.zeros(heads, S, width, dtype=u.dtype)
        parts = [(p["in_proj.weight"] @ u[row, t]).split((channels, channels + 2 * S, heads)) for t in range(T)]
        gates, mixed, steps = zip(*parts, strict=True)
        for t in range(T):
            x, b, c = convolved(mixed, t, p["conv.weight"][:, 0], p["conv.bias"]).split((channels, S, S))
            dt = torch.log(1 + torch.exp(steps[t] + p["dt_bias"]))
            y = torch.zeros(channels, dtype=u.dtype)
            for head in range(heads):
                x_ = x[head * width : (head + 1) * width]
                decay = torch.exp(-dt[head] * p["a_log"][head].exp())
                h[head] = decay * h[head] + torch.outer(b, dt[head] * x_)
                y[head * width : (head + 1) * width] = c @ h[head] + p["skip"][head] * x_
            g = y * F.silu(gates[t])
            g = g / torch.sqrt(g.square().mean() + 1e-5) * p["norm.weight"]
            close(got[row, t], p["out_proj.weight"] @ g)
        close(state.scan[row], h)
        close(state.convolution[row], torch.stack(mixed[-(W - 1) :], 1))


@pytest.mark.parametrize("name", NAMES)
def test_equations_of_the_stack(name):
    """Each layer adds to the sum what its mixer makes of the normalized sum; a last norm ends the stack."""
    model, x = small(name), noise(B, T, 16)

    def rms(x, weight):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    total = x
    for layer in model.layers:
        total = total + layer.mixer(rms(total, layer.norm.weight), None, None)[0]
    close(model(x, None)[0], rms(total, model.norm.weight))


def test_golden_gated_norm():
    """A mixer in which all is constant but the gate: the recurrence gives 1, 2, 3, 4, the gate is 0, 1, -1, 2."""
    mixer = Mamba2Mixer(Mamba2Settings(state_size=1, expand=1, head_width=1), BackboneSize(4, 1, 0.0, 0, 1)).double()
    with torch.no_grad():
        for parameter in (mixer.in_proj.weight, mixer.conv.weight, mixer.conv.bias):
            parameter.zero_()
        mixer.in_proj.weight[:4, 0] = torch.tensor([0.0, 1.0, -1.0, 2.0])
        mixer.conv.bias[:4] = 1.0  # x = silu(1), and B = C = 0
        mixer.skip.copy_(torch.arange(1.0, 5.0) / F.silu(torch.tensor(1.0, dtype=torch.float64)))
        mixer.out_proj.weight.copy_(torch.eye(4))
    y, _ = mixer(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]], dtype=torch.float64), None, None)
    assert y.flatten().tolist() == pytest.approx([0, 0.403813, -0.222832, 1.946093], abs=1e-6)


# -- all forms agree ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [2, 3, 24])  # shorter than the taps reach, too
def test_forms_agree_in_float32(name, length):
    """At once, prefilled and then step by step, step by step, and in one chunk: Mamba-2's form as masked attention."""
    model, x = small(name, torch.float32), noise(3, length, 16, dtype=torch.float32)
    want, _ = model(x, None)
    for prefill in (0, min(8, length - 1)):
        state = model.initial_state(3)
        outputs = []
        if prefill:
            y, state = model(x[:, :prefill], state)
            outputs.append(y)
        for t in range(prefill, length):
            y, state = model.step(x[:, t], state)
            outputs.append(y[:, None])
        assert (torch.cat(outputs, 1) - want).abs().max() < 1e-4
    if name == "mamba2":
        for chunk in (1, 5, 64):
            for layer in model.layers:
                layer.mixer.chunk = chunk
            assert (model(x, None)[0] - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_past_keeps_every_bit(name):
    model, x = small(name, torch.float32), noise(3, 24, 16, dtype=torch.float32)
    y, _ = model(x, None)
    for t in (1, 7, 8, 23):
        changed = x.clone()
        changed[:, t] += 1
        assert torch.equal(model(changed, None)[0][:, :t], y[:, :t])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_state_holds_the_newest_inputs(name, length):
    model, x = small(name), noise(B, length, 16)
    _, state = model(x, model.initial_state(B))
    first = model.layers[0]
    raw = first.mixer.in_proj(first.norm(x))
    begin = 32 if name == "mamba2" else 0  # Mamba-1 has channels before the gate, Mamba-2 behind
    raw = raw[..., begin : begin + first.mixer.conv.in_channels]
    close(state[0].convolution, F.pad(raw, (0, 0, 3, 0))[:, -3:].mT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("carried", [False, True])
def test_fork_with_blocks_shorter_than_the_taps_reach(name, length, carried):
    model, x, queries = small(name), noise(B, 4, length, 16), noise(5, 16)
    past = noise(B, 2, 16) + 0.3
    start = model(past, model.initial_state(B))[1] if carried else None
    y, answers, _ = model.fork(x, queries, start)
    for n in range(4):
        before = torch.cat((*([past] if carried else []), x[:, : n + 1].flatten(1, 2)), 1)
        want, _ = model(torch.cat((before, queries.expand(B, -1, -1)), 1), None)
        close(answers[:, n], want[:, -5:])
        close(y[:, n], want[:, -6])


@pytest.mark.parametrize("name", NAMES)
def test_large_steps_stay_finite(name):
    """A step of 10 at a decay rate of 16, 256 elements long, in float32, forward and backward."""
    model, x = small(name, torch.float32), noise(B, 256, 16, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        for layer in model.layers:
            layer.mixer.a_log.fill_(math.log(16))
            bias = layer.mixer.dt_proj.bias if name == "mamba1" else layer.mixer.dt_bias
            bias.fill_(10.0)
    y, _ = model(x, None)
    y.square().mean().backward()
    assert y.isfinite().all()
    assert all(value.grad.isfinite().all() for value in (x, *model.parameters()))


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_float32_parts_under_autocast(name, monkeypatch):
    model, x = small(name, torch.float32), noise(B, 5, 16, dtype=torch.bfloat16)
    wide, low = torch.float32, torch.bfloat16
    module, kernel, want = {
        "mamba1": (mamba1, "selective_scan", [low, wide, wide, low, low]),  # x, dt, a, b, c
        "mamba2": (mamba2, "linear_recurrence", [low, low, low, wide]),  # q, k, v, log_decay
    }[name]
    original, seen = getattr(module, kernel), []

    def spy(*operands, **options):
        seen.append([operand.dtype for operand in operands])
        return original(*operands, **options)

    monkeypatch.setattr(module, kernel, spy)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = model(x, model.initial_state(B))
    assert seen == [want, want]  # in both layers
    assert y.dtype == wide  # the residual sum
    assert all(leaf.dtype == wide for layer in state for leaf in layer)


# -- sizes and first values --------------------------------------------------------------------------------------------


def test_parameter_counts():
    layer1 = 1_048_576 + 5_120 + 65_536 + 33_792 + 16_384 + 1_024 + 524_288 + 512
    layer2 = 1_073_152 + 5_280 + 48 + 1_024 + 524_288 + 512
    assert (layer1, layer2) == (1_695_232, 1_604_304)
    for model, layer in [
        (Mamba1(Mamba1Settings(), DRAMA), layer1),
        (Mamba2(Mamba2Settings(), DRAMA), layer2),
        (Mamba2(Mamba2Settings(state_size=32), DRAMA), 1_620_848),
    ]:
        assert [count(part) for part in model.layers] == [layer, layer] and count(model) == 2 * layer + 512


def test_parameter_counts_of_dramas_variants():
    """Its world model of 7,155,459 parameters with another backbone, all else being equal."""
    base = count(Mamba2(Mamba2Settings(), DRAMA))
    assert count(Mamba2(Mamba2Settings(head_width=128), DRAMA)) - base == 7_147_219 - 7_155_459
    assert count(Mamba2(Mamba2Settings(head_width=128, expand=1), DRAMA)) - base == 5_564_091 - 7_155_459
    assert count(Mamba1(Mamba1Settings(), DRAMA)) - base == 7_337_315 - 7_155_459


@pytest.mark.parametrize("name", NAMES)
def test_size_of_the_state(name):
    model = build(SECTIONS[name](width=512, layers=2), 0, 1)
    inputs, memory = model.initial_state(1)[0]
    assert inputs.shape == ((1, 1024, 3) if name == "mamba1" else (1, 1056, 3))
    assert memory.shape == ((1, 1024, 16) if name == "mamba1" else (1, 16, 16, 64))
    assert memory.numel() == 16_384


def uniform(values: torch.Tensor, low: float, high: float) -> None:
    """At least a thousand values, drawn evenly between low and high."""
    width = high - low
    assert low - 1e-3 * width <= values.min() < low + 0.02 * width
    assert high - 0.02 * width < values.max() <= high + 1e-3 * width
    assert values.mean().item() == pytest.approx((low + high) / 2, abs=0.03 * width)
    assert values.std().item() == pytest.approx(width / 12**0.5, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_initialization(name):
    torch.manual_seed(0)
    # Heads of one channel, so that there are enough of them.
    settings = SECTIONS[name](width=512, layers=2, **({"head_width": 1} if name == "mamba2" else {}))
    for layer in build(settings, 0, 1).layers:
        mixer = layer.mixer
        uniform(mixer.in_proj.weight, -(512**-0.5), 512**-0.5)
        uniform(mixer.conv.weight, -0.5, 0.5)
        uniform(mixer.conv.bias, -0.5, 0.5)
        uniform(mixer.out_proj.weight * 2**0.5, -1 / 32, 1 / 32)  # smaller by the root of two layers
        assert (mixer.skip == 1).all()
        if name == "mamba1":
            uniform(mixer.x_proj.weight, -1 / 32, 1 / 32)
            uniform(mixer.dt_proj.weight, -(32**-0.5), 32**-0.5)
            assert_close(mixer.a_log.exp(), torch.arange(1.0, 17).expand(1024, -1))
        else:
            uniform(mixer.a_log.exp(), 1, 16)
            assert (mixer.norm.weight == 1).all()
        steps = F.softplus(mixer.dt_proj.bias if name == "mamba1" else mixer.dt_bias)
        uniform(steps.log(), math.log(1e-3), math.log(1e-1))


def test_biases_of_step_sizes_undo_softplus(monkeypatch):
    monkeypatch.setattr(residual, "STEP_SIZES", (0.1, 0.1))
    assert_close(F.softplus(residual.draw_step_bias(3)), torch.full((3,), 0.1))


def test_rank_of_the_step_sizes():
    for width, settings, rank in [
        (512, Mamba1Settings(), 32),
        (20, Mamba1Settings(), 2),
        (20, Mamba1Settings(dt_rank=7), 7),
    ]:
        assert Mamba1(settings, BackboneSize(width, 1, 0.0, 0, 1)).layers[0].mixer.dt_proj.in_features == rank


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_falls_on_projections_only(name):
    mixer = small(name).layers[0].mixer
    decayed = {
        key
        for key, parameter in mixer.named_parameters()
        if parameter.ndim >= 2 and not getattr(parameter, "_no_weight_decay", False)
    }
    projections = {"in_proj.weight", "conv.weight", "out_proj.weight"}
    assert decayed == projections | ({"x_proj.weight", "dt_proj.weight"} if name == "mamba1" else set())


def test_heads_must_divide_the_channels():
    settings = Mamba2Settings(width=512, head_width=96)
    with pytest.raises(UsageError, match=r"backbone.head_width = 96: must divide .* = 2 \* 512"):
        build(settings, 650, 65)
