"""The transformer's own promises: sizes, initialization, limits, the cache."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.backbones import BackboneSize, build
from wmcli.backbones.transformer import Transformer, TransformerSettings, _attention_with_dropout
from wmcli.errors import UsageError
from wmcli.kernels.attention import attention
from wmcli.settings import resolve

LENGTH, D = 9, 8


def small() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerSettings(heads=2), BackboneSize(D, 2, 0.0, LENGTH, 3)).eval()


def test_parameter_counts_and_initialization():
    model = build(TransformerSettings(layers=10), max_length=340, block=17)
    assert sum(p.numel() for p in model.layers[0].parameters()) == 789_760
    assert sum(p.numel() for p in model.norm.parameters()) == 512
    assert model.positions.weight.numel() == 87_040
    assert sum(p.numel() for p in model.parameters()) == 10 * 789_760 + 512 + 87_040
    for weight in (model.positions.weight, model.layers[0].qkv.weight, model.layers[9].down.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not model.layers[3].up.bias.any()


def test_it_equals_attention_written_out():
    """Softmax attention with scale 1 / sqrt(head width), exact GELU, positions added once."""
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 5, D)
    h = x + model.positions.weight[:5]
    for layer in model.layers:
        q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in layer.qkv(layer.attention_norm(h)).chunk(3, -1))
        weight = (q @ k.mT / 2).masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf")).softmax(-1)
        h = h + layer.out((weight @ v).transpose(1, 2).flatten(2))
        inner = layer.up(layer.ffn_norm(h))
        h = h + layer.down(inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
    assert_close(model(x, None)[0], model.norm(h), rtol=1e-5, atol=1e-5)


def rotary():
    torch.manual_seed(0)
    model = Transformer(TransformerSettings(heads=2, positions="rotary"), BackboneSize(D, 2, 0.0, LENGTH, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def test_rotary_positions_turn_queries_and_keys():
    """As complex numbers: features i and i + K / 2 are multiplied by exp(1j * position / 10000^(2 i / K))."""
    model, x = rotary(), torch.randn(2, 5, D)
    assert not any("positions" in name for name, _ in model.named_parameters())
    h, width = x, D // 2
    angle = torch.arange(5)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    for layer in model.layers:
        q, k, v = (p.unflatten(-1, (2, width)).transpose(1, 2) for p in layer.qkv(layer.attention_norm(h)).chunk(3, -1))
        q, k = (torch.complex(*p.chunk(2, -1)) * torch.exp(1j * angle) for p in (q, k))
        score = (q @ k.mH).real / width**0.5
        weight = score.masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf")).softmax(-1)
        h = h + layer.out((weight @ v).transpose(1, 2).flatten(2))
        h = h + layer.down(torch.nn.functional.gelu(layer.up(layer.ffn_norm(h))))
    assert_close(model(x, None)[0], model.norm(h), rtol=1e-5, atol=1e-5)


def test_rotary_attention_depends_on_distances_alone():
    model, x, places = rotary(), torch.randn(1, 6, D), torch.arange(6)
    far, _ = model._run(x, places + 7, attention)
    assert_close(far, model(x, None)[0], rtol=1e-4, atol=1e-5)


def test_rotary_heads_have_an_even_width():
    with pytest.raises(UsageError, match="must be even"):
        Transformer(TransformerSettings(heads=2, positions="rotary"), BackboneSize(6, 1, 0.0, LENGTH, 3))


def test_mismatches_are_refused():
    model, x = small(), torch.randn(1, 10, D)
    _, state = model(x[:, :9], model.initial_state(1))
    cases = (
        lambda: model(x, None),
        lambda: model(x, model.initial_state(1)),
        lambda: model.step(x[:, 0], state),
        lambda: model(x[:, :1], state),
        lambda: model.fork(x[:, :9].unflatten(1, (3, 3)), x[0, :1], None),
        lambda: model.fork(x[:, :9].unflatten(1, (3, 3)), x[0, :1], model.initial_state(1)),
    )
    for case in cases:
        with pytest.raises(ValueError, match="max_length = 9"):
            case()
    model.fork(x[:, :8].unflatten(1, (2, 4)), x[0, :1], model.initial_state(1))  # exactly full


def test_resets_free_the_cache():
    """After a reset a row may take max_length elements again; one element more is an error, not a wrong answer."""
    model, x = small(), torch.randn(2, 9, D)
    _, state = model(x, model.initial_state(2))
    want = model(x, None)[0]
    with torch.no_grad():
        for t in range(9):
            y, state = model.step(x[:, t], state, torch.full((2,), t == 0))
            assert_close(y, want[:, t], rtol=1e-5, atol=1e-6)
        with pytest.raises((IndexError, RuntimeError)):
            model.step(x[:, 0], state)


def test_the_cache_is_written_in_place_only_without_gradients():
    model, x = small(), torch.randn(2, 4, D)
    state = model.initial_state(2)
    _, after = model(x, state)
    assert after.layers[0].data_ptr() != state.layers[0].data_ptr() and not state.layers[0].any()
    with torch.no_grad():
        _, after = model(x, state)
        assert after.layers[0].data_ptr() == state.layers[0].data_ptr()
    assert after.filled == 4 and after.equal_lengths and after.length.tolist() == [4, 4]


def test_training_with_dropout_sees_the_same():
    """Whatever is attended to without dropout is with it: here it drops nothing."""
    model, x = small(), torch.randn(2, 8, D)
    reset = torch.zeros(2, 3, dtype=torch.bool)
    reset[0, 1] = True
    results = []
    for training in (False, True):
        model.train(training)
        model.dropout = 1e-12
        y, state = model(x[:, :4], model.initial_state(2))
        more, state = model(x[:, 4:6], state)
        last, state = model(x[:, 6:7], state)
        results.append((y, more, last, model(x[:, :3], None)[0], model(x[:, :3], None, reset)[0]))
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


STORM = TransformerSettings(
    heads=8,
    ffn=2,
    norm="post",
    activation="relu",
    attention_bias=False,
    embedding_norm=True,
    norm_eps=1e-6,
    initialization="torch",
)


@pytest.mark.parametrize("shape", [None, (4, 4), (4, 6), (2, 1, 4, 6)])  # None: causal
def test_attention_with_dropout_is_torchs_where_nothing_is_dropped(shape):
    mask = None if shape is None else torch.rand(shape) < 0.5
    if mask is not None:
        mask[..., 0] = True
    places = 4 if mask is None else mask.shape[-1]
    q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64, requires_grad=True) for n in (4, places, places))
    want = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    got = _attention_with_dropout(q, k, v, mask, 0.0)
    assert_close(got, want)
    weight = torch.randn_like(want)
    assert_close(torch.autograd.grad(got, (q, k, v), weight), torch.autograd.grad(want, (q, k, v), weight))


def test_attention_drops_weights_and_keeps_the_mean():
    """With values that name their places the output is the weights: each is 0 or larger by 1 / (1 - p)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 16, 5), torch.randn(2, 3, 16, 5), torch.eye(16).expand(2, 3, 16, 16)
    want = _attention_with_dropout(q, k, v, None, 0.0)
    got = _attention_with_dropout(q, k, v, None, 0.25)
    kept = got != 0
    assert_close(got[kept], want[kept] / 0.75)
    assert 0.65 < kept.sum() / (want != 0).sum() < 0.85


