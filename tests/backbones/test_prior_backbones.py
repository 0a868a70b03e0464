"""Attention priors in both transformers: the whole contract under every prior, attention written out, leaks, kernels.

Axes: B batch, T time (elements), S keys, D width, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

import itertools
import math

import pytest
import test_backbones as contract
import torch
from prior_settings import keys_of, prior_settings
from test_backbones import TINY, B, D, L, N, Q, T, close, inputs, steps, tiny
from torch import nn
from torch.testing import assert_close
from watching import Replayable

from wmcli.backbones import SECTIONS, BackboneSize, build, map_state
from wmcli.backbones.transformer import Transformer, TransformerSettings
from wmcli.backbones.transformer_xl import TransformerXLSettings
from wmcli.errors import UsageError
from wmcli.kernels import attention as kernel
from wmcli.kernels.dispatch import using
from wmcli.nn import attention_prior

pytestmark = pytest.mark.matrix

NUMBERS = {"mean": 2.3, "deviation": 1.7, "span": 3.4, "window": 3}


def combinations(backbone: str) -> list[dict]:
    found = []
    for kind in ("local", "span", "gaussian", "gaussian_span"):
        forms = ("additive",) if kind == "local" else ("additive", "scale")
        masks = ("hard", "ramp", "triangle") if "span" in kind else ("ramp",)
        units = ("token", "step") if backbone == "transformer" else ("token",)
        for form, mask, unit in itertools.product(forms, masks, units):
            found.append(keys_of(kind, form=form, span_mask=mask, unit=unit, **NUMBERS))
    return found


CASES = [(name, prior) for name in ("transformer", "transformer-xl") for prior in combinations(name)]


def name_of(value) -> str:
    return value if isinstance(value, str) else "-".join(str(value[key]) for key in list(value)[:4])


EVERY = pytest.mark.parametrize(("backbone", "prior"), CASES, ids=name_of)
BY_DISTANCE = [
    prior
    for prior in combinations("transformer")
    if (prior.get("form", "additive"), prior["unit"], prior.get("span_mask", "ramp")) == ("additive", "token", "ramp")
]


@pytest.fixture
def make(monkeypatch):
    """Small models with a prior whose heads all differ."""

    def made(backbone: str, prior: dict, dtype=torch.float64, **more):
        settings = {**TINY[backbone], "prior": prior}
        monkeypatch.setitem(TINY, f"{backbone}, with a prior", settings)
        return tiny(f"{backbone}, with a prior", dtype, **more)

    return made


# -- the contract ------------------------------------------------------------------------------------------------------


@EVERY
def test_all_at_once_equals_step_by_step_and_in_chunks(make, backbone, prior):
    model = make(backbone, prior)
    contract.test_steps_equal_forward(model, None)
    contract.test_chunks_with_carried_state_equal_forward(model, None, (4, 3, 4))
    with torch.no_grad():
        contract.test_chunks_with_carried_state_equal_forward(model, None, (4, 7))


@EVERY
def test_resets_start_anew_and_forks_answer_behind_each_block(make, backbone, prior):
    model = make(backbone, prior)
    for how in ("forward", "steps"):
        contract.test_reset_starts_anew(model, None, how, True)
    contract.test_reset_starts_anew(model, None, "forward", False)
    contract.test_fork_answers_queries_behind_each_block(model, None, N, True, False)
    contract.test_fork_answers_queries_behind_each_block(model, None, N, False, True)


@pytest.mark.parametrize("training", [False, True])
@EVERY
def test_later_elements_never_change_earlier_outputs_by_a_bit(make, backbone, prior, training):
    model, x = make(backbone, prior, torch.float32), inputs(B, T, D).float()
    model.train(training)
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[1, 3] = True
    for t in (0, 4, T - 1):
        changed = x.clone()
        changed[:, t] = 3 * inputs(B, D).flip(-1)
        for given in (None, reset):
            y, z = model(x, None, given)[0], model(changed, None, given)[0]
            assert torch.equal(z[:, :t], y[:, :t]) and not torch.equal(z[:, t], y[:, t])


def test_the_leak_is_just_that_and_over_whole_sequences_only(make):
    """With it a later element changes all earlier ones of its sequence. Acting, there is no later one."""
    prior = keys_of("gaussian_span", form="scale", leak=True, **NUMBERS)
    model, tight = make("transformer", prior), make("transformer", {**prior, "leak": False})
    x, t = inputs(B, T, D), 7
    changed = x.clone()
    changed[:, t] = 3 * inputs(B, D).flip(-1)
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, 5] = True
    model.train()
    y, z = model(x, None, reset)[0], model(changed, None, reset)[0]
    moved = (z - y).abs().amax(-1) > 1e-6
    assert moved[1:].all() and moved[0].tolist() == [False] * 5 + [True] * (T - 5)
    moved = (model(changed, None)[0] - model(x, None)[0]).abs().amax(-1) > 1e-6
    assert moved.all()
    start = model.initial_state(B)
    close(model(x, start)[0], tight(x, None)[0])  # with a cache there is no future
    with pytest.raises(UsageError, match=r"prior\.leak = true"):
        model.fork(x[:, None], inputs(Q, D), None)
    whole = model(x, None)[0]
    model.eval()
    close(model(x, None)[0], whole)  # the target's values come of it
    close(model(x, None, reset)[0], tight(x, None, reset)[0])  # so are windows read while acting
    close(model.fork(x[:, None], inputs(Q, D), None)[:2], tight.fork(x[:, None], inputs(Q, D), None)[:2])


@torch.no_grad()
@EVERY
def test_rows_of_different_length_and_a_window_rebuilt(make, backbone, prior):
    """A batch whose rows hold 1, 3, 5 and 7 elements equals the rows by themselves; a window of the last 7 at most."""
    model = make(backbone, prior)
    lengths, x = (1, 3, 5, 7), inputs(4, 7, D)
    reset = torch.zeros(4, 7, dtype=torch.bool)
    for row, length in enumerate(lengths):
        reset[row, 7 - length] = True
    _, state = model(x, model.initial_state(4), reset)
    y, _ = model.step(inputs(4, D) + 0.5, state)
    for row, length in enumerate(lengths):
        mine = torch.cat((x[row, 7 - length :], inputs(4, D)[row : row + 1] + 0.5))[None]
        close(y[row], model(mine, None)[0][0, -1])
    x = inputs(1, 30, D)
    for end in (1, 6, 7, 8, 19, 30):
        window = x[:, max(0, end - 7) : end]
        close(steps(model, window, model.initial_state(1))[0][:, -1], model(window, None)[0][:, -1])


# -- attention written out ---------------------------------------------------------------------------------------------


def prior_by_hand(settings, offset: int, values: dict[str, float]) -> float:
    """The weight e^b of one offset."""
    weight = 1.0
    if "mean" in values:
        weight *= math.exp(-((offset - values["mean"]) ** 2) / (2 * values["deviation"] ** 2))
    if "span" in values:
        length, ramp = values["span"], settings.ramp
        edges = {"hard": offset <= length, "ramp": (ramp + length - offset) / ramp, "triangle": 1 - offset / length}
        weight *= min(max(float(edges[settings.span_mask]), 0.0), 1.0)
    if settings.kind == "local":
        weight *= offset <= settings.window
    return weight


@EVERY
def test_it_equals_attention_written_out(make, backbone, prior):
    """One attention at a time with numbers for scores, and each weight from its formula. Row 1 is reset at 3."""
    model, x, reset = make(backbone, prior), inputs(2, 7, D), torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    settings, heads, width = model.prior.settings, 2, D // 2
    learned = attention_prior.prior_values(model)
    for row, start in ((0, 0), (1, 3)):
        h = x[row, start:]
        count = len(h)
        if backbone == "transformer":
            h = h + model.positions.weight[:count]
        for index, layer in enumerate(model.layers):
            out = torch.zeros(count, D, dtype=torch.float64)
            normed = layer.attention_norm(h)
            q, k, v = layer.qkv(normed).chunk(3, -1)
            for head, i in itertools.product(range(heads), range(count)):
                part = slice(head * width, (head + 1) * width)
                values = {name: value[index, head].item() for name, value in learned.items()}
                shares = []
                for j in range(i + 1):
                    offset = i // L - j // L if settings.unit == "step" else i - j
                    score = (q[i, part] @ k[j, part]) / width**0.5
                    if backbone == "transformer-xl":
                        by_distance = layer.distance.weight[part] @ model._table()[model.memory - min(i - j, 5)]
                        score = (q[i] + layer.u)[part] @ k[j, part] + (q[i] + layer.v)[part] @ by_distance
                        score = score / width**0.5
                    weight = prior_by_hand(settings, offset, values)
                    share = torch.exp(score) * weight if not settings.multiplies else torch.exp(score * weight)
                    shares.append(share if backbone == "transformer" or i - j <= 5 else 0 * share)
                shares = torch.stack(shares)
                out[i, part] = shares @ v[: i + 1, part] / shares.sum()
            h = layer.finish(h[None], out.view(1, count, heads, width).transpose(1, 2))[0]
        got = model(x, None, reset)[0][row, start:]
        assert_close(got, model.norm(h), rtol=1e-9, atol=1e-9)


class Given(nn.Module):
    """A layer of one head with given scores (T, T), whose output names the places it attends to."""

    def __init__(self, score: torch.Tensor) -> None:
        super().__init__()
        self.score = score

    def project(self, x):
        places = len(self.score)
        k = torch.eye(places, dtype=x.dtype)[None, None]
        return self.score.to(x.dtype)[None, None] * places**0.5, torch.stack((k, k), 1)

    def finish(self, x, y):
        return y[:, 0]


def shares(score: torch.Tensor, *, training: bool = False, dropout: float = 0.0, **prior) -> torch.Tensor:
    """What the Transformer's attention gives to each place, (T, T), for scores (T, T)."""
    count = len(score)
    settings = TransformerSettings(heads=1, prior=prior_settings(**prior))
    model = Transformer(settings, BackboneSize(count, 1, dropout, count, 2)).train(training)
    model.layers, model.norm = nn.ModuleList([Given(score)]), nn.Identity()
    return model(torch.zeros(1, count, count), None)[0][0]


