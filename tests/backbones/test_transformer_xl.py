"""Transformer-XL's own promises: relative attention, the sliding window, its memory, sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.backbones import BackboneSettings, Size, build, map_state, transformer_xl
from wmcli.backbones.transformer_xl import TransformerXL, TransformerXLSettings, band
from wmcli.errors import UsageError

B, T, D, HEADS, K = 2, 9, 8, 2, 3


def small(memory: int, layers: int = 2, **settings: int) -> TransformerXL:
    torch.manual_seed(0)
    settings = {"heads": HEADS, "head_width": K, "memory": memory, **settings}
    model = TransformerXL(TransformerXLSettings(**settings), Size(D, layers, 0.0, 0, 3)).double().eval()
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


def written_out(model: TransformerXL, x: torch.Tensor, memory: int) -> torch.Tensor:
    """Every score by itself: ((q_i + u) k_j + (q_i + v) W_r R_(i-j)) / sqrt(K) for the keys 0 <= i - j <= memory."""
    for layer in model.layers:
        normed = layer.attention_norm(x)
        q, k, v = (normed @ w.T for w in layer.qkv.weight.chunk(3))
        out = torch.zeros_like(q)
        for head in range(HEADS):
            part = slice(head * K, (head + 1) * K)
            for i in range(x.shape[1]):
                keys = range(max(0, i - memory), i + 1)
                by_content = [((q[:, i] + layer.u) * k[:, j])[:, part].sum(-1) for j in keys]
                by_distance = [
                    ((q[:, i] + layer.v) * (layer.distance.weight @ sinusoid(i - j)))[:, part].sum(-1) for j in keys
                ]
                score = torch.stack([(c + d) / K**0.5 for c, d in zip(by_content, by_distance, strict=True)], -1)
                values = v[:, keys.start : i + 1, part]
                out[:, i, part] = (score.softmax(-1)[..., None] * values).sum(1)
        x = x + out @ layer.out.weight.T
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
def test_a_fork_sees_windows_of_the_same_width():
    """Queries too see themselves and `memory` elements before them, other queries included: by the equations."""
    model, x, queries = small(3), inputs(B, 3, 2, D), inputs(4, D) + 0.5
    y, answers, _ = model.fork(x, queries, None)
    close(y, written_out(model, x.flatten(1, 2), 3)[:, 1::2])
    for n in range(3):
        after = torch.cat((x[:, : n + 1].flatten(1, 2), queries.expand(B, 4, D)), 1)
        close(answers[:, n], written_out(model, after, 3)[:, -4:])


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


def test_chunks_of_queries_change_no_result(monkeypatch):
    x, reset = inputs(B, 31, D).requires_grad_(), torch.zeros(B, 31, dtype=torch.bool)
    reset[1, [3, 17]] = True
    found = []
    for chunk in (100, 4, 1):
        monkeypatch.setattr(transformer_xl, "CHUNK", chunk)
        model = small(5)
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
def test_the_memory_counts_what_it_holds_and_never_changes():
    model, x = small(4), inputs(3, T, D)
    start = model.initial_state(3)
    reset = torch.zeros(3, T, dtype=torch.bool)
    reset[0, 7] = reset[1, 0] = True
    _, after = model(x, start, reset)
    assert after.length.tolist() == [2, 4, 4]
    kept = map_state(torch.clone, after)
    _, next_one = model.step(x[:, 0], after, torch.tensor([False, True, False]))
    assert next_one.length.tolist() == [3, 1, 4]
    model.fork(x[:, None, :6], x[0, :2], after)
    model(x, after)
    assert not any(layer.any() for layer in start.layers) and not start.length.any()
    assert_close(after, kept, rtol=0, atol=0)


@torch.no_grad()
def test_what_a_reset_left_behind_is_not_seen():
    """Slots that are not in use may hold anything, here numbers that would drown all others."""
    model, x = small(6), inputs(B, T, D)
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
def test_parameter_counts_and_initialisation(head_width):
    settings = TransformerXLSettings(ffn=4, head_width=head_width)
    model = build(BackboneSettings(name="transformer-xl", width=512, layers=2, transformer_xl=settings), 10, 1)
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
    assert {part.dtype for part in state.layers} == {torch.float32} and state.length.dtype == torch.int64


def test_dropout_falls_on_attention_weights_and_on_both_outputs(monkeypatch):
    weights = []
    attention = F.scaled_dot_product_attention

    def watched(q, k, v, mask, drop=0.0):
        weights.append(drop)
        return attention(q, k, v, mask, drop)

    monkeypatch.setattr(transformer_xl.F, "scaled_dot_product_attention", watched)
    model = TransformerXL(TransformerXLSettings(heads=2), Size(D, 1, 0.5, 0, 3)).double()
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
    with pytest.raises(UsageError, match="backbone.transformer_xl.heads = 3"):
        build(BackboneSettings(name="transformer-xl", transformer_xl=TransformerXLSettings(heads=3)), 10, 1)
    build(BackboneSettings(name="transformer-xl", transformer_xl=TransformerXLSettings(heads=3, head_width=7)), 10, 1)
