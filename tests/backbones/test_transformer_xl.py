"""Transformer-XL's own promises: relative attention, the sliding window, segments, its memory, sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.backbones import BackboneSize, build, map_state, transformer_xl
from wmcli.backbones.transformer_xl import TransformerXL, TransformerXLSettings, band
from wmcli.errors import UsageError

B, T, D, HEADS, K = 2, 9, 8, 2, 3


def small(memory: int, layers: int = 2, **settings) -> TransformerXL:
    torch.manual_seed(0)
    settings = {"heads": HEADS, "head_width": K, "memory_length": memory, **settings}
    model = TransformerXL(TransformerXLSettings(**settings), BackboneSize(D, layers, 0.0, 0, 3)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def inputs(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64)


def close(got, want) -> None:
    assert_close(got, want, rtol=0, atol=1e-11)


def sinusoid(distance: int) -> torch.Tensor:
    angles = [distance / 10000 ** (2 * pair / D) for pair in range(D // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def written_out(model: TransformerXL, x: torch.Tensor, memory: int, segment: int = 0) -> torch.Tensor:
    """Every score by itself: ((q_i + u) k_j + (q_i + v) W_r R_(i-j)) / sqrt(K) for the keys 0 <= i - j <= memory.

    With segments, the keys are those of i's own, and `memory` before it, made of detached inputs.
    """
    for layer in model.layers:
        q, k, v = (layer.attention_norm(x) @ w.T for w in layer.qkv.weight.chunk(3))
        _, fixed_k, fixed_v = (layer.attention_norm(x.detach()) @ w.T for w in layer.qkv.weight.chunk(3))
        rows = []
        for i in range(x.shape[1]):
            own = i // segment * segment if segment else 0
            keys = range(max(0, (own if segment else i) - memory), i + 1)
            seen_k = [(fixed_k if j < own else k)[:, j] for j in keys]
            seen_v = torch.stack([(fixed_v if j < own else v)[:, j] for j in keys], 1)
            out = []
            for head in range(HEADS):
                part = slice(head * K, (head + 1) * K)
                by_content = [((q[:, i] + layer.u) * key)[:, part].sum(-1) for key in seen_k]
                by_distance = [
                    ((q[:, i] + layer.v) * (layer.distance.weight @ sinusoid(i - j)))[:, part].sum(-1) for j in keys
                ]
                score = torch.stack([(c + d) / K**0.5 for c, d in zip(by_content, by_distance, strict=True)], -1)
                out.append((score.softmax(-1)[..., None] * seen_v[:, :, part]).sum(1))
            rows.append(torch.cat(out, -1))
        x = x + torch.stack(rows, 1) @ layer.out.weight.T
        inner = layer.up(layer.ffn_norm(x))
        x = x + layer.down(inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
    return model.norm(x)


@torch.no_grad()
@pytest.mark.parametrize("memory", [1, 3, T - 1, T, 40])
def test_it_equals_attention_written_out(memory):
    """As one pass, in chunks, and step by step; with memory >= T - 1 that is full causal attention."""
    model, x = small(memory), inputs(B, T, D)
    want = written_out(model, x, memory)
    close(model(x, None)[0], want)
    for sizes in ((T,), (4, 5), (2, 3, 4), (1,) * T):
        state, outputs = model.initial_state(B), []
        for part in x.split(sizes, 1):
            y, state = model(part, state)
            outputs.append(y)
        close(torch.cat(outputs, 1), want)
    if memory >= T - 1:
        close(want, written_out(model, x, 10 * T))


@torch.no_grad()
@pytest.mark.parametrize(("memory", "segment"), [(1, 4), (2, 4), (4, 4), (5, 3), (3, 1), (T, 4), (2, T), (1, 40)])
def test_segments_equal_attention_written_out(memory, segment):
    """As one pass, in chunks, and step by step; with memory >= T or segment >= T that is full causal attention."""
    model, x = small(memory, segment_length=segment), inputs(B, T, D)
    want = written_out(model, x, memory, segment)
    close(model(x, None)[0], want)
    for sizes in ((T,), (4, 5), (5, 4), (2, 3, 4), (1,) * T):
        state, outputs = model.initial_state(B), []
        for part in x.split(sizes, 1):
            y, state = model(part, state)
            outputs.append(y)
        close(torch.cat(outputs, 1), want)
    state, outputs = model.initial_state(B), []
    for element in x.unbind(1):
        y, state = model.step(element, state)
        outputs.append(y)
    close(torch.stack(outputs, 1), want)
    full = written_out(model, x, 10 * T)
    if max(memory, segment) >= T:
        close(want, full)
    else:
        assert (want - full).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("segment", [0, 2, 3, 5])
def test_a_fork_sees_windows_of_the_same_width(segment):
    """Queries see what elements in their place would, other queries included: by the equations."""
    model, x, queries = small(3, segment_length=segment), inputs(B, 3, 2, D), inputs(4, D) + 0.5
    y, answers, _ = model.fork(x, queries, None)
    close(y, written_out(model, x.flatten(1, 2), 3, segment)[:, 1::2])
    for n in range(3):
        after = torch.cat((x[:, : n + 1].flatten(1, 2), queries.expand(B, 4, D)), 1)
        close(answers[:, n], written_out(model, after, 3, segment)[:, -4:])


def test_gradients_of_segments_equal_those_written_out():
    """Of inputs and of all parameters, over three segments in one call: W_k and W_v learn from constants too."""
    model, x = small(3, segment_length=4), inputs(B, T, D).requires_grad_()
    arguments = [x, *model.parameters()]
    weights = inputs(B, T, D).flip(1)
    want = torch.autograd.grad((written_out(model, x, 3, 4) * weights).sum(), arguments)
    reset = torch.zeros(B, T, dtype=torch.bool)
    for state, mask in ((None, None), (model.initial_state(B), None), (None, reset)):
        close(torch.autograd.grad((model(x, state, mask)[0] * weights).sum(), arguments), want)


@pytest.mark.parametrize("how", ["forward", "from a state", "with resets", "chunks", "steps", "fork"])
def test_no_gradient_reaches_an_earlier_segment(how):
    """Though the values do depend on it."""
    segment, last, model, x = 4, 10, small(5, segment_length=4), inputs(1, 12, D).requires_grad_()
    origin = 0
    if how == "forward":
        y, _ = model(x, None)
    elif how == "from a state":
        y, _ = model(x, model.initial_state(1))
    elif how == "with resets":
        reset = torch.zeros(1, 12, dtype=torch.bool)
        reset[0, 1], origin = True, 1
        y, _ = model(x, None, reset)
    elif how == "fork":
        _, answers, _ = model.fork(x[:, :last].unflatten(1, (5, 2)), x[:, None, last:].expand(-1, 5, -1, -1), None)
        y = torch.cat((x[:, :last], answers[:, -1]), 1)
    else:
        y, state, outputs = x, model.initial_state(1), []
        for part in x.split(3 if how == "chunks" else 1, 1):
            y, state = model(part, state)
            outputs.append(y)
        y = torch.cat(outputs, 1)
    (gradient,) = torch.autograd.grad(y[0, last].square().sum(), x)
    own = origin + (last - origin) // segment * segment
    assert not gradient[0, :own].any() and not gradient[0, last + 1 :].any()
    assert (gradient[0, own : last + 1].abs().amax(-1) > 1e-9).all()
    moved = x.detach().clone()
    moved[0, own - 1] *= -1
    assert (model(moved, None)[0] - model(x, None)[0])[0, last].abs().max() > 1e-3


def test_the_carried_state_is_the_graph_of_its_unfinished_segment_only():
    model, x = small(5, segment_length=4), inputs(B, 7, D).requires_grad_()
    _, state = model(x[:, :6], model.initial_state(B))
    y, _ = model(x[:, 6:], state)
    whole = model(x, None)[0][:, 6:]
    for result in (y, whole):
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        assert not gradient[:, :4].any() and (gradient[:, 4:].abs().amax(-1) > 1e-9).all()
    close(
        torch.autograd.grad(model(x[:, 6:], model(x[:, :6], model.initial_state(B))[1])[0].square().sum(), x),
        torch.autograd.grad(model(x, None)[0][:, 6:].square().sum(), x),
    )


@pytest.mark.parametrize("prior", [{}, {"kind": "gaussian", "mean": 2.0}, {"kind": "span", "form": "scale", "span": 4}])
@pytest.mark.parametrize("with_state", [True, False])
def test_rows_in_different_places_of_their_segments_are_computed_alone(prior, with_state):
    """Outputs and gradients, with a prior too: a row with resets equals its episodes, each from its beginning."""
    model, x = small(3, segment_length=4, prior=prior), inputs(2, 14, D).requires_grad_()
    reset = torch.zeros(2, 14, dtype=torch.bool)
    reset[0, [2, 9]] = reset[1, 7] = True
    got = model(x, model.initial_state(2) if with_state else None, reset)[0]
    pieces = [[x[:1, :2], x[:1, 2:9], x[:1, 9:]], [x[1:, :7], x[1:, 7:]]]
    want = torch.cat([torch.cat([model(piece, None)[0] for piece in row], 1) for row in pieces])
    close(got, want)
    weights = inputs(2, 14, D).flip(1)
    arguments = [x, *model.parameters()]
    for each in zip(*(torch.autograd.grad((y * weights).sum(), arguments) for y in (got, want)), strict=True):
        close(*each)


@torch.no_grad()
def test_the_feed_forward_layer_has_the_activation_of_the_settings():
    x, y = inputs(B, T, D), torch.zeros(B, HEADS, T, K, dtype=torch.float64)
    for activation, function in (("relu", lambda z: z.clamp(min=0)), ("gelu", lambda z: z * torch.special.ndtr(z))):
        layer = small(3, activation=activation).layers[0]
        close(layer.finish(x, y), x + layer.down(function(layer.up(layer.ffn_norm(x)))))


def test_band_equals_a_gather_by_distance():
    for count, window in ((1, 4), (5, 1), (4, 3), (3, 7)):
        scores = inputs(2, count, window)  # farthest first
        row, key = torch.arange(count)[:, None], torch.arange(window - 1 + count)
        distance = row + window - 1 - key
        outside = (distance < 0) | (distance >= window)
        want = scores.flip(-1).gather(-1, distance.clamp(0, window - 1).expand(2, -1, -1))
        close(band(scores), want.masked_fill(outside, float("-inf")))


def test_the_order_of_the_products_changes_no_score():
    model, table = small(6), inputs(7, D)
    layer = model.layers[0]
    for rows in (1, 2, 5, 50):  # few queries, then many
        q = inputs(rows, HEADS, 2, K)
        weight = layer.distance.weight.unflatten(0, (HEADS, K))
        close(layer._distance_scores(q, table), torch.einsum("bhtk,hkd,rd->bhtr", q, weight, table) / K**0.5)


@pytest.mark.parametrize("segment", [0, 6])
def test_chunks_of_queries_change_no_result(monkeypatch, segment):
    x, reset = inputs(B, 31, D).requires_grad_(), torch.zeros(B, 31, dtype=torch.bool)
    reset[1, [3, 17]] = True
    found = []
    for chunk in (100, 4, 1):
        monkeypatch.setattr(transformer_xl, "CHUNK", chunk)
        model = small(5, segment_length=segment)
        _, state = model(x[:, :7], model.initial_state(B))
        y, state = model(x, state, reset)
        z, answers, _ = model.fork(x[:, :30].unflatten(1, (5, 6)), x[0, :5], state)
        plain = model(x, None)[0]
        loss = sum(part.square().sum() for part in (y, z, answers, plain))
        found.append((y, z, answers, plain, *torch.autograd.grad(loss, [x, *model.parameters()])))
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_stack_reaches_layers_times_memory_back(layers):
    model, x = small(3, layers), inputs(1, 14, D).requires_grad_()
    _, state = model(x[:, :5], model.initial_state(1))
    y, _ = model(x[:, 5:], state)
    (gradient,) = torch.autograd.grad(y[0, -1].square().sum(), x)
    reach = 13 - 3 * layers
    assert (gradient[0, reach:].abs().amax(-1) > 1e-9).all() and not gradient[0, :reach].any()


def test_a_detached_memory_gives_the_same_values_and_no_gradient():
    model, x = small(4), inputs(B, T, D).requires_grad_()
    _, state = model(x[:, :5], model.initial_state(B))
    want, got = model(x[:, 5:], state)[0], model(x[:, 5:], map_state(torch.Tensor.detach, state))[0]
    close(got, want)
    for y, flows in ((want, True), (got, False)):
        (gradient,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        assert gradient[:, :5].any() == flows and gradient[:, 5:].any()


@torch.no_grad()
@pytest.mark.parametrize("segment", [0, 3])
def test_the_memory_counts_since_the_last_reset_and_never_changes(segment):
    model, x = small(4, segment_length=segment), inputs(3, T, D)
    start = model.initial_state(3)
    reset = torch.zeros(3, T, dtype=torch.bool)
    reset[0, 7] = reset[1, 0] = True
    _, after = model(x, start, reset)
    assert after.length.tolist() == [2, 9, 9]
    kept = map_state(torch.clone, after)
    _, next_one = model.step(x[:, 0], after, torch.tensor([False, True, False]))
    assert next_one.length.tolist() == [3, 1, 10]
    model.fork(x[:, None, :6], x[0, :2], after)
    model(x, after)
    assert not any(layer.any() for layer in start.layers) and not start.length.any()
    assert_close(after, kept, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("segment", [0, 4])
def test_steps_before_a_reset_are_not_attended_to(segment):
    """Slots that are not in use may hold anything, here numbers that would drown all others."""
    model, x = small(6, segment_length=segment), inputs(B, T, D)
    _, state = model(1e3 * x, model.initial_state(B))
    layers = tuple(layer + 1e6 for layer in state.layers)
    state = state._replace(layers=layers, length=torch.zeros_like(state.length))
    close(model(x, state)[0], model(x, None)[0])
    close(model.fork(x[:, None], x[0, :2], state)[:2], model.fork(x[:, None], x[0, :2], None)[:2])


def test_sinusoids():
    table = transformer_xl._sinusoids(300, D, torch.device("cpu"), torch.float64)
    close(table, torch.stack([sinusoid(distance) for distance in range(300, -1, -1)]))
    odd = transformer_xl._sinusoids(4, 5, torch.device("cpu"), torch.float32)
    assert odd.shape == (5, 5) and odd.dtype == torch.float32
    assert odd[-1].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("head_width", [0, 80])
def test_parameter_counts_and_initialization(head_width):
    settings = TransformerXLSettings(width=512, layers=2, ffn=4, head_width=head_width)
    model = build(settings, 10, 1)
    inner = 8 * (head_width or 64)
    attention = 5 * 512 * inner + 2 * inner  # query, key, value, distance, out; u and v
    feed_forward = 512 * 2048 + 2048 + 2048 * 512 + 512
    assert sum(p.numel() for p in model.parameters()) == 2 * (attention + feed_forward + 2 * 1024) + 1024
    layer = model.layers[0]
    for weight in (layer.qkv.weight, layer.distance.weight, layer.down.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.u.std().item() == pytest.approx(0.02, rel=0.2) and not torch.equal(layer.u, layer.v)
    assert not layer.up.bias.any() and model.max_length is None
    state = model.initial_state(3)
    assert [part.shape for part in state.layers] == [(3, 2, 8, 128, inner // 8)] * 2
    longer = TransformerXL(
        settings.model_copy(update={"segment_length": 100}), BackboneSize(512, 2, 0.0, 10, 1)
    ).initial_state(3)
    assert [part.shape for part in longer.layers] == [(3, 2, 8, 227, inner // 8)] * 2
    assert {part.dtype for part in state.layers} == {torch.float32} and state.length.dtype == torch.int64


def test_dropout_falls_on_attention_weights_and_on_both_outputs(monkeypatch):
    weights = []
    attention = F.scaled_dot_product_attention

    def watched(q, k, v, mask, drop=0.0):
        weights.append(drop)
        return attention(q, k, v, mask, drop)

    monkeypatch.setattr(transformer_xl.F, "scaled_dot_product_attention", watched)
    model = TransformerXL(TransformerXLSettings(heads=2), BackboneSize(D, 1, 0.5, 0, 3)).double()
    x = inputs(B, T, D)
    layer = model.layers[0]
    torch.manual_seed(0)
    attended = layer.finish(x, torch.randn(B, 2, T, 4, dtype=torch.float64))
    untouched = (attended == x).double().mean()  # both outputs dropped
    assert 0.15 < untouched < 0.35
    model(x, None)
    model.eval()(x, None)
    assert weights == [0.5, 0.0]


def test_heads_must_divide_the_width_or_have_their_own():
    with pytest.raises(UsageError, match="backbone.heads = 3"):
        build(TransformerXLSettings(heads=3), 10, 1)
    build(TransformerXLSettings(heads=3, head_width=7), 10, 1)