NOTHING = torch.zeros(4, 4)
CONTENT = torch.tensor([[1.0, 0, 0, 0], [0, 2, 0, 0], [1, -1, 0.5, 0], [2, 0, -2, 1]])
NEAR_ONE = {"kind": "gaussian", "mean": 1.0, "deviation": 1.0}


def test_golden_shares():
    def check(got, want) -> None:
        assert_close(got, torch.tensor(want), rtol=0, atol=1e-5)

    rows = [
        [1, 0, 0, 0],
        [0.62246, 0.37754, 0, 0],
        [0.27407, 0.45186, 0.27407, 0],
        [0.05763, 0.25827, 0.42582, 0.25827],
    ]
    check(shares(NOTHING, **NEAR_ONE), rows)
    check(shares(NOTHING, kind="gaussian", mean=2.0, deviation=0.5)[3], [0.10648, 0.78678, 0.10648, 0.00026])
    added, scaled = shares(CONTENT, **NEAR_ONE), shares(CONTENT, **NEAR_ONE, form="scale")
    check(added[2:], [[0.54655, 0.12195, 0.33150, 0], [0.29493, 0.17889, 0.03991, 0.48626]])
    check(scaled[2:], [[0.51573, 0.10345, 0.38082, 0], [0.30625, 0.23363, 0.03162, 0.42849]])
    check(shares(NOTHING, kind="span", span_mask="hard", span=2.0)[3], [0, 1 / 3, 1 / 3, 1 / 3])
    check(shares(NOTHING, kind="local", window=2)[3], [0, 1 / 3, 1 / 3, 1 / 3])
    check(shares(NOTHING, kind="span", span=1.0)[3], [0.11111, 0.22222, 0.33333, 0.33333])
    both = shares(NOTHING, **{**NEAR_ONE, "kind": "gaussian_span"}, span_mask="hard", span=2.0)
    check(both[3], [0, 0.27407, 0.45186, 0.27407])
    window = shares(torch.zeros(7, 7), kind="gaussian")[6].flip(0)
    check(window, [0.00000, 0.00000, 0.00019, 0.00634, 0.07719, 0.34593, 0.57035])
    flat = shares(torch.zeros(7, 7), kind="gaussian", form="scale")[6]
    check(flat, [1 / 7] * 7)