def test_parameter_counts_and_initialization_of_storm():
    torch.manual_seed(0)
    model = build(STORM.model_copy(update={"width": 512, "layers": 2}), max_length=128, block=1)
    layer = model.layers[0]
    attention, feed_forward, norms = 4 * 512 * 512, 512 * 1024 + 1024 + 1024 * 512 + 512, 2 * 2 * 512
    assert sum(p.numel() for p in layer.parameters()) == 2_100_736 == attention + feed_forward + norms
    assert sum(p.numel() for p in model.parameters()) == 65_536 + 1_024 + 2 * 2_100_736
    assert model.positions.weight.std().item() == pytest.approx(1, rel=0.02)
    for linear in (layer.qkv, layer.out, layer.up, layer.down):
        assert linear.weight.std().item() == pytest.approx((3 * linear.in_features) ** -0.5, rel=0.02)
    assert layer.up.bias.any() and layer.qkv.bias is None and layer.out.bias is None
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-6}


def test_storm_equals_its_blocks_written_out():
    """LayerNorm behind the positions and behind each residual, none at the end; ReLU; no biases in the attention."""
    torch.manual_seed(0)
    model = Transformer(STORM.model_copy(update={"heads": 2}), BackboneSize(D, 2, 0.0, LENGTH, 3)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))

    def norm(x, module):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight + module.bias

    x = 1e-3 * torch.randn(2, 5, D, dtype=torch.float64)  # small: so that the norms' eps counts
    with torch.no_grad():
        model.positions.weight.mul_(1e-3)
    h = norm(x + model.positions.weight[:5], model.embedding_norm)
    for layer in model.layers:
        q, k, v = ((h @ w.T).unflatten(-1, (2, 4)).transpose(1, 2) for w in layer.qkv.weight.chunk(3))
        weight = (q @ k.mT / 2).masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf")).softmax(-1)
        h = norm(h + (weight @ v).transpose(1, 2).flatten(2) @ layer.out.weight.T, layer.attention_norm)
        h = norm(h + layer.down((h @ layer.up.weight.T + layer.up.bias).clamp(min=0)), layer.ffn_norm)
    assert_close(model(x, None)[0], h, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
def test_gpt_initialization_with_and_without_attention_biases(bias):
    model = Transformer(TransformerSettings(heads=2, attention_bias=bias), BackboneSize(64, 1, 0.0, LENGTH, 3))
    assert model.layers[0].qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    biases = [module.bias for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert [each is None for each in biases] == [not bias, not bias, False, False]
    assert not any(each.any() for each in biases if each is not None)


def test_a_wrong_name_or_head_count_is_a_usage_error():
    with pytest.raises(UsageError, match="did you mean 'transformer'"):
        resolve("rem", ["backbone.kind=transformr"])
    with pytest.raises(UsageError, match="backbone.heads = 3"):
        build(TransformerSettings(heads=3), 340, 17)