def test_golden_shares_of_the_leak():
    triangle = {"kind": "span", "form": "scale", "span_mask": "triangle", "span": 2.0, "leak": True}
    got = shares(torch.ones(4, 4), training=True, **triangle)
    want = [
        [0.47537, 0.17488, 0.17488, 0.17488],
        [0.25895, 0.42693, 0.15706, 0.15706],
        [0.15706, 0.25895, 0.42693, 0.15706],
        [0.15706, 0.15706, 0.25895, 0.42693],
    ]
    assert_close(got, torch.tensor(want), rtol=0, atol=1e-5)
    future = got.triu(1).sum(1)
    assert_close(future, torch.tensor([0.52463, 0.31412, 0.15706, 0]), rtol=0, atol=2e-5)


def test_steps_count_blocks():
    """Of 2 elements here: both of a block have the same offset, and a query's own place in its block counts."""
    got = shares(torch.zeros(6, 6), kind="gaussian", mean=1.0, deviation=0.5, unit="step")
    bias = torch.tensor([-2.0, 0, -2])  # at 0, 1 and 2 steps
    for i, offsets in ((4, [2, 2, 1, 1, 0]), (5, [2, 2, 1, 1, 0, 0])):
        assert_close(got[i, : i + 1], bias[offsets].softmax(0))


# -- dropout, kernels, precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["additive", "scale"])
def test_dropout_drops_shares_and_keeps_the_mean(form):
    torch.manual_seed(0)
    score = torch.randn(40, 40)
    want = shares(score, kind="gaussian", form=form, deviation=20.0)
    got = shares(score, training=True, dropout=0.25, kind="gaussian", form=form, deviation=20.0)
    kept = got != 0
    assert_close(got[kept], want[kept] / 0.75)
    assert 0.7 < kept.sum() / (want != 0).sum() < 0.8


@EVERY
def test_training_with_dropout_sees_the_same(make, backbone, prior):
    """Whatever is attended to without dropout is with it, and gradients are the same: here it drops nothing."""
    model = make(backbone, prior)
    x, reset = inputs(B, 9, D), torch.zeros(B, 3, dtype=torch.bool)
    reset[0, 1] = True
    results = []
    for chance in (0.0, 1e-15):
        model.train(chance > 0)
        for module in (model, *model.layers):
            module.dropout = chance
        y, state = model(x[:, :4], model.initial_state(B))
        z, state = model(x[:, 4:7], state, reset)
        u, state = model.step(x[:, 7], state)
        v, w, _ = model.fork(x[:, 3:].unflatten(1, (2, 3)), x[0, :2], state)
        everything = torch.cat([part.flatten() for part in (y, z, u, v, w, model(x, None)[0])])
        gradients = torch.autograd.grad(everything.square().sum(), list(model.parameters()), allow_unused=True)
        results.append((everything, [each for each in gradients if each is not None]))
    assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prior", BY_DISTANCE, ids=name_of)
@pytest.mark.slow
def test_in_triton_it_is_the_same(make, prior, monkeypatch):
    """Tables by distance go through the kernel, with their gradients."""
    model, x = make("transformer", prior, torch.float32), inputs(B, T, D).float()
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[1, 4] = True
    launches, launch = [], kernel._Attention.forward
    monkeypatch.setattr(kernel._Attention, "forward", lambda *o: (launches.append(1), launch(*o))[1])
    results = []
    for implementation in ("torch", "triton"):
        with using(implementation):
            y, z = model(x, None)[0], model(x, None, reset)[0]
            u, _ = model(x[:, 4:], model(x[:, :4], model.initial_state(B))[1])
        loss = sum((part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in (y, z, u))
        results.append((y, z, u, torch.autograd.grad(loss, list(model.parameters()))))
    assert len(launches) == 4 * len(model.layers)
    assert_close(results[1], results[0], rtol=2e-4, atol=2e-5)
    for (name, _), gradient in zip(model.named_parameters(), results[1][3], strict=True):
        assert gradient.any(), name


def test_the_gradient_of_a_table_is_not_summed_up_in_bfloat16():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 200, 8).bfloat16() for _ in range(3))
    table = torch.randn(2, 200, requires_grad=True)
    weight = torch.randn(2, 2, 200, 8)
    want = (kernel.reference(q.double(), k.double(), v.double(), table) * weight).sum()
    with using("torch"):
        got = (kernel.attention(q, k, v, table) * weight).sum()
    slopes = [torch.autograd.grad(each, table)[0] for each in (want, got)]
    assert (slopes[1] - slopes[0]).abs().max() < 5e-3 * slopes[0].abs().max()


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
@EVERY
def test_autocast_is_close(make, backbone, prior, dropout):
    """Outputs, and the gradients of the prior, which are summed in float32."""
    model, x = make(backbone, prior, torch.float32, width=32, dropout=dropout), inputs(B, T, 32).float()
    parameters = list(model.prior.parameters())
    results = []
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y, state = model(x[:, :-1], model.initial_state(B))
            z, _ = model.step(x[:, -1], state)
            u, _ = model(x, None)
        out = torch.cat([part.float().flatten() for part in (y, z, u)])
        gradients = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True) if parameters else ()
        results.append((out, [each for each in gradients if each is not None]))
    (want, slopes), (got, rough) = results
    assert (got - want).abs().max() < 3e-2 * want.abs().max()
    for slope, each in zip(slopes, rough, strict=True):
        assert each.dtype == torch.float32
        assert (each - slope).abs().max() <= 5e-2 * slope.abs().max()


@torch.no_grad()
@EVERY
def test_a_cuda_graph_could_hold_it(make, backbone, prior):
    model, x, reset = make(backbone, prior), inputs(B, 4, D), torch.zeros(B, 4, dtype=torch.bool)
    with Replayable():
        _, state = model(x, model.initial_state(B), reset)
        _, state = model.step(x[:, 0], state)
        model(x, None)
        model.fork(x[:, None], x[0, :Q], state)


# -- sizes, mistakes ---------------------------------------------------------------------------------------------------


def unizero(**prior) -> Transformer:
    values = {"width": 768, "layers": 2, "dropout": 0.1, "heads": 8, "activation": "gelu_tanh", "prior": prior}
    with torch.device("meta"):
        return build(TransformerSettings.model_validate(values), max_length=20, block=2)


@pytest.mark.parametrize(
    ("kind", "more"), [("none", 0), ("local", 0), ("span", 16), ("gaussian", 32), ("gaussian_span", 48)]
)
def test_parameter_counts_of_unizero(kind, more):
    model = unizero(kind=kind)
    count = sum(parameter.numel() for parameter in model.parameters())
    attention, feed_forward, norms = 4 * (768**2 + 768), 2 * 768 * 3072 + 3072 + 768, 2 * 2 * 768
    assert attention + feed_forward + norms == 7_087_872
    assert count - model.positions.weight.numel() == 14_177_280 + more == 2 * 7_087_872 + 1_536 + more
    assert model.positions.weight.numel() == 15_360


def test_gelu_tanh_is_its_formula():
    layer = Transformer(TransformerSettings(heads=2, activation="gelu_tanh"), BackboneSize(D, 1, 0.0, T, L)).layers[0]
    x = torch.linspace(-5, 5, 41)
    want = 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert_close(layer.activation(x), want)
    assert not torch.allclose(layer.activation(x), nn.functional.gelu(x), atol=1e-5, rtol=0)


def test_without_a_prior_nothing_is_added():
    """No parameter, no other random numbers, and attention called as without the setting."""
    for name in ("transformer", "transformer-xl"):
        model = tiny(name)
        assert model.prior is None and not any("prior" in key for key in model.state_dict())
        state = torch.get_rng_state()
        values = {"width": D, "layers": 2, **TINY[name]}
        with_prior = {**values, "prior": {"kind": "gaussian", "mean": 2.0}}
        torch.set_rng_state(state)
        other = build(SECTIONS[name].model_validate(with_prior), max_length=48, block=L)
        torch.set_rng_state(state)
        plain = build(SECTIONS[name].model_validate(values), max_length=48, block=L)
        shared = {key: value for key, value in other.state_dict().items() if not key.startswith("prior.")}
        assert_close(shared, dict(plain.state_dict()), rtol=0, atol=0)


def test_states_are_those_of_any_transformer(make):
    """A prior leaves nothing in the state, so what gathers, clones or records states need not know of it."""
    for backbone in ("transformer", "transformer-xl"):
        shapes = []
        for model in (tiny(backbone), make(backbone, keys_of("gaussian_span", **NUMBERS))):
            shapes.append([])
            map_state(lambda leaf, into=shapes[-1]: into.append(leaf.shape), model.initial_state(B))
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ({"unit": "step"}, r"backbone\.prior\.unit = step"),
        ({"form": "scale", "leak": True}, r"backbone\.prior\.leak = true"),
        ({"mean": 5.5}, r"backbone\.prior\.mean = 5\.5: the largest offset here is 5"),
    ],
)
def test_options_that_transformer_xl_refuses(prior, message):
    values = {"width": D, "heads": 2, "memory_length": 5, "prior": {"kind": "gaussian", **prior}}
    with pytest.raises(UsageError, match=message):
        build(TransformerXLSettings.model_validate(values), 48, L)


def test_offsets_that_a_transformer_has():
    """max_length elements, or so many blocks of them, the last one begun."""
    for unit, reach in (("token", 20), ("step", 7)):
        prior = {"kind": "gaussian", "unit": unit, "mean": 2.0}
        values = TransformerSettings.model_validate({"width": D, "layers": 3, "heads": 2, "prior": prior})
        assert build(values, max_length=20, block=3).prior().shape == (3, 2, reach)
